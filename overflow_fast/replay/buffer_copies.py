"""Copies of small buffers, as they are when a step begins."""

from __future__ import annotations

import torch
from torch import nn

from ..core.tensor_copies import copy_tensors
from ..torch_internals.module_internals import own_buffers

_MAX_BYTES = 2**20  # of a buffer that is copied

_Tables = list[dict[str, torch.Tensor | None]]


class BufferCopies:
    """The small buffers of models, as they were when a step's first forward began."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._tables: dict[int, tuple[int, _Tables]] = {}
        self._copied: set[int] = set()  # the models whose copies are of this step

    def clear(self) -> None:
        """Makes the next forward copy them again."""
        self._copied.clear()

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers, and what was in them."""
        return [each for key in self._copied for each in self._kept.get(key, [])]

    def _tables_of(self, model: nn.Module) -> _Tables:
        """The dicts of a model's buffers, looked up again in steps 1, 2, 4, 8, ..."""
        key = id(model)
        count, tables = self._tables.get(key, (0, []))
        if count & (count - 1) == 0:
            tables = [own_buffers(m) for m in model.modules() if own_buffers(m)]
        self._tables[key] = count + 1, tables
        return tables

    def take(self, model: nn.Module) -> None:
        """Copies small buffers when a model's first forward of a step begins."""
        key = id(model)
        if key in self._copied:
            return
        self._copied.add(key)
        buffers = [
            buffer
            for table in self._tables_of(model)
            for buffer in table.values()
            if buffer is not None and _is_small(buffer)
        ]
        if not buffers:
            return
        old = {id(tensor): copy for tensor, copy in self._kept.get(key, [])}
        copies = copy_tensors(buffers, [old.get(id(each)) for each in buffers])
        self._kept[key] = list(zip(buffers, copies, strict=True))


def _is_small(buffer: torch.Tensor) -> bool:
    is_plain = buffer.layout is torch.strided and not buffer.is_meta
    return is_plain and 0 < buffer.nbytes <= _MAX_BYTES
