"""Explanations without an operation: the replay is finite, or has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import flags
from ..detector.observers import without_observers
from ..detector.selection import full_name
from ..guard.explaining import USE_RUN
from ..guard.report.explanation import NOT_REPLAYED, Explanation, Op, Remedy
from ..scanner.modules import (
    Handles,
    is_dropout,
    module_of_parameter,
    modules_in,
    named_modules,
    parameters_of,
    reduces,
    tensors_of,
)
from ..scanner.ops import scan
from ..scanner.tensors import is_readable, place_of
from ..scanner.text import counted, error_line
from ..scanner.tree import CALL_DEPTH, mapped, tensors_in
from ..torch_internals.compiler import (
    has_compiled,
)
from ..torch_internals.replaying import (
    active_modes,
    autograd_node,
)
from . import bad_step as notes
from .bad_step import BadStep
from .calls import name_outside
from .copies import on_copies, to_dtype
from .explain_origin import first_bad_weight
from .named_tensors import names_of
from .op_trace import ModuleStack, OpCall, OpTrace, TracedModule
from .replay_ranks import OnRank
from .replayer import Observer, ReplayCheck, Replayer, ReplayResult
from .tensor_kinds import floats_in, is_float, summary_of
from .users_lines import op_at

_RATE = 3


class Answers:
    """Explanations without an operation.

    Args:
        replayer: Runs the step.
        incident: What a guard saw; None where nobody watched.
        may_run: Whether the budget allows so many forwards more.
        replay_check: Has compared the first run with the step, or None.
        changed: What a replay changes, and cannot be put back.
        set_meanwhile: Numbers of the models that the step has set, a replay not.
    """

    def __init__(
        self,
        replayer: Replayer,
        incident: BadStep | None,
        may_run: Callable[[int], bool],
        replay_check: ReplayCheck | None,
        changed: Sequence[str],
        set_meanwhile: Sequence[str],
    ) -> None:
        self._replayer = replayer
        self._replay_check = replay_check
        self._incident = incident
        self._may_run = may_run
        self._changed, self._set_meanwhile = changed, set_meanwhile

    def clean(self, first: ReplayResult) -> Explanation:
        """The replay is finite: it was a transient, or is outside of what was run."""
        incident = self._incident
        if incident is None:
            found = first_bad_weight(self._replayer.models, "parameter", "buffer")
            return found or _explain_finite(first)
        if incident.is_of_flag:
            return explain_flag(self._replayer)
        names = incident.gradients.keys()
        if incident.kind == "gradient" and names and names <= incident.left_over.keys():
            return _left_over(incident)
        if incident.kind == "weight":
            return Explanation(notes=[notes.OTHER_WEIGHT])
        if any(call.has_stand_ins for call in self._replayer.calls):
            return Explanation(notes=[notes.STOOD_IN])
        if incident.kind == "buffer":
            found = first_bad_weight(self._replayer.models, "buffer")
            if found is not None:
                return found
        if not first.has_backward and incident.kind in ("gradient", "grad_output"):
            return Explanation("backward", notes=[self._no_backward()])
        if first.bad_held:
            return Explanation(notes=[notes.GIVEN_BAD, self._outside()])
        if incident.kind == "recorded" and not self._replayer.returns_loss:
            return Explanation("forward", notes=[self._outside()])
        ranks, models = self._replayer.ranks, self._replayer.models
        is_reduced = ranks.is_alone or reduces(models)  # as the step's gradients were
        if incident.kind == "gradient" and not is_reduced:
            return Explanation("backward", notes=[notes.NOT_REDUCED])
        if incident.kind == "gradient" and self._replayer.state.has_hooks:
            return Explanation("backward", notes=[notes.NOT_CALLED])
        if not self._replayer.returns_loss and self._has_several_gradients():
            return Explanation(notes=[self._outside()])
        doubt = self._doubt(incident)
        if doubt:
            return Explanation(notes=[f"The replay is finite, but {doubt}."])
        num_bad, num_runs = 0, 1
        while num_runs < _RATE and self._may_run(len(self._replayer.calls)):
            num_runs += 1
            num_bad += not self._replayer.run().is_clean
        return self._not_reproducible(first, num_bad, num_runs)

    def not_in_eager(self, first: ReplayResult, traced: ReplayResult) -> Explanation:
        """It was bad without a table and is clean, or meant, with one."""
        if first.is_clean:
            return self.clean(first)
        if not traced.is_clean and first.is_forward == traced.is_forward:
            return Explanation(
                "backward" if traced.is_in_gradients else "forward",
                notes=["The infs come only from constants and may be intentional."],
            )
        again = self._replayer.run() if self._may_run(1) else first
        if again.is_clean or not has_compiled():
            if self._changed:
                text = notes.effects_text(self._changed)
                return Explanation(notes=[notes.SOME.format(text)])
            text = "replays of the same step differ: some of them are finite"
            return Explanation("forward", "not reproducible", evidence=[text])
        phase = "forward" if first.bad_outputs else "backward"
        text = (
            "compiled code gives it each time, and the same code run eagerly does not"
        )
        return Explanation(phase, "only in compiled code", evidence=[text])

    def failed(self, error: Exception) -> Explanation:
        """The replay has raised."""
        what = str(error) if isinstance(error, OnRank) else error_line(error)
        return Explanation(notes=[f"The replay raised {what}."])

    def _not_reproducible(
        self, first: ReplayResult, num_bad: int, num_runs: int
    ) -> Explanation:
        incident = self._incident
        assert incident is not None
        is_gradient = incident.kind in ("gradient", "grad_output")
        found = Explanation(
            "backward" if is_gradient else "forward", "not reproducible"
        )
        found.evidence.append(
            f"{num_bad} of {num_runs} replays of the same step are non-finite"
        )
        if incident.is_made:
            found.module = incident.module
        check = self._replay_check
        difference = None if check is None else check.difference()
        if difference is not None:
            found.evidence.append(str(difference))
            if not is_gradient:  # what was seen there first came before the alarm
                found.module = difference.module
        if incident.kind == "gradient":
            is_told = self._whose(found, first, incident)
            if not self._replayer.returns_loss and not is_told:
                # Parameters may get gradients from the loss itself.
                return Explanation(notes=[self._outside()])
            are_all = incident.gradients.keys() >= first.gradients.keys()
            if not is_told and len(first.gradients) > 1 and are_all:  # as by clipping
                return Explanation(evidence=found.evidence, notes=[notes.ALL_BAD])
            if incident.had_gradients:
                return Explanation(notes=[notes.OLD])
            found.notes.append(NOT_REPLAYED)
        if self._changed:
            text = f"The replay is finite, but {notes.effects_text(self._changed)}."
            return Explanation(notes=[text])
        if not is_gradient and found.module:
            self._ask_elsewhere(found)
        found.notes.append(f"It ran on {self._places()}.")
        return found

    def _ask_elsewhere(self, found: Explanation) -> None:
        """Adds what the module gives on the CPU, where it ran on another device."""
        models = self._replayer.models
        if not is_elsewhere(models) or not self._may_run(len(self._replayer.calls)):
            return
        first_call = FirstCall(found.module)
        self._replayer.run(observers=[first_call])
        if first_call.call is not None:
            errors = compare_devices(first_call.call, first_call.output)
            found.evidence += [str(errors)] if errors is not None else []

    def _places(self) -> str:
        """Names the devices of the models, and the host: one of them may be faulty."""
        models = self._replayer.models.values()
        devices = {p.device for model in models for p in parameters_of(model)}
        return " and ".join(sorted(map(place_of, devices))) or "no device of a weight"

    def _whose(
        self, found: Explanation, clean: ReplayResult, incident: BadStep
    ) -> bool:
        """Names the gradient that the bad values came from; whether its bits tell."""
        text, names = "", list(incident.gradients)
        if len(names) == 1:
            found.tensor = names[0]
            found.evidence.append(f"only the gradient of {names[0]} is bad")
        else:
            name, text = gradient_of_payload(incident.gradients, clean.gradients)
            found.tensor = name
            found.evidence += [text] if text else []
        if found.tensor:
            found.module = module_of_parameter(found.tensor)
        return bool(text)

    def _doubt(self, incident: BadStep) -> str:
        """Why a finite replay may not have been the same step, or ""."""
        modes = active_modes()
        if modes:
            return f"ran without {', '.join(modes)}"
        if any(call.is_part_of_compiled for call in self._replayer.calls):
            return "it ran eagerly what was compiled together with code around it"
        if incident.is_late:
            return "the weights may have been stepped since"
        if incident.num_dropped:
            return f"{incident.num_dropped} earlier forwards of the step were not kept"
        if self._set_meanwhile:
            return notes.set_text(self._set_meanwhile)
        if any(call.is_overwritten() for call in self._replayer.calls):
            return "the batch was written to in the step"
        name = name_outside(self._replayer.calls)
        return notes.outside_text(name) if name else ""

    def _has_several_gradients(self) -> bool:
        """True if several backwards came to an output: the last one's is replayed."""
        return any(call.num_held > len(call.held) for call in self._replayer.calls)

    def _outside(self) -> str:
        if self._set_meanwhile:  # what lies within guard.run() does not set it either
            return f"The replay is finite, but {notes.set_text(self._set_meanwhile)}."
        check = self._replay_check
        difference = None if check is None else check.difference()
        unlike = f", and not what the step did: {difference}" if difference else ""
        return (
            "What was replayed, the models' own forward and backward, is finite"
            f"{unlike}. The loss outside of them was not replayed: use "
            f"`{USE_RUN}`."
        )

    def _no_backward(self) -> str:
        sizes = [call.not_held for call in self._replayer.calls if call.not_held]
        if sizes:
            size = f"{max(sizes) / 2**20:.0f} MiB"
            why = f"the gradients of the model's output were too large to hold ({size})"
        else:
            why = "what backward was called on is not known"
        return f"Backward was not replayed: {why}. Use `guard.run(lambda: loss)`."


