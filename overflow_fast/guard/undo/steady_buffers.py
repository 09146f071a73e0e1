"""Buffers whose tensors stay the same ones, all of them looked at together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _C
from ...torch_internals.tensor_internals import copy_all
from .buffers import KeptBuffer


class SteadyBuffers:
    """Buffers whose tensors stay the same ones: what is left to do for them in a step.

    Reads of many tensors are single expressions here: they run in each step. What they
    show is noted here alone until `settle()`, which is to be called before a buffer is
    asked for its version, or whether it was written to.

    Args:
        buffers: The buffers; they have begun, and are copied.
    """

    def __init__(self, buffers: Sequence[KeptBuffer]) -> None:
        self._buffers = [e for e in buffers if e.tensor is not None]
        self._tensors = [e.tensor for e in self._buffers if e.tensor is not None]
        self._is_plain = all(e.is_plain for e in self._buffers)
        if not self._is_plain:
            return
        self._places = self._read_places()
        self._versions = _C.versions_of(self._tensors)
        each_step = [e for e in self._buffers if e.is_certain and e.copy is not None]
        self._sources = [e.tensor for e in each_step if e.tensor is not None]
        self._copies = [e.copy for e in each_step if e.copy is not None]
        self._others = [(i, e) for i, e in enumerate(self._buffers) if not e.is_certain]
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
            for buffer in self._buffers:
                buffer.end_forward()
            return
        self._after = _C.versions_of(self._tensors)

    def settle(self) -> None:
        """Passes to the buffers what was noted for all of them at once."""
        if self._is_plain:
            both = zip(self._buffers, self._versions, self._after, strict=True)
            for buffer, before, after in both:
                buffer.version, buffer.is_written = before, after != before

    def note_changes(self, compares: bool) -> None:
        """Notes which of the large tensors a step has changed."""
        others = enumerate(self._buffers) if not self._is_plain else self._others
        for place, buffer in others:
            if self._is_plain:
                buffer.version = self._versions[place]
            buffer.note_change(compares)
