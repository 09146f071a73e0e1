"""OverflowGuard: watches a whole training run, and judges each step once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch.optim import Optimizer

from .. import _C
from ..distributed.joinable import GuardJoinable
from ..recording.schedule import ScanLevel
from ..report.guard_coverage import GuardCoverage
from ..report.report import Cost, NonFiniteError, Report
from ..report.run_lines import log_begin, log_end
from ..selftest.fault_results import SelfTestResult
from ..selftest.self_test import Loss
from ..verdict.headroom import HeadroomTable
from ..verdict.rules import Allow
from .config import (
    EVERYTHING,
    GuardConfig,
    Models,
    Path,
    Policy,
    check_int,
    check_names,
    kept,
    named_models,
    optimizers_of,
    warn_foreign_parameters,
    warn_of_others,
)
from .learning import check_can_learn
from .loop import GuardLoop
from .metrics import Exporter
from .state import state_report

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_loops: weakref.WeakSet[GuardLoop] = weakref.WeakSet()
_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _shielded(method: _Method) -> _Method:
    """A method out of which no error of the guard's own comes; it returns None then."""

    @functools.wraps(method)
    def shielded(self: OverflowGuard, *args: Any, **kwargs: Any) -> Any:
        with self._loop.isolation.isolated():
            return method(self, *args, **kwargs)

    return cast(_Method, shielded)


