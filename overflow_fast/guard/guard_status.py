"""Reads a guard's counts, costs and coverage; tests the guard, and a state."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..distributed.joinable import GuardJoinable
from ..report.guard_coverage import GuardCoverage
from ..report.report import Cost, NonFiniteError, Report
from ..selftest.fault_results import SelfTestResult
from ..selftest.self_test import Loss, SelfTest
from ..verdict.headroom_table import HeadroomTable
from .arguments import check_int, check_names, reusable
from .guard_log import GuardLog
from .guard_page import write_guard_page
from .state import state_report
from .watched_models import Models, living_models, named_models
from .wrapped_optimizers import optimizers_of


class GuardStatus(GuardLog):
    """The readings and tests of a guard, which change no verdict.

    Args:
        loop: The parts of the guard.
    """

    @property
    def enabled(self) -> bool:
        """True while the guard is on."""
        return self._loop.is_enabled

    @property
    def step(self) -> int:
        """The number of the step under way, counted from 0.

        A step is a call of the optimizer, or a round of several. Set it between two
        steps to count on from another number, such as that of a trainer which resumes;
        the `Schedule`, reports and the log go by it. Where ranks decide together,
        all of them have to set it.

        Raises:
            TypeError, ValueError: If it is set to anything but an int of at least 0.
        """
        return self._loop.clock.step

    @step.setter
    def step(self, number: int) -> None:
        check_int("step", number, 0)
        self._loop.clock.set_step(number)

    @property
    def num_skipped(self) -> int:
        """The number of steps that the guard skipped; a round of several is one."""
        return self._loop.rounds.num_skipped

    @property
    def consecutive_skips(self) -> int:
        """The number of steps in a row, up to now, that the guard skipped.

        With several optimizers, of the one with the most.
        """
        return self._loop.rounds.consecutive_skips

    @property
    def last_step_skipped(self) -> bool:
        """True if the last step was skipped, by the guard or by a GradScaler.

        With several optimizers: if one was skipped in the last round, or in the one
        under way; see `was_skipped()`. Read it before `scheduler.step()`. With
        `sync="lagged"` it is about the last judged step.
        """
        return self._loop.rounds.is_skipped

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Returns True if the last step of one of several optimizers was skipped.

        Args:
            optimizer: One of those that the guard was given.

        Raises:
            ValueError: If it was not given.
        """
        return self._loop.rounds.was_skipped(optimizer)

    @property
    def last_report(self) -> Report | None:
        """The report of the last bad step, or None."""
        return self._loop.engine.last_report

    @property
    def cost(self) -> Cost:
        """The time that the guard took in the last step, and on average."""
        return self._loop.timer.cost

    @property
    def num_syncs(self) -> int:
        """The number of times that the guard made the host wait for a device."""
        return sum(watch.recorder.num_syncs for watch in self._loop.watches)

    @property
    def rules(self) -> dict[str, str | list[str]]:
        """The allowed values, given or learned, as `allow` takes them."""
        return self._loop.rules.to_dict()

    def coverage(self) -> GuardCoverage:
        """Returns what was checked so far, and what was not, with the reasons."""
        with self._loop.isolation.isolated():
            return self._loop.coverage()
        return GuardCoverage.unknown(self._loop.isolation.num_failures)

    def headroom(self) -> HeadroomTable:
        """Returns the bits that values have left in their dtype and in float16.

        And their trends: of outputs of modules, weights, buffers and gradients, as they
        last were; with `Underflow()` also zeros and subnormals. Does not sync.
        """
        with self._loop.isolation.isolated():
            return self._loop.headroom.table()
        return HeadroomTable([])

    def metrics(self) -> dict[str, float]:
        """Returns the numbers that exporters receive after each step.

        `steps_total`, `steps_watched_total`, `bad_steps_total`, `skipped_steps_total`,
        `consecutive_skips`, `not_scanned_total`; `guard_seconds`, `step_seconds` and
        `guard_share` (see `Cost`); `headroom_bits`, the least of the last watched step;
        and, with `Underflow()`, the shares `gradient_zeros`, `gradient_subnormals`,
        `activation_zeros` and `activation_subnormals`. Incurs no CPU-GPU sync.
        """
        with self._loop.isolation.isolated():
            return self._loop.measurements.metrics()
        return {}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page of the flight record and the last report; does not sync.

        Args:
            path: The file; with several ranks `run.rank3.html` for `run.html`.

        Raises:
            OSError: If it cannot be written, or is no older page of overflow_fast.
        """
        return write_guard_page(path, self._loop)

    def assert_finite_state(
        self,
        model: Models | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        joint: bool = False,
    ) -> None:
        """Raises if a checkpoint of model and optimizer would hold a nan or an inf.

        Checks parameters, buffers and the optimizer's state, whatever `watch` holds;
        `allow` applies. Reads their memory once, and incurs one CPU-GPU sync for each
        device.

        Args:
            model: The model or models; by default those of the guard.
            optimizer: The optimizer or optimizers; by default those of the guard.
            joint: The ranks decide together; then all of them have to call it.

        Raises:
            NonFiniteError: If a value is not finite; its report names it.
        """
        loop = self._loop
        report = state_report(
            living_models(loop.watches) if model is None else named_models(model),
            loop.steps.optimizers if optimizer is None else optimizers_of(optimizer),
            loop.rules,
            loop.clock.step,
        )
        if joint:
            report = loop.engine.agreement.agree_on(loop.clock.step, report)
        if report is not None:
            raise NonFiniteError(report)

    def self_test(
        self,
        batch: Any,
        *,
        loss: Loss | None = None,
        layers: Iterable[str] | None = None,
        max_layers: int = 16,
    ) -> SelfTestResult:
        """Plants a nan and an inf in layers, and checks that the guard finds them.

        In each layer's output, and in the gradient of that. Prints a table of what was
        caught, and whether the layer was named. Gradients, buffers and random states
        are put back, bit for bit; no optimizer steps, nothing is logged, and findings
        since the last step are judged later. Runs forward and backward once, and four
        times for each layer, in eager mode. Where ranks share a model (DDP, FSDP), all
        of them have to call it. Do not call it between a forward and its backward:
        autograd would take the buffers that are put back for changed.

        Args:
            batch: The model's input: a tuple or list of arguments, a dict of keyword
                arguments, or the one argument.
            loss: Takes the batch, calls the model and returns what to call
                `backward()` on. None: the loss that the model returns, or the sum of
                what it returns.
            layers: Patterns of the names of the layers; None for all.
            max_layers: The most layers to try, spread over the model.

        Returns:
            The result of each fault; `.has_passed`.

        Raises:
            TypeError, ValueError: If an argument cannot be used.
            RuntimeError: If backward changes parameters.
        """
        check_int("max_layers", max_layers, 1)
        if loss is not None and not callable(loss):
            raise TypeError(
                "loss must be a callable that takes the batch and returns a loss, got "
                f"{type(loss).__name__}"
            )
        patterns = reusable(layers)
        check_names("layers", patterns, optional=True)
        watches = self._loop.new_watches(evidence=None)
        gather = self._loop.engine.agreement.gather
        test = SelfTest(watches, batch, loss, patterns, max_layers, gather)
        with self._loop.suspended():
            result = test.run()
        print(result)
        return result

    @property
    def joinable(self) -> GuardJoinable:
        """The guard for ranks without batches: `with Join([model, guard.joinable]):`.

        (`torch.distributed.algorithms.join`.) Ranks without batches go on deciding with
        the others; each forward of DDP has to be followed by one optimizer step.

        Raises:
            RuntimeError: If the ranks do not decide together in one process group, or
                with `sync="lagged"`.
        """
        return self._loop.joinable
