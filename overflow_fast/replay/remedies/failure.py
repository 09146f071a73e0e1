"""The failure that remedies are tried for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..explanation import Explanation
from ..finding import named_row
from ..op_table import OpTable
from ..rows import Row
from ..slice import Culprit, ForwardRows


@dataclass
class Failure:
    """A failure that is explained.

    Attributes:
        found: Its explanation.
        row: The operation that is named, or None.
        place: The place of the call in which it failed.
        bad: The tensor of the batch that is non-finite, or None.
        modules: The names of the modules that ran from the operation on, in order.
        checkpoints: Files of weights that the user gave, the newest last.
        is_compiled: True if the step calls code that was compiled.
    """

    found: Explanation
    row: Row | None
    place: int
    bad: torch.Tensor | None = None
    modules: Sequence[str] = ()
    checkpoints: Sequence[str | os.PathLike[str]] = ()
    is_compiled: bool = False

    @classmethod
    def of(
        cls, found: Explanation, culprit: Culprit, table: OpTable, place: int
    ) -> Failure:
        """Makes the failure of a culprit that is explained.

        Args:
            found: The explanation.
            culprit: The culprit.
            table: The operations of the replay in which it was found.
            place: The place of the call.
        """
        if not isinstance(culprit.source, Row):
            is_of_batch = culprit.source.kind == "batch"
            bad = culprit.source.tensor if is_of_batch else None
            return cls(found, None, place, bad, is_compiled=table.is_compiled)
        rows = ForwardRows(table)
        row = named_row(culprit.source, rows)
        modules = rows.modules_from(row)
        return cls(found, row, place, modules=modules, is_compiled=table.is_compiled)

    @property
    def mark(self) -> tuple[Any, ...]:
        """Its phase, operation, module and line, which tell it from others."""
        found, op = self.found, self.found.op
        if op is None:
            return found.phase, found.tensor
        return found.phase, found.module, op.file, op.line, op.name

    @property
    def is_half(self) -> bool:
        """True if the operation works on float16."""
        op = self.found.op
        tensors = [] if op is None else [*op.outputs, *op.inputs]
        return any(each.dtype == "float16" for each in tensors)
