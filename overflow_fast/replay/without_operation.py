"""Explanations without an operation: the replay is finite, or has ended."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..core.modules import parameters_of, reduces
from ..core.ops import scan
from ..core.tensors import place_of
from ..text import counted, error_line, nonfinite_text
from ..torch_internals.compiler import has_compiled
from ..torch_internals.running import active_modes
from . import explanation as notes
from .capture import HeldTensor, KeptCall, ModelCall, name_outside
from .cross_device_check import FirstCall, compare_devices, explain_flag, is_elsewhere
from .explanation import NOT_REPLAYED, BadStep, Explanation, Remedy
from .op_trace import Leaf, as_wide, bad_names, inf_signs
from .places import module_of_parameter, names_of
from .replayer import OnRank, ReplayCheck, Replayer, ReplayResult

# Explains values that were bad before the replay: data, weights and what was kept.


_IN_LOOP = (
    "Code between the calls was not replayed. Call all of it within "
    "`guard.run(lambda: loss)`."
)
_NOT_FOUND = "Where the program holds that tensor was not found."
_CARRIED = (
    "The step writes to {}, which could not be put back to what it was before: the "
    "step itself may have left the bad values there."
)


def explain_leaf(leaf: Leaf, read_by: str, call: KeptCall | None) -> Explanation:
    """Explains a tensor that no replayed operation has made.

    Args:
        leaf: The tensor.
        read_by: What read it first, as the end of a sentence, or "".
        call: What was replayed; None if it is not known to be the step's own.
    """
    is_weight = leaf.kind in ("parameter", "buffer")
    what = _counts(leaf.tensor, names_rows=is_weight)
    if isinstance(leaf, HeldTensor):
        return _explain_held(leaf, what, read_by)
    if leaf.kind == "batch":
        return _explain_batch(leaf, what, read_by, call)
    if is_weight:
        return _explain_weight(leaf.kind, leaf.name, what, read_by)
    if leaf.kind == "gradient":
        text = f"the gradient that the model's output was given holds {what}"
        return Explanation(evidence=[text], notes=[notes.OUTSIDE_LOSS])
    text = f"a tensor that no replayed operation has made holds {what}{read_by}"
    return Explanation(evidence=[text], notes=[_NOT_FOUND])


def _explain_batch(
    leaf: Leaf, what: str, at: str, call: KeptCall | None
) -> Explanation:
    """Explains an input: it is data, unless the training loop has computed it."""
    name, tensor = f"`{leaf.name}`", leaf.tensor
    if call is not None:  # a replay may have been given a copy
        tensor = dict(call.leaves()).get(leaf.name, tensor)
    node = None if tensor is None else tensor.grad_fn
    if node is not None:
        last = re.sub(r"Backward\d*$", "", type(node).__name__)
        text = f"{name} held {what} when it was handed over{at}; code that was not "
        text += f"replayed had computed it (its last operation: {last})"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    if call is not None and tensor is not None and call.was_written(tensor):
        text = f"{name} held {what} when the replay began{at}; it was written to since "
        return Explanation(tensor=leaf.name, evidence=[f"{text}the step began"])
    if not isinstance(call, ModelCall):
        of = "" if leaf.name.startswith("batch") else " of the batch"
        text = f"{name}{of} holds {what}{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    text = f"{name} held {what} when the model received it from the loop{at}"
    if call.follows_others:
        text += "; the loop may have computed it from outputs of the forwards before"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])


def _explain_held(leaf: HeldTensor, what: str, at: str) -> Explanation:
    """Explains a tensor that a module or an object holds."""
    name = f"`{leaf.name}`"
    if leaf.is_written:
        text = f"{name} held {what} when the replay began{at}"
        note = _CARRIED.format(name)
        return Explanation(tensor=leaf.name, evidence=[text], notes=[note])
    if leaf.kind == "object":
        text = f"{name} holds {what}, and the step does not write to it{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    of = "the model" if leaf.kind == "attribute" else "a module that is not watched"
    text = f"{name} of {of} holds {what}, and the step does not write to it{at}"
    module = module_of_parameter(leaf.name)
    return Explanation(
        "weights", "bad weights", module, tensor=leaf.name, evidence=[text]
    )


def _explain_weight(kind: str, name: str, what: str, at: str = "") -> Explanation:
    """Explains a parameter or buffer that was bad before the step."""
    evidence = f"the {kind} {name} held {what} before the step{at}"
    module = module_of_parameter(name)
    return Explanation(
        "weights", "bad weights", module, tensor=name, evidence=[evidence]
    )


def first_bad_weight(
    models: Mapping[str, nn.Module], *kinds: str
) -> Explanation | None:
    """The explanation of the first parameter or buffer that is bad, or None."""
    named = [(kind, name, t) for kind, name, t in names_of(models) if kind in kinds]
    bad = bad_names([(name, tensor) for _, name, tensor in named], masks=False)
    for kind, name, tensor in named:
        if name in bad:
            return _explain_weight(kind, name, _counts(tensor, names_rows=True))
    return None


def _counts(tensor: torch.Tensor | None, names_rows: bool) -> str:
    values = None if tensor is None else as_wide(tensor)
    if values is None:
        return "non-finite values"
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    what = nonfinite_text(num_nan, num_inf, inf_signs(values), values.numel())
    rows = _bad_rows(values) if names_rows else []
    names = ", ".join(map(str, rows))
    at = f" (all in row{'s' * (len(rows) > 1)} {names})" if rows else ""
    return f"{what}{at}"


_FEW_ROWS = 4


def _bad_rows(values: torch.Tensor) -> list[int]:
    """The rows that hold all non-finite values, where they are few of many, or none."""
    if values.dim() < 2 or len(values) <= 2 * _FEW_ROWS:
        return []
    is_bad = ~values.isfinite().flatten(1).all(1)
    rows = is_bad.nonzero().flatten().tolist()
    return rows if len(rows) <= _FEW_ROWS else []


def looked_up(table: torch.Tensor | None, call: KeptCall) -> list[str]:
    """Describes where a call's batch holds the indices of a table's bad rows.

    Args:
        table: The table, such as an embedding.
        call: The call.
    """
    values = None if table is None else as_wide(table)
    rows = [] if values is None else _bad_rows(values)
    found = []
    for name, tensor in call.leaves():
        if tensor.dtype not in (torch.int32, torch.int64) or not tensor.dim():
            continue
        for row in rows:
            places = (tensor == row).nonzero()
            if len(places):
                text = f"`{name}` holds {row} at {places[0].tolist()}"
                more = f" and {len(places) - 1} more" * (len(places) > 1)
                found.append(f"{text}{more}")
    return found


_RATE = 3


class Answers:
    """Explanations without an operation.

    Args:
        replayer: Runs the step.
        incident: What a guard saw; None where nobody watched.
        may_run: Whether the budget allows so many forwards more.
        replay_check: Has compared the first run with the step, or None.

    Attributes:
        changed: What a replay changes, and cannot be put back.
        set_meanwhile: Numbers of the models that the step has set, a replay not.
    """

    def __init__(
        self,
        replayer: Replayer,
        incident: BadStep | None,
        may_run: Callable[[int], bool],
        replay_check: ReplayCheck | None,
    ) -> None:
        self._replayer = replayer
        self._replay_check = replay_check
        self._incident = incident
        self._may_run = may_run
        self.changed: list[str] = []
        self.set_meanwhile: list[str] = []

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
            if self.changed:
                text = notes.effects_text(self.changed)
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

    def note_overwritten(self, found: Explanation) -> None:
        """Adds that the batch is not what it was, if that is seen."""
        if any(call.is_overwritten() for call in self._replayer.calls):
            found.notes.append(
                "The batch was written to in the step: the replay saw other data."
            )

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
        if self.changed:
            text = f"The replay is finite, but {notes.effects_text(self.changed)}."
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
        if self.set_meanwhile:
            return notes.set_text(self.set_meanwhile)
        if any(call.is_overwritten() for call in self._replayer.calls):
            return "the batch was written to in the step"
        name = name_outside(self._replayer.calls)
        return notes.outside_text(name) if name else ""

    def _has_several_gradients(self) -> bool:
        """True if several backwards came to an output: the last one's is replayed."""
        return any(call.num_held > len(call.held) for call in self._replayer.calls)

    def _outside(self) -> str:
        if self.set_meanwhile:  # what lies within guard.run() does not set it either
            return f"The replay is finite, but {notes.set_text(self.set_meanwhile)}."
        check = self._replay_check
        difference = None if check is None else check.difference()
        unlike = f", and not what the step did: {difference}" if difference else ""
        return (
            "What was replayed, the models' own forward and backward, is finite"
            f"{unlike}. The loss outside of them was not replayed: use "
            f"`{notes.USE_RUN}`."
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