def _left_over(incident: BadStep) -> Explanation:
    """The gradients are those of an earlier step; the replay began without any."""
    name, *others = incident.gradients
    more = f" and {counted(len(others), 'other')}" if others else ""
    steps = incident.left_over.values()
    found = Explanation(cause="left-over gradients", tensor=name)
    found.module = module_of_parameter(name)
    found.evidence.append(
        f"`{name}`{more}: {notes.LEFT_OVER.format(min(steps))}; the step is finite "
        "without them"
    )
    text = f"clear what step {min(steps)} left"
    found.remedies.append(Remedy(text, "optimizer.zero_grad()", is_finite=True))
    return found


def _explain_finite(result: ReplayResult) -> Explanation:
    """Describes a step that nobody watched, and that is finite."""
    open_ends = [notes.MASKED] * result.has_mask
    open_ends += [notes.NO_LOSS] * (not result.has_backward)
    if open_ends:
        return Explanation(notes=open_ends)
    evidence = ["the step is finite when it is run"]
    return Explanation(cause="not reproducible", evidence=evidence)


# The growth of weights out of all bounds: the run diverges.


_MANY = 10.0  # so many times as large as in one of the last steps
_MORE = 2.0


@dataclass(frozen=True)
class Growth:
    """Weights that have grown in the last steps.

    Attributes:
        text: How much, in words.
        factors: By how much they have to be multiplied to be as large as they were.
    """

    text: str
    factors: dict[str, float]


