"""OverflowGuard: watches a whole training run, and judges each step once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch.optim import Optimizer

from ..report.report import NonFiniteError, Report
from ..report.run_lines import log_begin, log_end
from ..verdict.rules import Allow
from .arguments import Path, check_int
from .config import EVERYTHING, GuardConfig, Policy
from .guard_status import GuardStatus
from .isolation import isolate_errors
from .learning import check_can_learn
from .loop import GuardLoop
from .metrics import Exporter
from .monitors.builtin import DEFAULT_MONITORS
from .monitors.monitor import Monitor
from .options import (
    Evidence,
    Explain,
    Log,
    Record,
    Schedule,
    documents,
)
from .other_guards import note_enabled
from .watched_models import (
    Models,
    named_models,
    warn_foreign_parameters,
)
from .wrapped_optimizers import optimizers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_Result = TypeVar("_Result")


@documents(GuardConfig)
class OverflowGuard(GuardStatus):
    """Watches training for nans and infs and decides before the optimizer steps.

    The guard judges a step when `optimizer.step()` is called, before it touches a
    weight; the training loop needs no other call. It names the first bad value in
    execution order, and the module or code that created it.

    A forward without autograd is judged when it ends. Without an optimizer, `check()`
    judges a step. With several optimizers a step is a round of them. A judgement incurs
    one CPU-GPU sync per device; none with `sync="lagged"`.

    Args:
        model: The model, or a list or dict of models, held weakly; their hooks hold the
            guard. Give a criterion that is a module along with them.
        optimizer: The optimizer, or a list of them, or None. Wrappers that have one as
            their `optimizer` (Accelerate's) are fine.
        (the fields of GuardConfig)

    Raises:
        TypeError, ValueError: If an argument cannot be used.
        ImportError: If `evidence` is given and safetensors is not installed.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with OverflowGuard(model, optimizer, on_overflow="skip") as guard:
        ...     model(torch.full((1, 2), float("inf"))).sum().backward()
        ...     optimizer.step()
        >>> guard.num_skipped
        1
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        on_overflow: Policy = "raise",
        *,
        watch: Iterable[str] | Literal["tripwire"] = EVERYTHING,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        allow: Allow | None = None,
        explain: bool | Literal["auto"] | Explain = "auto",
        evidence: Path | Evidence | None = None,
        log: Path | Log | None = None,
        record: Path | Record | None = None,
        metrics: Exporter | Iterable[Exporter] | None = None,
        schedule: int | Schedule = 1,
        monitors: Iterable[Monitor] = DEFAULT_MONITORS,
        sync: Literal["step", "lagged"] = "step",
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None = None,
        max_consecutive_skips: int = 20,
        _defer: bool = False,
    ) -> None:
        config = GuardConfig.of(locals())
        models, optimizers = named_models(model), optimizers_of(optimizer)
        warn_foreign_parameters(models, optimizers)
        super().__init__(GuardLoop(config, models, optimizers, _defer))
        self.enable()
        log_begin(self._loop.watches, optimizers, on_overflow, self.coverage())

    @isolate_errors
    def enable(self) -> None:
        """Switches the guard on; it sees everything from the next forward on."""
        if not self.enabled:
            with self._loop.isolation.isolated():
                note_enabled(self._loop)
        self._loop.enable()

    @isolate_errors
    def disable(self) -> None:
        """Switches the guard off: removes all hooks, and judges nothing any more.

        Findings that were not judged are forgotten.
        """
        self._loop.disable()

    @isolate_errors
    def remove(self) -> None:
        """Judges what is on its way (`sync="lagged"`), then switches the guard off.

        Logs a line about the run (logger `overflow_fast`): WARNING if there was a
        report, else INFO. Incurs a CPU-GPU sync if something is on its way.
        """
        was_enabled = self.enabled
        try:
            self._loop.finish()
        finally:
            if was_enabled:
                num_reports = self._loop.engine.num_bad
                log_end(self.coverage(), num_reports, self.num_skipped, self.cost)

    def __enter__(self) -> OverflowGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.remove()
        except NonFiniteError:
            if kind is None:
                raise

    @isolate_errors
    def discard(self) -> None:
        """Forgets what was found since the last step, whose batch is given up."""
        self._loop.discard()

    @isolate_errors
    def check(self) -> Report | None:
        """Judges what has run since the last step, without an optimizer.

        For loops that have none, for the last step with `sync="lagged"`, and after
        replays of CUDA graphs. Checks weights, buffers and gradients too. Incurs one
        CPU-GPU sync for each device that holds stats.

        Returns:
            The report of what is bad, None if nothing is.

        Raises:
            NonFiniteError: If something is bad and the policy is to raise.
        """
        return self._loop.check()

    def record(self, **tensors: torch.Tensor) -> None:
        """Adds tensors that no module returns to the step: `guard.record(loss=loss)`.

        Does not incur a CPU-GPU sync.

        Args:
            tensors: Tensors of any shape, by the names that reports give them.

        Raises:
            TypeError: If a value is no tensor.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
                )
        with self._loop.isolation.isolated():
            self._loop.inputs.record(tensors)

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Calls a function that computes the loss, and can call it again.

        For loops whose loss is outside of the model:
        `loss = guard.run(lambda: criterion(model(x), y))`. The guard explains a bad
        step by calling it again, so it has to do the same then: take the batch before
        it, and call `backward()` after it. Does not incur a CPU-GPU sync.

        Args:
            function: Calls the model and returns the loss.

        Returns:
            The function's result.

        Raises:
            TypeError: If it is not callable.
        """
        if not callable(function):
            raise TypeError(
                f"function must be callable, got {type(function).__name__}: pass "
                "`lambda: criterion(model(x), y)`"
            )
        result: _Result = self._loop.inputs.run(function)
        return result

    def learn(self, steps: int, *, adopt: bool = True) -> None:
        """Learns from the next clean steps which values are non-finite by design.

        Meanwhile infs in the inputs and outputs of modules are no alarm, where no nan
        comes with them and loss, gradients and weights are finite. After `steps` such
        steps the guard logs a warning (logger `overflow_fast`) that proposes rules for
        `allow`. Where ranks decide together, all have to call this, and learn the same.

        Args:
            steps: The number of clean steps to learn from, at least 1.
            adopt: Apply the rules from then on.
        """
        check_int("steps", steps, 1)
        check_can_learn(self._loop.config.wanted)
        with self._loop.isolation.isolated():
            self._loop.learn(steps, adopt)