class OverflowGuard:
    """Watches training for nans and infs and decides before the optimizer steps.

    Nothing else is to be written: the guard judges a step when `optimizer.step()` is
    called, before it touches a weight. It looks at the inputs and outputs of every
    module, the gradients of the outputs, the parameters, their gradients, the buffers
    and the loss, and names the first bad one in execution order and who made it.

    A forward without autograd is judged when it ends. Without an optimizer, a step is
    judged by `check()`. With several optimizers a step is a round of them.

    A judgement incurs one CPU-GPU sync for each device that holds stats; none with
    `sync="lagged"`; none on the CPU.

    Args:
        model: The model, or a list or dict of models. They are held weakly; their hooks
            hold the guard. Give a criterion that is a module along with them.
        optimizer: The optimizer, or a list of them, or None. Wrappers that have one as
            their `optimizer` (Accelerate's) are fine.
        on_overflow: What to do about a bad step. "raise": `NonFiniteError`. "warn": log
            a warning (logger `overflow_fast`). "skip": the optimizer's step does not
            happen; weights and state stay as they are, bit by bit; a warning says so.
            Or a callable that takes the `Report` and returns one of these.
        watch: What to look at: any of "activations", "grad_outputs" (gradients of
            outputs; needs "activations"), "gradients" (of parameters), "weights",
            "buffers", "loss" and "optimizer_state".
        include: Patterns of names of the modules to look at, such as `["h.*.mlp*"]`;
            None for all. In a dict of models `"gen.0"` names module `0` of model "gen",
            in a list `"1.0"` module `0` of the second.
        exclude: Patterns of names of modules to leave out.
        every: Watch every so many steps. In between, no module has a hook; in a process
            that has compiled code they stay, and do nothing.
        warmup: How many steps to leave alone at first.
        ranges: Watch only steps in one of these half-open ranges.
        budget: The share of a step's time that the guard may take on average, such as
            0.01. It measures itself and looks at everything as often as fits, at
            gradients in every step if that alone fits, and at everything after a bad
            step.
        sync: "step", or "lagged": the verdict on tensors on a device arrives one step
            later; the host waits only where it is a whole step ahead. Optimizers whose
            kernels read `found_inf` (fused Adam, AdamW, SGD, Adagrad) skip a bad step
            on the device all the same, with "skip" and "raise"; with others, "skip"
            costs the sync, and so does a callable.
        max_consecutive_skips: Raise after so many skipped steps in a row.
        max_frames: How many frames before the bad one a report shows.
        memo: Scan a tensor that nobody wrote to only once in a forward; see
            `DebugUnderflowOverflow`.
        evidence: A folder for what bad steps leave: report, offending tensors, batch,
            in `overflow_fast/RUN/step-N/`; runs and ranks may share it.
            On a device, activations are gone when the step is judged; gradients,
            weights and the batch are there. Holds each batch until it is judged.
        evidence_mib: How many MiB of tensors a step may leave.
        evidence_keep: How many steps' evidence of this run is kept. What was added to
            or changed, and what other runs left, is never removed.
        log: A file for one line of JSON for each judged step, behind a header for each
            run.
        log_mib: How many MiB the file may have before a new one is begun.
        log_keep: How many older files are kept; 0: no new one is begun.
        process_group: The ranks that decide together, a `ProcessGroup` or a
            `DeviceMesh`: each judged step they join one all-reduce of 64 bytes, and all
            act on the report of the rank that found the bad value first. None: all
            ranks that the process groups of DDP, FSDP, `replicate()`, DTensors and
            ZeroRedundancyOptimizer connect, unless the policy is to warn; a line is
            logged if these are not all ranks. False: each rank decides for itself.
            With a group, every rank has to have its guard, and call `check()` where
            one does.
        allow: Non-finite values that are meant, such as
            `{"*.attn:input[attn_mask]": "-inf", "router:output[1]": "inf"}`: a pattern
            of module names, a colon, and a pattern of that module's entries:
            `input...`, `output...`, `grad_output...`, `weight.NAME`, `buffer.NAME`,
            `gradient.NAME`, `optimizer_state.NAME...`, or `recorded.NAME` (with no
            module). `[x]`, `['x']` and `.x` are the same. What is meant is "-inf",
            "+inf", "inf" for both, "nan", or a list of these; anything else there is
            still an alarm. See `learn()`. -inf in inputs and buffers needs no rule.
        headroom_bits: Log a warning when what modules make, a weight or a gradient
            could double less often than so many times in its dtype (1.0: it is beyond
            half of the largest number); once, and again when half of that is gone.
            Gradients that a GradScaler scales are left out. None for never.
        underflow_every: Count the zeros and subnormals of all that in every so many'th
            watched step, for `headroom()` and `metrics()`. That takes torch operations
            and temporaries of each tensor's size. None for never.
        metrics: Who is told numbers after each watched step: a callable that takes the
            step and a dict, such as
            `overflow_fast.integrations.tensorboard.TensorBoardMetrics()`, or several.
        explain: Whether to run a bad step again and say which operation made the first
            bad value, and why (`Report.explanation`). "auto": always where the run
            ends; else the first time for each place, at most once in 100 steps. Keeps
            references to each batch until its step is judged. Not with `sync="lagged"`.
        explain_budget: How many forwards an explanation may run; None for 8.

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
        watch: Iterable[str] = EVERYTHING,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        every: int = 1,
        warmup: int = 0,
        ranges: Iterable[tuple[int, int]] | None = None,
        budget: float | None = None,
        sync: Literal["step", "lagged"] = "step",
        max_consecutive_skips: int = 20,
        max_frames: int = 21,
        memo: bool = True,
        evidence: Path | None = None,
        evidence_mib: float = 256,
        evidence_keep: int = 4,
        log: Path | None = None,
        log_mib: float = 16,
        log_keep: int = 3,
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None = None,
        allow: Allow | None = None,
        headroom_bits: float | None = None,
        underflow_every: int | None = None,
        metrics: Exporter | Iterable[Exporter] | None = None,
        explain: bool | Literal["auto"] = "auto",
        explain_budget: int | None = None,
        _defer: bool = False,
    ) -> None:
        options = GuardConfig(
            on_overflow=on_overflow,
            watch=kept(watch),
            include=kept(include),
            exclude=kept(exclude),
            every=every,
            warmup=warmup,
            ranges=kept(ranges),
            budget=budget,
            sync=sync,
            max_consecutive_skips=max_consecutive_skips,
            max_frames=max_frames,
            memo=memo,
            evidence=evidence,
            evidence_mib=evidence_mib,
            evidence_keep=evidence_keep,
            log=log,
            log_mib=log_mib,
            log_keep=log_keep,
            process_group=process_group,
            allow={} if allow is None else kept(allow),
            headroom_bits=headroom_bits,
            underflow_every=underflow_every,
            metrics=kept(metrics),
            explain=explain,
            explain_budget=explain_budget,
        )
        models, optimizers = named_models(model), optimizers_of(optimizer)
        warn_foreign_parameters(models, optimizers)
        self._loop = GuardLoop(options, models, optimizers, _defer)
        self.enable()
        watches = self._loop.watches
        log_begin(watches, optimizers, on_overflow, self.coverage())

    # Switching on and off.

    @property
    def enabled(self) -> bool:
        """Whether the guard is on."""
        return self._loop.is_enabled

    @_shielded
    def enable(self) -> None:
        """Switches the guard on; from the next forward on it sees everything."""
        if not self.enabled:
            self._tell_of_others()
        self._loop.enable()

    @_shielded
    def _tell_of_others(self) -> None:
        others = [each for each in _loops if each.is_enabled]
        _loops.add(self._loop)
        watches = [watch for each in others for watch in each.watches]
        warn_of_others(self._loop.watches, watches)

    @_shielded
    def disable(self) -> None:
        """Switches the guard off: no hook is left, and nothing is judged any more.

        What was found and not judged is forgotten.
        """
        self._loop.disable()

    @_shielded
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
                num_reports = self._loop.decision.num_bad
                log_end(self.coverage(), num_reports, self.num_skipped, self.cost)

    def __enter__(self) -> OverflowGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.remove()
        except NonFiniteError:
            if kind is None:
                raise

    @_shielded
    def discard(self) -> None:
        """Forgets what was found since the last step.

        For loops that give up a batch after its forward, and go on without a step.
        """
        self._loop.discard()

    # What users ask.

    @property
    def step(self) -> int:
        """The number of the step under way, counted from 0.

        A step is a call of the optimizer, or a round of several. Set it between two
        steps to count on from another number, such as that of a trainer which resumes;
        `warmup`, `ranges`, reports and the log go by it. Where ranks decide together,
        all of them have to set it.

        Raises:
            TypeError, ValueError: If it is set to what is no int of at least 0.
        """
        return self._loop.step

    @step.setter
    def step(self, number: int) -> None:
        check_int("step", number, 0)
        self._loop.set_step(number)

    @property
    def num_skipped(self) -> int:
        """How many steps the guard skipped; a round of several optimizers is one."""
        return self._loop.rounds.num_skipped

    @property
    def consecutive_skips(self) -> int:
        """How many steps up to now it skipped in a row, of the worst optimizer."""
        return self._loop.rounds.consecutive_skips

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped, by the guard or by a GradScaler.

        With several optimizers: whether one was skipped in the last round, or in the
        one under way; see `was_skipped()`. Ask it before `scheduler.step()`. Lagged, it
        speaks of the last judged step.
        """
        return self._loop.rounds.is_skipped

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step of one of several optimizers was skipped.

        Args:
            optimizer: One of those that the guard was given.

        Raises:
            ValueError: If it was not given.
        """
        return self._loop.rounds.was_skipped(optimizer)

    @property
    def last_report(self) -> Report | None:
        """The report of the last bad step, or None."""
        return self._loop.decision.last_report

    @property
    def cost(self) -> Cost:
        """What the guard took in the last step, and on average."""
        return self._loop.meter.cost

    @property
    def num_syncs(self) -> int:
        """How often the host has waited for a device because of the guard."""
        return sum(watch.recorder.num_syncs for watch in self._loop.watches)

    def coverage(self) -> GuardCoverage:
        """What was looked at so far, and what was not, with the reasons."""
        with self._loop.isolation.isolated():
            return self._loop.coverage()
        return GuardCoverage.unknown(self._loop.isolation.num_failures)

    def headroom(self) -> HeadroomTable:
        """How many bits everything has left in its dtype and in float16, and its trend.

        Of what modules returned, weights, buffers and gradients, as they last were;
        with `underflow_every` also zeros and subnormals. Incurs no CPU-GPU sync.
        """
        with self._loop.isolation.isolated():
            return self._loop.headroom.table()
        return HeadroomTable([])

    def metrics(self) -> dict[str, float]:
        """What the guard measures, as numbers: what exporters are told after each step.

        `steps_total`, `steps_watched_total`, `bad_steps_total`, `skipped_steps_total`,
        `consecutive_skips`, `not_scanned_total`; `guard_seconds`, `step_seconds` and
        `guard_share` (see `Cost`); `headroom_bits`, the least of the last watched step;
        and, with `underflow_every`, the shares `gradient_zeros`, `gradient_subnormals`,
        `activation_zeros` and `activation_subnormals`. No CPU-GPU sync.
        """
        with self._loop.isolation.isolated():
            return self._loop.metrics()
        return {}

    def learn(self, steps: int, *, adopt: bool = True) -> None:
        """Learns what is not finite by design, from the next clean steps.

        Infs in the inputs and outputs of modules are no alarm meanwhile, where no nan
        comes with them and loss, gradients and weights are finite. After `steps` such
        steps a warning is logged (logger `overflow_fast`) that proposes rules for
        `allow`. Where ranks decide together, all have to call this, and learn the same.

        Args:
            steps: How many clean steps to learn from, at least 1.
            adopt: Whether the guard follows the rules from then on.
        """
        check_int("steps", steps, 1)
        check_can_learn(self._loop.options.wanted)
        with self._loop.isolation.isolated():
            self._loop.learn(steps, adopt)

    def self_test(
        self,
        batch: Any,
        *,
        loss: Loss | None = None,
        layers: Iterable[str] | None = None,
        max_layers: int = 16,
    ) -> SelfTestResult:
        """Plants a nan and an inf in layers, and looks whether the guard finds them.

        For each layer, in what it returns and in the gradient of that. Prints a table:
        what was caught, and whether the layer was named. Gradients, buffers and random
        states are put back, bit for bit; no optimizer steps, nothing is logged, and
        what the guard had found since its last step is judged later. Runs forward and
        backward once and four times for each layer, in eager mode. Where ranks share a
        model (DDP, FSDP), all of them have to call it. Not between a forward and its
        backward: autograd would take the buffers that are put back for changed.

        Args:
            batch: What the model is called with: a tuple or list of arguments, a dict
                of keyword arguments, or the one argument.
            loss: Takes the batch, calls the model and returns what to call
                `backward()` on. None: the loss that the model returns, or the sum of
                what it returns.
            layers: Patterns of the names of the layers; None for all.
            max_layers: How many of them to try at most, spread over the model.

        Returns:
            What became of each fault; `.has_passed`.

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
        asked = kept(layers)
        check_names("layers", asked, optional=True)
        result = self._loop.self_test(batch, loss, asked, max_layers)
        print(result)
        return result

    @property
    def rules(self) -> dict[str, str | list[str]]:
        """What is allowed, given or learned, as `allow` takes it."""
        return self._loop.rules.to_dict()

    def assert_finite_state(
        self,
        model: Models | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        joint: bool = False,
    ) -> None:
        """Raises if a checkpoint of model and optimizer would hold a nan or an inf.

        Looks at parameters, buffers and the optimizer's state, whatever `watch` says;
        `allow` counts. One pass over their memory, one CPU-GPU sync for each device.

        Args:
            model: The model or models; by default those of the guard.
            optimizer: The optimizer or optimizers; by default those of the guard.
            joint: Whether the ranks decide together; then all of them have to call it.

        Raises:
            NonFiniteError: If something is not finite; its report names what.
        """
        supervisor = self._loop
        report = state_report(
            supervisor.models() if model is None else named_models(model),
            supervisor.optimizers if optimizer is None else optimizers_of(optimizer),
            supervisor.rules,
            supervisor.step,
        )
        if joint:
            report = supervisor.decision.agreement.agree_on(supervisor.step, report)
        if report is not None:
            raise NonFiniteError(report)

    @property
    def joinable(self) -> GuardJoinable:
        """For ranks that run out of batches: `with Join([model, guard.joinable]):`.

        (`torch.distributed.algorithms.join`.) Ranks without batches go on deciding with
        the others; each forward of DDP has to be followed by one optimizer step.

        Raises:
            RuntimeError: If the ranks do not decide together in one process group, or
                with `sync="lagged"`.
        """
        return self._loop.joinable

    def record(self, **tensors: torch.Tensor) -> None:
        """Adds tensors that no module returns to the step: `guard.record(loss=loss)`.

        Does not incur a CPU-GPU sync.

        Args:
            tensors: Tensors of any shape, by the names that reports call them.

        Raises:
            TypeError: If a value is no tensor.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
                )
        with self._loop.isolation.isolated():
            if self._loop.level is ScanLevel.ALL:
                watch = self._loop.watches[0]
                watch.has_seen_loss |= "loss" in tensors
                named = list(tensors), list(tensors.values())
                watch.record(_C.FrameKind.RECORDED, named)

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Calls a function that computes the loss, and can call it again.

        For loops whose loss is outside of the model:
        `loss = guard.run(lambda: criterion(model(x), y))`. A bad step is explained by
        calling it again, so it has to do the same then: take the batch before it, and
        call `backward()` behind it. Does not incur a CPU-GPU sync.

        Args:
            function: Calls the model and returns the loss.

        Returns:
            What it returns.

        Raises:
            TypeError: If it is not callable.
        """
        if not callable(function):
            raise TypeError(
                f"function must be callable, got {type(function).__name__}: pass "
                "`lambda: criterion(model(x), y)`"
            )
        result: _Result = self._loop.run(function)
        return result

    @_shielded
    def check(self) -> Report | None:
        """Judges what has run since the last step, without an optimizer.

        For loops that have none, for the last step with `sync="lagged"`, and after
        replays of CUDA graphs. Looks at weights, buffers and gradients too. Incurs one
        CPU-GPU sync for each device that holds stats.

        Returns:
            The report of what is bad, None if nothing is.

        Raises:
            NonFiniteError: If something is bad and the policy is to raise.
        """
        return self._loop.check()