def find_growth(
    models: Mapping[str, nn.Module], incident: BadStep | None
) -> Growth | None:
    """Describes how weights have grown, if it is out of all bounds; else None.

    Args:
        models: The models.
        incident: Has the largest magnitudes of the weights in the last steps.
    """
    if incident is None:
        return None
    history = incident.weights
    before = {name: recent[0] for name, recent in history.items() if recent}
    now = _magnitudes(models, before)
    if not now:
        return None
    name = max(now, key=lambda each: now[each])
    most = max(before.values())
    if now[name] <= max(1.0, _MANY * most):
        return None
    steps = max(map(len, history.values())) * incident.steps_between
    factors = {
        each: before[each] / now[each]
        for each in now
        if now[each] > _MORE * before[each] > 0
    }
    text = (
        f"the largest weight went from {most:.3g} to {now[name]:.3g} ({name}) "
        f"within the last {steps} steps"
    )
    if incident.steps_between == 1:
        text += _jump_text(name, history[name])
    return Growth(text, factors)


def _jump_text(name: str, recent: Sequence[float]) -> str:
    """Names the step that made a weight large, if one alone did; "" otherwise."""
    jumps = [
        (before, after, len(recent) - place)
        for place, (before, after) in enumerate(itertools.pairwise(recent), 1)
        if after > max(1.0, _MANY * before)
    ]
    if len(jumps) != 1:
        return ""
    ((before, after, number),) = jumps
    when = "in the step before" if number == 1 else f"{number} steps before this one"
    return f", {name} from {before:.3g} to {after:.3g} {when}"


def _magnitudes(
    models: Mapping[str, nn.Module], wanted: Mapping[str, float]
) -> dict[str, float]:
    """The largest magnitudes of parameters that are finite."""
    named = {
        name: tensor.detach()
        for kind, name, tensor in names_of(models)
        if kind == "parameter" and name in wanted
    }
    stats = scan(list(named.values()))
    return {
        name: stat.abs_max
        for name, stat in zip(named, stats, strict=True)
        if stat.abs_max is not None and not stat.has_nan and not stat.has_inf
    }


# Whose value became a nan that has spread since: its bits tell.
#
# A nan keeps the bits of the value that it was made of, below the exponent, and hands
# them on through additions and multiplications, as those of clipping by a norm.


