"""The seam to compiled code: what its hooks read and its operators call of an owner.

It stands apart from `compiled`, which the first trace of a hook loads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

# Flags of an owner's `plan`: the entries of its frames.
PARAMETERS, CALLS, GRADIENTS, STRICT, ROOT, LOSS, EVALUATED = (1 << i for i in range(7))


class RootHooks(Protocol):
    """The owner of a model's hooks; see `steps.StepHooks`."""

    @property
    def model(self) -> nn.Module | None: ...

    def before_root(self, module: nn.Module, args: object) -> None: ...

    def root_ended(self, module: nn.Module, args: object, output: object) -> None: ...

    def note_loss(self, has_loss: bool) -> None: ...

    def close_root(self, has_raised: bool = False) -> None: ...


class CompiledStepBoundary:
    """The methods that operators call for the root's hooks; see
    `compiled.trace_root`.

    Args:
        steps: The owner of the hooks.
    """

    def __init__(self, steps: RootHooks) -> None:
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
        """Stands for the part of `after_root` behind the recording of the frame.

        Args:
            has_loss: True if the root has returned a loss.
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
