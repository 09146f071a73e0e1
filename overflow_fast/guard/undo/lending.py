"""Models lent to the program's own policy, which may write to them in a bad step.

A policy that is a function gets the report before the step is skipped, and may load a
checkpoint then. The skip puts back what the step's forwards have written; it must leave
what the policy has written:

1. Before the policy is called, a loan begins: each tensor of the models is noted, with
   its memory and its version. Those that the step has copies of are copied once more,
   so that a write that torch does not count, as by `.data`, is found, too.
2. When the policy returns, the loan ends: what is not as it was noted has been written
   by the policy. It becomes the beginning of the step, so that the skip leaves it.
3. Where the policy calls the model itself, the loan ends before the forward, and
   another one begins behind it. What that forward writes, such as running statistics,
   is not taken for the policy's: the skip puts it back with what the step's forwards
   wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ...base.modules import Handles
from .model_restore_point import ModelRestorePoint
from .tensors import KeptTensor


@contextlib.contextmanager
def lent(starts: Sequence[ModelRestorePoint]) -> Iterator[None]:
    """Lends models to code whose own writes are left when the step is undone later.

    Writes of forwards that the code calls are undone. See this file's docstring.

    Args:
        starts: The beginning of the step of each model.
    """
    with Handles() as handles:
        loans = []
        for start in starts:
            if (model := start.model) is not None and start.is_taken:
                loans.append(_Loan(start))
                handles += loans[-1].hooks(model)
        try:
            yield
        finally:
            for loan in loans:
                loan.end()


class _Loan:
    """The loan of one model: its tensors, to notice what is written to them.

    Args:
        start: The beginning of its step.
    """

    def __init__(self, start: ModelRestorePoint) -> None:
        self._start = start
        self.begin()

    def hooks(self, model: nn.Module) -> Handles:
        """Ends the loan before each forward of the model, and begins one behind it."""
        before = model.register_forward_pre_hook(lambda *_: self.begin_forward())
        after = model.register_forward_hook(lambda *_: self.begin(), always_call=True)
        return Handles([before, after])

    def begin_forward(self) -> None:
        """Ends the loan before a forward: what is written from here on is its own."""
        self.end()
        self._start.tensors.begin_forward()

    @torch.no_grad()
    def begin(self) -> None:
        """Notes what the model holds. Copies what the step has copies of."""
        self._start.note_forward()
        copied = {id(tensor) for tensor, _ in self._start.pairs()}
        self._kept = {
            slot: KeptTensor(tensor, is_copied=id(tensor) in copied)
            for slot, tensor in self._start.held().items()
        }

    @torch.no_grad()
    def end(self) -> None:
        """Makes what was written the beginning of the step. Incurs a CPU-GPU sync."""
        changed = {
            slot
            for slot, tensor in self._start.held().items()
            if (kept := self._kept.get(slot)) is None
            or kept.tensor is not tensor
            or kept.was_moved()
            or kept.is_written()
            or kept.has_changed()
        }
        self._start.renew(changed)