# The integer type, the bits of the exponent, and the bit that marks a quiet nan.
_LAYOUTS = {
    torch.float32: (torch.int32, 0x7F800000, 0x00400000, 0x007FFFFF),
    torch.float64: (torch.int64, 0x7FF0 << 48, 0x0008 << 48, 0x000F_FFFF_FFFF_FFFF),
}


def gradient_of_payload(
    bad: Mapping[str, torch.Tensor], clean: Mapping[str, torch.Tensor]
) -> tuple[str, str]:
    """Finds the one gradient in which a bit of the exponent has flipped.

    Args:
        bad: The gradients that hold nan, by name.
        clean: Those of a replay that is finite.

    Returns:
        Its name and a sentence; two empty texts if the bits do not tell, as most often:
        exactly one value of all has to have the nan's bits.
    """
    payloads = {_payload(tensor) for tensor in bad.values()}
    if len(payloads) != 1 or None in payloads:
        return "", ""
    payload = payloads.pop()
    assert payload is not None
    places = [
        (name, int(index))
        for name, tensor in clean.items()
        for index in _places(tensor, payload)
    ]
    if len(places) != 1:
        return "", ""
    name, index = places[0]
    value = float(clean[name].flatten()[index])
    return name, (
        f"the nan in all gradients has the bits of one value alone: {value:.6g}, the "
        f"replayed gradient of {name} at {index}, with its exponent set to ones"
    )


def _payload(tensor: torch.Tensor) -> int | None:
    """The bits that all elements share, if they are one and the same nan."""
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None or tensor.layout is not torch.strided or not tensor.numel():
        return None
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer)
    first = bits.flatten()[0]
    if not bool(tensor.isnan().all()) or not bool((bits == first).all()):
        return None
    payload = int(first) & mantissa & ~quiet
    return payload or None  # a nan of no value, as of 0 / 0


def _places(tensor: torch.Tensor, payload: int) -> list[int]:
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        return []
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer).flatten()
    same = (bits & (mantissa & ~quiet)) == payload
    return same.nonzero().flatten().tolist()[:2]


# A module computed again on another device.


OTHER = torch.device("cpu")
_MAX_BYTES = 2**30  # of weights that are copied there, in float64
_TIMES = 32.0  # so much more than the other device's error is no rounding
_TF32_EPS = 2.0**-10


