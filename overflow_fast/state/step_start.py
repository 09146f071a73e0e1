"""The models as they were when a step began, for a skip, a raise or a replay.

Buffers, and frozen parameters, which may hold statistics: small ones are copied when a
step's first forward begins; larger ones once, and again when they have changed. Of
trained weights the versions are noted: one that a forward writes to, as an embedding
with `max_norm` does, is copied from the next step on. Small weights and the plain
attributes of modules are kept in steps 1, 2, 4, 8, ..., and in each step if a forward
was seen to change them since the last of these but one.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import _C
from ..core.modules import is_sharded, modules_in, walk
from ..core.tensors import copy_tensors
from ..torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS
from ..torch_internals.running import graph_task_id, is_recorded
from ..torch_internals.tensor_internals import copy_all
from .objects import ATOMS, BARE, LEFT, Kept, KeptObjects, restore_all
from .snapshot import (
    SMALL,
    KeptTensor,
    are_same_bits,
    is_at,
    is_same_bits,
    memory_of,
    num_bytes,
    write,
)

# Larger frozen parameters are not copied before a change has been seen.
_MAX_FROZEN = 2**20
_TABLES = (MODULES, BUFFERS, PARAMETERS)


class Watched(Protocol):
    """A model that is watched."""

    prefix: str
    has_submodule_calls: bool

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it is gone."""

    @property
    def is_attached(self) -> bool:
        """Its hooks are on."""


