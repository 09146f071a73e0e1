"""The kept tensors of a model in one step, all of them looked at together.

Most steps change nothing but the values of buffers. So all versions are read, and all
copies made, in single expressions, for the places that `KeptPlace` describes:

1. `list_tensors()` lists the tensors of places that have begun. `take()` begins a
   further step with the same tensors: it copies what is copied in each step. It returns
   False where a place has to be looked at by itself: `list_tensors()` has to follow.
2. `begin_forward()` and `end_forward()` read the versions of the weights. One whose
   version has risen in between was written to by the forward, and is copied from then
   on. A copy also shows a write that torch does not count, as by `.data`. What other
   code has written between two forwards is no beginning any more: the copy goes.
3. `note_changes()`, behind a step that was made, finds the large buffers that it has
   changed. These are copied from then on.
4. `settle()` hands over to the places what was noted of the buffers. It is called
   before a place is asked for its version, or whether it was written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C
from ...torch_internals.tensor_internals import copy_all
from .kept_place import KeptPlace


class StepTensors:
    """The kept tensors of a model in one step; see this file's docstring."""

    def __init__(self) -> None:
        self.list_tensors([], is_full=False)
        self.begin()

    def list_tensors(self, places: Sequence[KeptPlace], is_full: bool) -> None:
        """Lists the tensors of places that have begun.

        Args:
            places: The places.
            is_full: Weights are copied that are not in the next step.
        """
        known = [(e, e.tensor) for e in places if not e.was_lazy]
        held = [(e, tensor) for e, tensor in known if tensor is not None]
        self._owners = [e for e, _ in held if e.is_trained]
        self._weights = [tensor for e, tensor in held if e.is_trained]
        self._buffers = [e for e, _ in held if not e.is_trained]
        self._tensors = [tensor for e, tensor in held if not e.is_trained]
        copied = [e for e in (*self._buffers, *self._owners) if e.copy is not None]
        certain = [pair for e in copied if e.is_certain and (pair := e.pair())]
        self._sources = [tensor for tensor, _ in certain]
        self._copies = [copy for _, copy in certain]
        self._once = [(i, e) for i, e in enumerate(self._buffers) if not e.is_certain]
        are_plain = all(e.is_plain for e, _ in held) and len(known) == len(places)
        self._is_steady = not is_full and are_plain
        weights = [e.tensor for e in copied if e.is_trained]
        self._compared = [
            *self._tensors,
            *(each for each in weights if each is not None),
        ]
        self._places = self._read_places() if self._is_steady else []
        self._began = [each.version or 0 for each in self._buffers]
        self._after = _C.versions_of(self._tensors)
        self._versions: list[int] = []  # of the weights, where they were read last

    def _read_places(self) -> list[tuple[int, torch.Size]]:
        return [(t.data_ptr(), t.shape) for t in self._compared]

    def begin(self) -> None:
        """Begins a step: no forward has run."""
        self._versions, self._is_running = [], False
        self.end_judgement()

    def end_judgement(self) -> None:
        """Forgets whether other code has written to a weight: what did is judged."""
        self._is_rewritten, self._is_first = False, True

    def take(self) -> bool:
        """Copies what is copied in each step; False if it has to be looked at anew."""
        if not self._is_steady or self._places != self._read_places():
            return False
        versions = _C.versions_of(self._tensors)
        if any(versions[i] != self._began[i] for i, _ in self._once):
            return False
        if self._copies:
            with torch.no_grad():
                copy_all(self._copies, self._sources)
        self._began = self._after = versions
        for each in self._owners:
            each.is_written = False
        return True

    def begin_forward(self) -> None:
        """Notes the versions before a forward.

        What was written to between two forwards of a step, as by an optimizer whose
        closure is called several times, is not as the step began any more.
        """
        versions = _C.versions_of(self._weights)
        if self._versions:
            for place in self._written(versions):
                self._owners[place].copy, self._is_steady = None, False
                self._is_rewritten |= not self._is_first
        self._versions, self._is_running, self._is_first = versions, True, False

    def end_forward(self, waits: bool = False) -> None:
        """Notes what the forward has written to.

        Args:
            waits: See `_written()`. Incurs a CPU-GPU sync only then.
        """
        self._after = _C.versions_of(self._tensors)
        if not self._versions:
            return
        versions = _C.versions_of(self._weights)
        for place in self._written(versions, waits) if self._is_running else ():
            each = self._owners[place]
            self._is_steady &= each.changes
            each.is_written = each.changes = True
        self._versions, self._is_running = versions, False

    def _written(self, versions: list[int], waits: bool = False) -> list[int]:
        """The weights that were written to since they were looked at last.

        Of those that are copied, also by `.data`, unless a forward has written to them.

        Args:
            versions: Those of now.
            waits: Also those on a device, for which the host waits; in clean steps it
                must not, and who has written to these by `.data` is not known.
        """
        pairs = zip(versions, self._versions, strict=True)
        found = []
        if versions != self._versions:
            found = [place for place, (now, last) in enumerate(pairs) if now != last]
        if self._copies:
            found += self._written_unseen(set(found), waits)
        return found

    def _written_unseen(self, found: set[int], waits: bool) -> list[int]:
        is_on_device = waits and any(each.is_cuda for each in self._copies)
        if is_on_device and torch.cuda.is_current_stream_capturing():
            return []  # a capture may not be waited for
        return [
            place
            for place, each in enumerate(self._owners)
            if each.copy is not None and not each.is_written and place not in found
            if waits or each.copy.is_cpu
            if not each.is_same()
        ]

    def were_rewritten(self) -> bool:
        """True if other code was seen to write to a weight since the first forward.

        Incurs a CPU-GPU sync for each weight that is copied.
        """
        if self._is_running or not self._versions:
            return self._is_rewritten
        found = self._written(_C.versions_of(self._weights), waits=True)
        return self._is_rewritten or bool(found)

    def settle(self) -> None:
        """Hands over to the places what was noted for all of them at once.

        Incurs a CPU-GPU sync for each weight that is copied, if a forward has not
        ended: an exception may have left it.
        """
        if self._is_running:
            self.end_forward(waits=True)
            self._is_running = True
        both = zip(self._buffers, self._began, self._after, strict=True)
        for each, before, after in both:
            each.version, each.is_written = before, after != before

    def note_changes(self, compares: bool) -> None:
        """Notes which of the large buffers a step has changed.

        Args:
            compares: Compare the contents with the copy, which syncs.
        """
        for place, each in self._once:
            is_changed = _C.version_of(self._tensors[place]) != self._began[place]
            if is_changed or (compares and not each.is_same()):
                each.changes, self._is_steady = True, False
