"""The failure that remedies are tried for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..explanation import Explanation
from ..rows import Row


@dataclass
class Failure:
    """A failure that is explained.

    Attributes:
        found: Its explanation.
        row: The operation that is named, or None.
        place: The place of the call in which it failed.
        bad: The tensor that was non-finite before the step, or None.
        modules: The names of the modules that ran from the operation on, in order.
        checkpoints: Files of weights that the user gave, the newest last.
    """

    found: Explanation
    row: Row | None
    place: int
    bad: torch.Tensor | None = None
    modules: Sequence[str] = ()
    checkpoints: Sequence[str | os.PathLike[str]] = ()

    @property
    def is_half(self) -> bool:
        """True if the operation works on float16."""
        op = self.found.op
        tensors = [] if op is None else [*op.outputs, *op.inputs]
        return any(each.dtype == "float16" for each in tensors)
