"""Runs of a model on copies of its weights: in float32, and under autocast."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...base.losses import model_loss_in
from ...base.tensors import devices_of
from ...detector.observers import without_observers
from ...explainer.effects.rule import EffectRule, StoppedError
from ...explainer.tensor_kinds import floats_in
from ...guard.undo.random import RandomStates
from ...precision.keep_in_fp32 import keep_in_fp32
from ...scanner.ops import are_nonfinite
from ...torch_internals.compiled_calls import uncompiled_calls
from ...torch_internals.module_internals import is_dropout
from .again import RelativeDifference
from .copies import copied_batch, on_copies

Gradients = dict[int, torch.Tensor]


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        losses: The loss of each batch; empty if there is none.
        outputs: The floats returned for each batch, if there is no loss.
        gradients: The gradients of the parameters by name, summed over the batches.
        has_drawn: Whether the model has drawn random numbers.
    """

    losses: list[float] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    has_drawn: bool = False

    @property
    def loss(self) -> float | None:
        """The mean of the losses, or None."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def is_finite(self) -> bool:
        """True if losses, gradients and, without a loss, outputs are finite."""
        is_bad = any(are_nonfinite([*self.outputs, *self.gradients.values()]))
        return all(map(math.isfinite, self.losses)) and not is_bad

    def difference(self, reference: RunResult) -> float:
        """The relative difference of the losses, or of outputs where there are none."""
        found = RelativeDifference()
        own = [*map(torch.tensor, self.losses), *self.outputs]
        its = [*map(torch.tensor, reference.losses), *reference.outputs]
        for value, golden in zip(own, its, strict=True):
            found.add(value, golden)
        return found.relative

    def gradient_difference(self, reference: RunResult) -> float | None:
        """The relative L2 difference of all gradients, or None without gradients."""
        found = RelativeDifference()
        for name, golden in reference.gradients.items():
            found.add(self.gradients[name], golden)
        return found.relative if reference.gradients else None


class BatchRuns:
    """Batches that a model can be run on again and again.

    Each run begins with the model's own weights and the same random states, and
    leaves no trace.

    Args:
        model: The model.
        function: Takes a batch, and returns the loss or what the model returns.
        batches: The batches.
        has_loss: Whether the function was given to compute a loss.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any], Any],
        batches: Sequence[Any],
        has_loss: bool,
    ) -> None:
        self.model = model
        self._function = function
        self.batches = batches
        self._has_loss = has_loss
        self._has_run = False
        self._devices = devices_of([model])
        self.device = self._devices[0].type if self._devices else "cpu"

    def run(
        self,
        watch: AbstractContextManager[object],
        autocast: torch.dtype | None = None,
        names: Sequence[str] = (),
        scale: float = 1.0,
        dropout: bool = False,
        on_gradients: Callable[[Gradients], None] | None = None,
    ) -> RunResult:
        """Runs forward and backward on every batch.

        Args:
            watch: Is entered around the run.
            autocast: The dtype of autocast; None for float32.
            names: The modules that `keep_in_fp32` keeps.
            scale: The loss scale; it is taken out of the gradients again.
            dropout: Whether dropout modules work as the model has them, or not.
            on_gradients: Is given the gradients of each batch by parameters' ids.
        """
        outcome = RunResult()
        with ExitStack() as stack:
            stack.enter_context(_told_of_effects())
            stack.enter_context(_calm(self.model))
            stack.enter_context(watch)
            stack.enter_context(on_copies(self.model))
            if not dropout:
                for module in filter(is_dropout, self.model.modules()):
                    module.training = False
            if names:
                stack.enter_context(keep_in_fp32(self.model, names))
            before = RandomStates(self._devices)
            if self._has_run:  # what the first run has done is not done again
                stack.enter_context(EffectRule().applied(math.inf))
            self._has_run = True
            for batch in self.batches:
                self._run_one(outcome, batch, autocast, scale, on_gradients)
            outcome.has_drawn = bool(before.drawn())
        return outcome

    def _run_one(
        self,
        outcome: RunResult,
        batch: Any,
        dtype: torch.dtype | None,
        scale: float,
        on_gradients: Callable[[Gradients], None] | None,
    ) -> None:
        with torch.autocast(self.device, dtype=dtype, enabled=dtype is not None):
            output = self._function(copied_batch(batch))
        loss = self._loss_of(output)
        if loss is None:
            outcome.outputs += [each.detach() for each in floats_in(output)]
            return
        outcome.losses.append(float(loss.detach()))
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not named or not loss.requires_grad:
            return
        # `backward()` would add to the gradients of what else the loss is made of.
        found = torch.autograd.grad(
            loss.float() * scale, list(named.values()), allow_unused=True
        )
        gradients = {n: g for n, g in zip(named, found, strict=True) if g is not None}
        if on_gradients is not None:
            on_gradients({id(named[name]): g for name, g in gradients.items()})
        for name, gradient in gradients.items():
            value = gradient / scale
            known = outcome.gradients.get(name)
            outcome.gradients[name] = value if known is None else known + value

    def _loss_of(self, output: Any) -> torch.Tensor | None:
        if not self._has_loss:
            return model_loss_in(output)
        if not isinstance(output, torch.Tensor) or output.numel() != 1:
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ""
            raise TypeError(
                "loss must return a tensor with one element, got "
                f"{type(output).__name__} {shape}".rstrip()
            )
        return output.reshape(())


@contextlib.contextmanager
def _told_of_effects() -> Iterator[None]:
    try:
        yield
    except StoppedError as error:
        raise ValueError(
            "model and loss must have no effects but on themselves, since they are run "
            f"several times: {error}"
        ) from None


@contextlib.contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Guards, modes and compiled code do not take part in a run."""
    with ExitStack() as stack:
        stack.enter_context(without_observers([model]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled_calls())
        yield
