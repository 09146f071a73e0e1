"""The root's hooks, where the root's own call is compiled with what is around it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Steps(Protocol):
    """Who tells the steps of a model apart; see `steps.StepHooks`."""

    @property
    def model(self) -> nn.Module | None: ...

    def before_root(self, module: nn.Module, args: object) -> None: ...

    def root_ended(self, module: nn.Module, args: object, output: object) -> None: ...

    def note_loss(self, has_loss: bool) -> None: ...

    def close_root(self, has_raised: bool = False) -> None: ...


class CompiledStepBoundary:
    """What the operators call in place of the root's hooks; see `traced.trace_root`.

    Args:
        steps: Whose hooks they are.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._is_running = False

    def before(self) -> None:
        """Stands for `before_root`."""
        self._is_running = True
        model = self._steps.model
        if model is not None:
            with torch.enable_grad():  # as in `ended`
                self._steps.before_root(model, None)

    def returned(self, has_loss: bool) -> None:
        """Stands for what `after_root` does once the frame is recorded.

        Args:
            has_loss: Whether a loss is among what the root returned.
        """
        self._steps.note_loss(has_loss)
        self._steps.close_root()

    def ended(self) -> None:
        """Stands for `root_ended`."""
        # Compiled code runs without autograd.
        with torch.enable_grad():
            self._end()

    def evaluation_ended(self) -> None:
        """Stands for `root_ended`, in code that was compiled without autograd."""
        with torch.no_grad():
            self._end()

    def raised(self, is_root: bool) -> None:
        """Ends the root's call where a frame in its compiled code has raised."""
        if is_root:
            self._steps.close_root(has_raised=True)
        if self._is_running:
            self.ended()

    def _end(self) -> None:
        self._is_running = False
        model = self._steps.model
        if model is not None:
            self._steps.root_ended(model, None, None)
