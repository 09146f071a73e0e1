"""Checks of a list: the whole model under autocast, against float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .judge import Thresholds
from .makers import Makers
from .precision_advice import LayerAdvice, PrecisionCheck
from .recast import DTYPES, first_line
from .runs import Outcome, Steps

_SMALLER = 2**4  # a loss scale after gradients have overflowed
_STEP = 8  # one of so many of the remaining layers is added where values differ


class Verifier:
    """Runs a model with lists of modules in float32, and widens a list that fails.

    Args:
        steps: Runs the model.
        rows: What is known of the layers.
        limits: The thresholds.
        max_rounds: How often a list may be widened, or the loss scale lowered.
    """

    def __init__(
        self,
        steps: Steps,
        rows: Sequence[LayerAdvice],
        limits: Thresholds,
        max_rounds: int,
    ) -> None:
        self._steps = steps
        self._rows = rows
        self._limits = limits
        self._max_rounds = max_rounds
        watch = Makers(steps.model)
        self.reference = steps.run(watch)
        self._usual = frozenset(watch.bad)

    def check(self, dtype: str, loss_scale: float) -> PrecisionCheck:
        """Runs a dtype with the list that the rows give for it.

        Args:
            dtype: "float16" or "bfloat16".
            loss_scale: The loss scale to begin with.
        """
        kept = [row.name for row in self._rows if dtype not in row.runs_in]
        widened: list[str] = []
        for runs in range(1, self._max_rounds + 2):
            watch = Makers(self._steps.model, self._usual)
            outcome = self._run(watch, dtype, kept, loss_scale)
            check = self._judged(dtype, kept, outcome, watch, loss_scale)
            check = replace(check, widened=widened, runs=runs)
            if check.passed or runs > self._max_rounds:
                break
            if watch.is_backward and loss_scale > 1:
                loss_scale = max(1.0, loss_scale / _SMALLER)
                continue
            more = [] if check.finite else watch.names()
            more = [n for n in more if n not in kept] or self._worst(dtype, kept)
            if not more:
                break
            kept, widened = [*kept, *more], [*widened, *more]
        return check

    def _run(
        self, watch: Makers, dtype: str, kept: list[str], scale: float
    ) -> Outcome | str:
        """Runs the model; returns in words what it raises."""
        try:
            return self._steps.run(watch, DTYPES[dtype], kept, scale)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return first_line(error)

    def _judged(
        self,
        dtype: str,
        kept: list[str],
        outcome: Outcome | str,
        watch: Makers,
        loss_scale: float,
    ) -> PrecisionCheck:
        if isinstance(outcome, str):
            return PrecisionCheck(dtype, kept, loss_scale, failure=outcome)
        difference = outcome.difference(self.reference)
        gradients = outcome.gradient_difference(self.reference)
        failure = self._failure(outcome, difference, gradients)
        if not outcome.is_finite and not watch.names():
            failure += ", and no module made it: look at the code of the loss"
        return PrecisionCheck(
            dtype=dtype,
            kept=kept,
            loss_scale=loss_scale,
            failure=failure,
            finite=outcome.is_finite,
            loss=outcome.loss,
            loss_difference=difference,
            gradient_difference=gradients,
        )

    def _failure(
        self, outcome: Outcome, difference: float, gradients: float | None
    ) -> str:
        if not outcome.is_finite:
            return "not finite"
        if difference > self._limits.max_loss_difference:
            what = "the loss differs" if outcome.losses else "outputs differ"
            return f"{what} by more than {self._limits.max_loss_difference:.2%}"
        if (gradients or 0.0) > self._limits.max_gradient_difference:
            most = self._limits.max_gradient_difference
            return f"gradients differ by more than {most:.2%}"
        return ""

    def _worst(self, dtype: str, kept: Sequence[str]) -> list[str]:
        """The layers with the largest errors of those that are not kept yet."""
        rest = [row for row in self._rows if row.name not in kept]
        rest.sort(key=lambda row: -row.ratios.get(dtype, 0.0))
        return [row.name for row in rest[: max(1, len(rest) // _STEP)]]