class StepStart:
    """Models as they were when the first forward of a step began.

    Writes of the user between steps belong to it.

    Args:
        watches: The watched models.
        has_optimizers: Their steps end a step; else its judgement does.
    """

    def __init__(self, watches: Sequence[Watched], has_optimizers: bool) -> None:
        self._has_optimizers = has_optimizers
        self._points = [_Point(watch) for watch in watches]
        self._of_watch = dict(zip(map(id, watches), self._points, strict=True))
        self._num_kept = 0

    # The course of a step.

    def begin(self) -> None:
        """Makes the current state the beginning, until a forward replaces it."""
        for point in self._points:
            point.take(is_firm=False)

    def prepare(self) -> None:
        """Keeps models whose forwards no hook announces."""
        for point in self._points:
            point.prepare()

    def before_forward(self, watch: Watched) -> None:
        """Keeps a model, in a step's first forward.

        What a forward without autograd keeps lasts until a forward with it begins.
        """
        point = self._of_watch[id(watch)]
        if not is_recorded():
            if not point.is_firm:
                point.take(is_firm=torch.is_grad_enabled())
            point.weights.begin_forward()

    def before_run(self) -> None:
        """Keeps all models, where a function begins that calls them."""
        for point in self._points:
            if not (point.is_firm or is_recorded()):
                point.take(is_firm=True)

    def after_forward(self, watch: Watched) -> None:
        """Notes what the forward has written to, by its versions."""
        self._of_watch[id(watch)].end_forward()

    def hold(self, watch: Watched) -> None:
        """Keeps the beginning before a non-finite forward without autograd."""
        point = self._of_watch[id(watch)]
        point.is_firm = point.is_taken

    def end_judgement(self) -> None:
        """Ends a judged step, unless an optimizer's step has yet to end it.

        A closure may be judged several times in one.
        """
        if not self._has_optimizers:
            self.end()

    def end(self) -> None:
        """Lets the next forward begin a step: this one was not made."""
        for point in self._points:
            point.is_firm = False

    def keep(self) -> None:
        """Ends a step that was made.

        Incurs a CPU-GPU sync after steps 1, 2, 4, 8, ... where large buffers have not
        been seen to change.
        """
        self._num_kept += 1
        compares = self._num_kept & (self._num_kept - 1) == 0
        for point in self._points:
            point.keep(compares)

    # A skipped step, or one that raises.

    def restore(self) -> list[str]:
        """Restores buffers, and the weights that a forward has written to.

        Incurs a CPU-GPU sync for each. The next forward begins a step. During
        backward, recomputed checkpoints may change the buffers again.

        Returns:
            A sentence for each tensor that stays changed.
        """
        texts = [text for point in self._points for text in point.restore()]
        for point in self._points:
            point.release(is_over=graph_task_id() < 0)
        return texts

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores them where a flag on the device is not 0. Does not incur a sync."""
        for point in self._points:
            point.restore_where(flag)

    # A replay.

    def rewind(self) -> None:
        """Makes the models what they were when the step began, as far as is known.

        A snapshot restores them afterwards.
        """
        for point in self._points:
            point.rewind()

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that are copied, and what was in them."""
        return [pair for point in self._points for pair in point.pairs()]

    def is_written_by_forwards(self, tensor: torch.Tensor) -> bool:
        """True for a trained weight that a forward was seen to write to."""
        return any(point.weights.is_known(tensor) for point in self._points)

    def held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor when the step began; None if that is not known."""
        return next((value for own, value in self.pairs() if own is tensor), None)

    def written_in_step(self, tensor: torch.Tensor) -> bool:
        """True for a trained weight that this step's forward has written to.

        Incurs a CPU-GPU sync if the weight is copied.
        """
        return any(point.weights.is_written(tensor) for point in self._points)


class _Point:
    """The beginning of the step of one model.

    Attributes:
        weights: Its trained weights.
        is_taken: It is complete.
        is_firm: No further forward of this step replaces it.
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._model: weakref.ref[nn.Module] | None = None
        self._tables: list[dict[str, Any]] = []
        self._held: list[Any] = []  # what the tables hold
        self._own_tables: list[dict[str, Any]] = []  # those that hold entries
        self._own_held: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._are_trained: list[bool] = []
        self._known: dict[tuple[int, str], _Entry] = {}
        self._entries: list[_Entry] = []
        self._steady = _Steady([])
        self.weights = _Weights()
        self._attributes: list[KeptAttributes] = []
        # Modules whose attributes are kept in each step; those seen to change since.
        self._changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._was_firm = False
        self._num_taken = 0
        self._is_full = False
        self.is_taken = False
        self.is_firm = False

    def take(self, is_firm: bool) -> None:
        """Makes the current state the beginning of the step."""
        self.is_taken = self.is_firm = False  # until all of it is copied
        model = self._watch.model
        if model is None:
            self._forget()
            return
        self._num_taken += 1
        self._is_full = self._num_taken & (self._num_taken - 1) == 0
        if not self._is_full and self._holds_same() and self._is_same_model(model):
            self._retake()
        else:
            self._walk(model)
        self.weights.take(self._is_full)
        self._attributes = []
        if self._is_full and self._was_firm:  # without autograd it may not change
            self._changing, self._changed = self._changed, weakref.WeakSet()
            self._was_firm = False
        if self._is_full or len(self._changing):
            modules = modules_in(model) if self._is_full else list(self._changing)
            kept = filter(KeptAttributes.are_kept, modules)
            self._attributes = list(map(KeptAttributes, kept))
        self.is_taken, self.is_firm = True, is_firm
        self._was_firm |= is_firm

    def _holds_same(self) -> bool:
        return _C.hold(self._tables, self._held)

    def _is_same_model(self, model: nn.Module) -> bool:
        is_same = self._model is not None and self._model() is model
        return is_same and self._are_trained == self._read_trained()

    def _read_trained(self) -> list[bool]:
        return _C.require_grad(self._parameters)

    def _retake(self) -> None:
        """Copies what is copied in each step: the model holds the same tensors."""
        if self._steady.take():
            return
        self._steady.settle()
        with torch.no_grad():
            for entry in self._entries:
                entry.begin(entry.current())
            self._copy()

    @torch.no_grad()
    def _walk(self, model: nn.Module) -> None:
        """Looks for the tensors of the model."""
        if self._model is None or self._model() is not model:
            # Tables hold submodules, which are to go with the model.
            self._model = weakref.ref(model, self._forget_if_running)
        slots, self._tables, weights = _slots(model)
        self._held = _values(self._tables)
        tables = {id(t): t for m, n, _ in slots if (t := m.__dict__[n]) is not None}
        self._own_tables = list(tables.values())
        self._own_held = _values(self._own_tables)
        self._parameters = [t for t in self._held if isinstance(t, nn.Parameter)]
        self._are_trained = self._read_trained()
        self._entries = [self._begin(*slot) for slot in slots]
        if len(self._known) > len(self._entries):
            self._known = {entry.slot: entry for entry in self._entries}
        self._copy()
        self.weights.set([] if is_sharded(model) else weights)

    def _begin(self, module: nn.Module, table: str, name: str) -> _Entry:
        entry = self._known.get((id(module), name))
        if entry is None or entry.module() is not module or entry.table != table:
            entry = self._known[id(module), name] = _Entry(module, table, name)
        entry.begin(module.__dict__[table][name])
        return entry

    def _copy(self) -> None:
        """Copies contents into the copies that there are."""
        wanted = [e for e in self._entries if e.needs_copy()]
        tensors = [e.tensor for e in wanted if e.tensor is not None]
        copies = copy_tensors(tensors, [e.copy for e in wanted])
        for entry, copy in zip(wanted, copies, strict=True):
            entry.copy = copy
        self._steady = _Steady(self._entries)

    def _forget_if_running(
        self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not is_finalizing():  # when it is, names of this file may be gone
            self._forget()

    def _forget(self) -> None:
        self._tables, self._held, self._parameters, self._entries = [], [], [], []
        self._own_tables, self._own_held = [], []
        self._steady, self._attributes = _Steady([]), []
        self._known.clear()
        self.weights.set([])
        self.is_taken = self.is_firm = False

    def end_forward(self) -> None:
        """Notes what a forward has written to."""
        if not self.is_taken:
            return
        self._steady.note_writes()
        self.weights.end_forward()
        for kept in self._attributes:
            module = kept.module()
            if module is None or module in self._changed or not kept.has_changed():
                continue
            self._changed.add(module)
            self._changing.add(module)

    @torch.no_grad()
    def keep(self, compares: bool) -> None:
        """Ends the step, which was made."""
        if _C.hold(self._own_tables, self._own_held):
            self._steady.note_changes(compares)
        else:
            self._steady.settle()
            for entry in self._entries:
                entry.end(compares)
            self._entries, self._held, self._parameters = [], [], []
            self._steady = _Steady([])
        self.is_taken = self.is_firm = False
        self.prepare()

    def release(self, is_over: bool) -> None:
        """Lets the next forward begin a step."""
        self.is_firm = False
        if is_over:
            self.is_taken = False
            self.prepare()

    def prepare(self) -> None:
        """Keeps the model where no hook announces a forward."""
        is_announced = self._watch.is_attached and not self._watch.has_submodule_calls
        if not (self.is_taken or is_announced):
            self.take(is_firm=False)

    @torch.no_grad()
    def restore(self) -> Iterator[str]:
        """Restores the tensors; yields a sentence for each that stays changed."""
        if not self.is_taken:
            return
        self._remove_new()
        self._steady.settle()
        for entry in self._entries:
            try:
                why = entry.restore()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                kind = "buffer" if entry.table == BUFFERS else "frozen parameter"
                yield self._sentence(kind, entry.module(), entry.name, why)
        restored = set()
        for module, name, why in self.weights.restore():
            restored.add(module)
            if why:
                yield self._sentence("weight", module, name, why)
        for kept in self._attributes:
            # A flag such as `is_initialized` belongs to the weights.
            if kept.module() in restored:
                kept.restore()

    def _remove_new(self) -> None:
        """Removes buffers that the forward has registered."""
        model = self._watch.model
        known = {entry.slot for entry in self._entries}
        for module, table, name in [] if model is None else _slots(model)[0]:
            if table == BUFFERS and (id(module), name) not in known:
                del module.__dict__[table][name]

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the buffers where a flag on the device is not 0."""
        self._steady.settle()
        for entry in self._entries if self.is_taken else []:
            entry.restore_where(flag)

    @torch.no_grad()
    def rewind(self) -> None:
        """Makes the model what it was, as far as is known."""
        if not self.is_taken:
            return
        for kept in self._attributes:
            kept.restore()
        for entry in self._entries:
            entry.rewind()
        self.weights.rewind()

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that are copied, and what was in them."""
        if not self.is_taken:
            return []
        return [*filter(None, (e.pair() for e in self._entries)), *self.weights.pairs()]

    def _sentence(
        self, kind: str, module: nn.Module | None, name: str, why: str
    ) -> str:
        watch, model = self._watch, self._watch.model
        for fqn, each in [] if model is None else walk(model):
            if each is module:
                name = f"{watch.prefix}{fqn}{'.' * bool(fqn)}{name}"
                break
        return f"The {kind} {name} could not be put back ({why})."


class _Steady:
    """Entries whose tensors stay the same ones: what is left to do for them in a step.

    Reads of many tensors are single expressions here: they run in each step.

    Args:
        entries: The entries; they have begun, and are copied.
    """

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = [e for e in entries if e.tensor is not None]
        self._tensors = [e.tensor for e in self._entries if e.tensor is not None]
        self._is_plain = all(e.is_plain for e in self._entries)
        if not self._is_plain:
            return
        self._places = self._read_places()
        self._versions = _C.versions_of(self._tensors)
        each_step = [e for e in self._entries if e.is_certain and e.copy is not None]
        self._sources = [e.tensor for e in each_step if e.tensor is not None]
        self._copies = [e.copy for e in each_step if e.copy is not None]
        self._others = [(i, e) for i, e in enumerate(self._entries) if not e.is_certain]
        self._after = self._versions  # after the last forward

    def _read_places(self) -> list[tuple[int, torch.Size]]:
        return [(t.data_ptr(), t.shape) for t in self._tensors]

    def take(self) -> bool:
        """Copies what is to be copied; returns False if it has to be looked at anew."""
        if not self._is_plain or self._places != self._read_places():
            return False
        versions = _C.versions_of(self._tensors)
        if any(
            e.is_certain or versions[i] != self._versions[i] for i, e in self._others
        ):
            return False
        if self._copies:
            with torch.no_grad():
                copy_all(self._copies, self._sources)
        self._versions, self._after = versions, versions
        return True

    def note_writes(self) -> None:
        """Notes what a forward has written to."""
        if not self._is_plain:
            for entry in self._entries:
                entry.end_forward()
            return
        self._after = _C.versions_of(self._tensors)

    def settle(self) -> None:
        """Passes to the entries what was noted for all of them at once."""
        if self._is_plain:
            both = zip(self._entries, self._versions, self._after, strict=True)
            for entry, before, after in both:
                entry.version, entry.is_written = before, after != before

    def note_changes(self, compares: bool) -> None:
        """Notes which of the large tensors a step has changed."""
        others = enumerate(self._entries) if not self._is_plain else self._others
        for place, entry in others:
            if self._is_plain:
                entry.version = self._versions[place]
            entry.note_change(compares)


class _Weights:
    """The trained weights of a model: which of them forwards write to."""

    def __init__(self) -> None:
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self._weights: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._copies: dict[int, torch.Tensor] = {}  # by their places in the list
        self._written: set[int] = set()  # in this step
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # in any step, by id

    def set(self, found: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        """Sets which weights there are."""
        self._owners = [(weakref.ref(module), name) for module, name, _ in found]
        self._weights = [weight for _, _, weight in found]
        self._copies, self._written, self._versions = {}, set(), []

    def take(self, is_full: bool) -> None:
        """Copies the small ones, or only those that forwards write to."""
        self._written, self._versions = set(), []
        if not (is_full or self._known):  # most steps
            self._copies = {}
            return
        places = [
            place
            for place, weight in enumerate(self._weights)
            if self.is_known(weight) or (is_full and _is_small(weight))
        ]
        earlier = [self._copies.get(place) for place in places]
        copies = copy_tensors([self._weights[place] for place in places], earlier)
        self._copies = dict(zip(places, copies, strict=True))

    def begin_forward(self) -> None:
        """Notes the versions before a forward.

        What was written to between two forwards of a step, as by an optimizer whose
        closure is called several times, is not as the step began any more.
        """
        versions = _C.versions_of(self._weights)
        if self._versions and versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            for place in [place for place, (now, before) in pairs if now != before]:
                self._copies.pop(place, None)
        self._versions = versions

    def end_forward(self) -> None:
        """Notes what the forward has written to."""
        versions = _C.versions_of(self._weights)
        if versions == self._versions or not self._versions:
            return
        pairs = enumerate(zip(versions, self._versions, strict=True))
        for place in [place for place, (now, before) in pairs if now != before]:
            weight = self._weights[place]
            self._written.add(place)
            self._known[id(weight)] = weakref.ref(weight)
        self._versions = versions

    def is_known(self, weight: torch.Tensor) -> bool:
        """True if a forward was seen to write to it."""
        known = self._known.get(id(weight))
        return known is not None and known() is weight

    def is_written(self, weight: torch.Tensor) -> bool:
        """True if this step's forward has written to it."""
        return any(self._weights[place] is weight for place in self._places_written())

    def _places_written(self) -> list[int]:
        """The places of those that were written to; by `.data`, no version tells."""
        if not self._versions:  # no forward has begun
            return []
        versions = _C.versions_of(self._weights) if self._copies else []
        asked = [i for i in self._copies if versions[i] == self._versions[i]]
        are_same = are_same_bits([(self._copies[i], self._weights[i]) for i in asked])
        silent = {i for i, is_same in zip(asked, are_same, strict=True) if not is_same}
        return sorted(self._written | silent)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights that are copied, and what was in them."""
        return [(self._weights[place], copy) for place, copy in self._copies.items()]

    def rewind(self) -> None:
        """Makes what forwards have written to what it was, as far as is known."""
        for place in self._places_written():
            if place in self._copies:
                write(self._weights[place], self._copies[place])

    def restore(self) -> Iterator[tuple[nn.Module | None, str, str]]:
        """Restores what forwards have written to; yields why one stays changed."""
        self._put_in_place()
        for place in self._places_written():
            reference, name = self._owners[place]
            why = ""
            if place in self._copies:
                write(self._weights[place], self._copies[place])
            else:
                why = "the forward wrote to it, and what it held before is not known"
            yield reference(), name, why

    def _put_in_place(self) -> None:
        """Puts weights back that a forward has replaced by others."""
        for weight, (reference, name) in zip(self._weights, self._owners, strict=True):
            module = reference()
            table = {} if module is None else module.__dict__[PARAMETERS]
            now = table.get(name)
            if now is not weight and type(now) is type(weight) is nn.Parameter:
                table[name] = weight


class _Entry:
    """One of a module's buffers or frozen parameters.

    Args:
        module: The module. It is held weakly.
        table: The attribute of the module that holds it: its buffers or parameters.
        name: Its name there.

    Attributes:
        slot: Identifies the entry: the module's id, and the name.
        copy: The copy of its contents, or None.
        tensor: The tensor, from the step's beginning on.
        version: How often the tensor had been written to then.
        is_written: In place, by this step's forward.
    """

    def __init__(self, module: nn.Module, table: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.slot = id(module), name
        self.table = table
        self.name = name
        self.copy: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self.version: int | None = None
        self.is_written = False
        self._copied: weakref.ref[torch.Tensor] | None = None  # the copy's original
        self._home: weakref.ref[torch.Tensor] | None = None  # the last step's tensor
        self._changes = False
        self._is_replaced = False
        self._memory: torch.Tensor | None = None  # the tensor's memory
        self._was_lazy = False

    def begin(self, tensor: torch.Tensor | None) -> None:
        """Notes which tensor the entry holds now."""
        self.tensor = tensor
        self._was_lazy = tensor is not None and is_lazy(tensor)
        self.is_written = False
        self._memory = None if tensor is None else memory_of(tensor)
        if self._home is None and tensor is not None:
            self._home = weakref.ref(tensor)

    @property
    def is_plain(self) -> bool:
        """True for a tensor that can be read along with many others."""
        tensor = self.tensor
        if tensor is None or self._was_lazy or self._memory is None:
            return False
        return not (tensor.is_meta or tensor.is_inference())

    def needs_copy(self) -> bool:
        """Returns True if the contents have to be copied for this step."""
        tensor = self.tensor
        if tensor is None or self._was_lazy or tensor.is_meta:
            self.copy = self._copied = None
            return False
        version = _C.version_of(tensor)
        if not self.is_certain:
            is_known = self._copied is not None and self._copied() is tensor
            if is_known and version is not None and version == self.version:
                return False
            if self.table == PARAMETERS and num_bytes(tensor) > _MAX_FROZEN:
                self._remember(version)
                self.copy = None
                return False
        self._remember(version)
        return True

    def _remember(self, version: int | None) -> None:
        assert self.tensor is not None
        self._copied, self.version = weakref.ref(self.tensor), version

    def end_forward(self) -> None:
        """Notes whether a forward has written to the tensor."""
        if self.tensor is not None and not self._was_lazy:
            self.is_written |= _C.version_of(self.tensor) != self.version

    def end(self, compares: bool) -> None:
        """Notes whether a step has changed it, and lets go of the tensor.

        Args:
            compares: Compare the contents with the copy, which syncs.
        """
        before, now = self.tensor, self.current()
        if before is not None and now is before:
            self.note_change(compares)
        elif before is not None:
            self._is_replaced = True
        self.tensor = self._memory = None
        self._home = None if now is None else weakref.ref(now)

    def note_change(self, compares: bool) -> None:
        """Notes whether a step has changed the tensor in place."""
        tensor = self.tensor
        if tensor is None or self._changes or self._was_lazy or tensor.is_meta:
            return
        is_written = _C.version_of(tensor) != self.version
        self._changes = is_written or (compares and not self._is_same(tensor))

    def restore(self) -> str:
        """Restores it. Returns why that failed, or ""."""
        module, before = self.module(), self.tensor
        if module is None:
            return ""
        if self._was_lazy:
            return _reset(module)
        now = self.current()
        if now is not before:
            self._put_in_place(module, now, before)
        if before is None or before.is_meta:
            return ""
        if self._memory is not None and not is_at(before, self._memory):
            before.data = self._memory
        elif now is before and not self._is_replaced:
            pass
        elif not self.is_written:
            return ""  # other code owns its contents since: a batch, say
        return self._restore_contents(module, before)

    def _restore_contents(self, module: nn.Module, before: torch.Tensor) -> str:
        is_written = _C.version_of(before) != self.version
        if self.copy is None:
            return "it is large, and had not changed before" if is_written else ""
        if self._is_same(before):
            return ""
        if not is_written and not self.is_certain:
            return "it was written to without a version change, now or earlier"
        try:
            write(before, self.copy)
        except Exception:  # a layout that cannot be written to
            module.__dict__[self.table][self.name] = _like(before, self.copy.clone())
        self._remember(_C.version_of(before))
        return ""

    def _put_in_place(
        self, module: nn.Module, now: torch.Tensor | None, before: torch.Tensor | None
    ) -> None:
        # functional_call puts tensors in place for one call, and removes them itself.
        is_home = now is not None and self._home is not None and self._home() is now
        is_plain = all(type(each) is nn.Parameter for each in (now, before))
        if not is_home and (is_plain or self.table == BUFFERS):
            module.__dict__[self.table][self.name] = before

    def rewind(self) -> None:
        """Makes it what it was for a replay; a snapshot restores what it is now."""
        module, before = self.module(), self.tensor
        if module is None or before is None or self._was_lazy or before.is_meta:
            return
        now = self.current()
        if now is not before:
            self._put_in_place(module, now, before)
        if self._memory is not None and not is_at(before, self._memory):
            before.data = self._memory
        if self.copy is not None:
            write(before, self.copy)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tensor and what was in it; None if that is not known."""
        is_known = self.tensor is not None and self.copy is not None
        return (self.tensor, self.copy) if is_known else None  # type: ignore[return-value]

    @property
    def is_certain(self) -> bool:
        """True if the copy is of this step, False if it may be older."""
        return self._changes or (
            self.tensor is not None and num_bytes(self.tensor) <= SMALL
        )

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the contents where a flag on the device is not 0."""
        now = self.current()
        if now is None or now is not self.tensor or self.copy is None:
            return
        if self._is_replaced or now.is_meta:
            return
        if self.is_certain or _C.version_of(now) != self.version:
            is_bad = flag.to(now.device, non_blocking=True) != 0
            now.data.copy_(torch.where(is_bad, self.copy, now))

    def current(self) -> torch.Tensor | None:
        """The tensor that the entry holds now."""
        module = self.module()
        table = {} if module is None else module.__dict__[self.table]
        found: torch.Tensor | None = table.get(self.name)
        return found

    def _is_same(self, tensor: torch.Tensor) -> bool:
        return self.copy is None or is_same_bits(self.copy, tensor)


_Slot = tuple[nn.Module, str, str]


def _slots(
    model: nn.Module,
) -> tuple[
    list[_Slot], list[dict[str, Any]], list[tuple[nn.Module, str, torch.Tensor]]
]:
    """Finds the places of a model's buffers and frozen parameters, each once.

    `named_modules()` would take several times as long.

    Returns:
        The places, the dicts of all modules, and the trained weights.
    """
    slots: list[_Slot] = []
    tables: list[dict[str, Any]] = []
    weights: dict[int, tuple[nn.Module, str, torch.Tensor]] = {}
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # TorchScript owns its tensors
        own = module.__dict__
        tables += [own[table] for table in _TABLES]
        slots += [(module, BUFFERS, name) for name in own[BUFFERS]]
        for name, parameter in own[PARAMETERS].items():
            if parameter is None:
                continue
            if not parameter.requires_grad:
                slots.append((module, PARAMETERS, name))
            elif not (is_lazy(parameter) or parameter.is_inference()):
                weights[id(parameter)] = module, name, parameter
        for child in own[MODULES].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return slots, tables, list(weights.values())


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, tables)))


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and 0 < num_bytes(tensor) <= SMALL


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=False)
    return copy


def _reset(module: nn.Module) -> str:
    """Resets lazy statistics that the forward has initialized."""
    reset = getattr(module, "reset_running_stats", None)
    if reset is None:
        return "it was not initialized before this step"
    reset()
    return ""


# The plain attributes of one module, kept cheaply when a step begins.


_MOST_OBJECTS = 64  # in one attribute
_MOST_ITEMS = 1000  # of one container
# Wrappers, whose attributes say what they are about to do.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._")


class KeptAttributes:
    """Numbers, texts, small containers, arrays and tensors, generators, plain objects.

    What is large, or belongs to autograd's graph, is neither held nor restored.

    Args:
        module: The module. It is held weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._values: dict[str, Any] = {}
        self._parts: list[Kept] = []
        self._tensors: list[KeptTensor] = []
        for key, value in vars(module).items():
            if key not in BARE:
                is_kept = type(value) in ATOMS or self._keep(key, value)
                self._values[key] = value if is_kept else LEFT

    @staticmethod
    def are_kept(module: nn.Module) -> bool:
        """True for a module that is no wrapper of another."""
        is_script = isinstance(module, torch.jit.ScriptModule)
        return not is_script and not type(module).__module__.startswith(_WRAPPERS)

    def _keep(self, key: str, value: Any) -> bool:
        """Keeps what can be reached from an attribute, if that is little."""
        objects = KeptObjects()
        objects.add([(key, value)], _MOST_OBJECTS)
        tensors = [tensor for _, tensor in objects.tensors.values()]
        is_little = objects.is_whole and not objects.lost
        if not is_little or objects.num_items > _MOST_ITEMS:
            return False
        if not all(map(_is_small_value, tensors)):
            return False
        self._parts += objects.kept
        self._tensors += [KeptTensor(tensor, is_copied=True) for tensor in tensors]
        return True

    def restore(self) -> None:
        """Makes the attributes what they were."""
        module = self.module()
        if module is None:
            return
        own = vars(module)
        for key in [key for key in own if key not in BARE and key not in self._values]:
            del own[key]
        for key, value in self._values.items():
            if value is not LEFT and own.get(key, LEFT) is not value:
                own[key] = value
        if self._parts:
            restore_all(self._parts)
        for tensor in self._tensors:
            tensor.restore()

    def has_changed(self) -> bool:
        """True if the module has other attributes now. Incurs no CPU-GPU sync."""
        module = self.module()
        if module is None:
            return False
        own = {k: v for k, v in vars(module).items() if k not in BARE}
        if own.keys() != self._values.keys():
            return True
        values = self._values.items()
        if any(own[k] is not v for k, v in values if v is not LEFT):
            return True
        is_written = any(tensor.is_written() for tensor in self._tensors)
        return is_written or any(part.has_changed() for part in self._parts)


def _is_small_value(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or isinstance(tensor, nn.Parameter):
        return False
    return tensor.grad_fn is None and tensor.nbytes <= SMALL