@dataclass
class FirstCall(Observer):
    """Keeps the first call of a module, and what it returned.

    Attributes:
        name: The module's name, with the model's prefix.
        call: The call, or None.
        output: What it returned.
    """

    name: str
    call: TracedModule | None = None
    output: Any = None

    @contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Observer`."""
        handles = Handles(
            module.register_forward_hook(self._keep, prepend=True, with_kwargs=True)
            for prefix, model in models.items()
            for name, module in named_modules(model)
            if full_name(prefix, name) == self.name
        )
        with handles:
            yield

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.call is None:
            self.call = TracedModule.begun(module, self.name, args, kwargs)
            self.output = output


@dataclass(frozen=True)
class DeviceErrors:
    """The errors of two devices, against float64 on the second.

    Attributes:
        name: The module's name.
        device: The device that is judged.
        error: The largest error of its values, relative to their largest magnitude.
        usual: The same of the other device, or of rounding if that is more.
    """

    name: str
    device: torch.device
    error: float
    usual: float

    @property
    def is_suspect(self) -> bool:
        """True if the device is off by more than rounding."""
        return not self.error <= _TIMES * self.usual

    def __str__(self) -> str:
        """The errors in a sentence."""
        if not self.is_suspect:
            return f"{self.name} on the {OTHER.type.upper()} gives the same now"
        return (
            f"{self.name} is off by {self.error:.1g} of its largest value, where "
            f"{self.usual:.1g} is usual: {place_of(self.device)} is suspect"
        )


def is_elsewhere(models: Mapping[str, nn.Module]) -> bool:
    """True if weights are on another device than the one that is asked."""
    parameters = (p for model in models.values() for p in parameters_of(model))
    return any(parameter.device.type != OTHER.type for parameter in parameters)


def compare_devices(call: TracedModule, output: Any) -> DeviceErrors | None:
    """Computes a module's call again, on its own device and on another.

    Incurs a CPU-GPU sync.

    Args:
        call: The call, with its weights as they were.
        output: What it returned.

    Returns:
        The errors; None if the module cannot run elsewhere, or takes random numbers.
    """
    own = floats_in(output)
    if not own or not call.is_as_it_was or not _can_run_alone(call.module):
        return None
    device, dtype = own[0].device, own[0].dtype
    try:
        with without_observers([call.module]), torch.no_grad():
            again = [_run(call, device, num_drawn=number) for number in (0, 1)]
            same, exact = _run(call, OTHER), _run(call, OTHER, torch.float64)
    except Exception:  # a dtype or device that its code asks for
        return None
    usual = max(_error(same, exact), _eps_of(dtype, device))
    if _error(again[0], again[1]) > _TIMES * usual:
        return None  # random numbers of its own, or kernels that race
    error = max(_error(own, exact), _error(again[0], exact))
    return DeviceErrors(call.name or "the model", device, error, usual)


def _run(
    call: TracedModule,
    device: torch.device,
    width: torch.dtype | None = None,
    num_drawn: int = 0,
) -> list[torch.Tensor]:
    """Runs the module on copies, after so many random numbers were drawn."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().to(device, copy=True)
        return plain if width is None else to_dtype(plain, width)

    args, kwargs = mapped((call.args, call.kwargs), convert, CALL_DEPTH)
    with ExitStack() as stack:
        stack.enter_context(on_copies(call.module, convert))
        for _, dtype in call.autocast[:1] if width is None else []:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
        torch.rand(num_drawn, device=device)
        return floats_in(call.module.forward(*args, **kwargs))


def _can_run_alone(module: nn.Module) -> bool:
    tensors = list(tensors_of(module))
    if not all(map(is_readable, tensors)):
        return False
    if any(is_dropout(each) and each.training for each in modules_in(module)):
        return False
    return sum(8 * tensor.numel() for tensor in tensors) <= _MAX_BYTES


def _error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest magnitude; inf for a nan."""
    most = 0.0
    for one, other in zip(values, exact, strict=True):
        a, b = (each.detach().to(OTHER, torch.float64) for each in (one, other))
        scale = float(b.abs().max())
        error = float((a - b).abs().max()) / scale if scale else float(a.abs().max())
        most = max(most, error) if error == error else float("inf")
    return most


def _eps_of(dtype: torch.dtype, device: torch.device) -> float:
    is_tf32 = device.type == "cuda" and dtype == torch.float32
    return max(torch.finfo(dtype).eps, _TF32_EPS * is_tf32)


# Finds the operation that sets a device's overflow flag, in a replay.


class FlagSearch(Observer):
    """Asks the overflow flags after each operation of a replay, until one is set.

    Attributes:
        found: The first operation that set one, or None.
        module: The name of the module that ran it.
        in_backward: It ran in backward.
    """

    def __init__(self) -> None:
        self.found: Op | None = None
        self.module = ""
        self.in_backward = False
        self._flags: Mapping[str, flags.DeviceFlag] = {}

    def observing(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Asks after each operation that runs within."""
        devices = {p.device.type for m in models.values() for p in parameters_of(m)}
        self._flags = flags.registered(devices)
        return OpTrace(models, self)

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and notes it if it sets a flag; see `OpObserver`."""
        if self.found is not None:
            return op.run()
        self._each("clear")
        output = op.run()
        with torch.no_grad():
            if any(bool(value) for value in self._each("read")):
                self._note(op, output, modules)
        return output

    def on_module(self, name: str, output: Any) -> None:
        """See `OpObserver`."""

    def _each(self, name: str) -> list[Any]:
        return [
            flags.attempt(device_type, getattr(flag, name))
            for device_type, flag in self._flags.items()
        ]

    def _note(self, op: OpCall, output: Any, modules: ModuleStack) -> None:
        self.in_backward = autograd_node() is not None
        self.module = modules.current(self.in_backward) or ""
        self.found = op_at(op.name, modules.lines())
        given, returned = tensors_in((op.args, op.kwargs)), tensors_in(output)
        self.found.inputs = [summary_of(t) for t in given if is_float(t)]
        self.found.outputs = [summary_of(t) for t in returned if is_float(t)]


def explain_flag(replayer: Replayer) -> Explanation:
    """Runs the step again, and names the operation that sets an overflow flag.

    Incurs a CPU-GPU sync for each operation, until it is found.
    """
    search = FlagSearch()
    result = replayer.run(observers=[search])
    if search.found is None:
        again = "" if result.error is None else f", which raised {result.error}"
        return Explanation(
            cause="not reproducible",
            evidence=[f"no operation of the replay{again} sets the overflow flag"],
        )
    found = Explanation(
        "backward" if search.in_backward else "forward",
        "range overflow",
        search.module,
        search.found,
    )
    found.evidence.append(
        "the device's overflow flag is set after this operation, and its result is "
        "finite: it overflowed inside"
        if not any(each.num_nan or each.num_inf for each in search.found.outputs)
        else "the device's overflow flag is set after this operation"
    )
    return found
