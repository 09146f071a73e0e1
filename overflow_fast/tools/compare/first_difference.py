"""The first difference of a step: its kind, what made it, and how it is said.

Rows come in the order of execution, so the first one that is introduced is a weight,
the batch, an output of a module (forward), the gradient that the model was given (the
loss), one within the model (backward) or a parameter's before the optimizer's step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.text import numbered, printable, rounded, some
from .judged_rows import INTRODUCED, TensorDifference, coarser, epsilon
from .recorded import RecordedTensor
from .recording_schema import BACKWARD, FORWARD, STATE

_MAX_PLACES = 3  # in a sentence; chosen
_OF_PARAMETER = (
    ", other code that uses the parameter (the loss, a hook, a module that shares it) "
    "or a gradient from before makes a difference"
)
RUNS = "the first run", "the reference run"


@dataclass
class RootDifference:
    """The first difference that is not propagated, and what made it.

    Attributes:
        module: The name of the module that made it; "" is the model itself, or what is
            outside of it.
        class_name: The module's class, or "".
        kind: "weights", "batch", "forward", "loss", "backward", "detached" where no
            gradient reaches the module in one run, "gradients" where those of
            parameters differ and no module is known to have made it, or "update".
        row: The first row that shows it.
        after: The last call that had returned within the module, or "".
        op: The first operation that differs, with its line, or "". `compare_live()`
            finds it.
        remark: What it may be, in a sentence, or "".
        unknown: The places of what it was computed from that could not be compared; the
            difference may come from there, and `module` is not to blame then.
        ranks: The ranks of which the same row shows it, if rows are of ranks.
    """

    module: str
    class_name: str
    kind: str
    row: TensorDifference
    after: str = ""
    op: str = ""
    remark: str = ""
    unknown: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """It as texts and numbers."""
        return {
            "module": self.module,
            "class": self.class_name,
            "kind": self.kind,
            "row": self.row.name,
            "step": self.row.step,
            "rank": self.row.rank,
            "ranks": list(self.ranks),
            "after": self.after,
            "op": self.op,
            "remark": self.remark,
            "unknown": list(self.unknown),
            "sentence": str(self),
        }

    def __str__(self) -> str:
        """One or two sentences; which step, where several were compared."""
        text = self._sentence()
        if self.op:
            text += f" The first operation that differs: {self.op}."
        text = f"{text} {self.remark}".strip()
        if self.row.step:
            when = "Before" if self.kind in ("weights", "update") else "In"
            update = "the update. " * (self.kind == "update")
            text = f"{when} step {self.row.step}: {update}{text}"
        return printable(text)

    def _sentence(self) -> str:
        row, name = self.row, self.module or "the model"
        of_class = f" ({self.class_name})" if self.class_name else ""
        on_rank = ""
        if row.rank is not None:
            on_rank = f" on {numbered('rank', self.ranks or (row.rank,))}"
        amount = f"{on_rank}{_amount(row)}"
        if self.kind == "detached":
            return ""  # the remark is the sentence
        if self.kind in ("weights", "update"):
            return f"{row.place} of {name}{of_class} differs{amount}."
        if self.kind == "batch":
            return (
                f"The model was given other inputs{on_rank}: {row.place}{_amount(row)}."
            )
        if self.kind == "gradients":
            return f"Gradients of parameters differ, {row.place} first{amount}."
        if self.kind == "loss":
            return (
                f"The gradient that the model was given differs: {row.place}{amount}. "
                "The loss, its scale, its labels, or other code outside of the model "
                "makes it."
            )
        does = " gives another result" if self.unknown else " computes differently"
        if row.has_other_shape:
            does = " gives a tensor of another shape"
        elif self.kind == "backward" and not row.place.is_of_call:
            does = _OF_PARAMETER
        where = "Backward of " if self.kind == "backward" else ""
        after = f", after {self.after}" if self.after else ""
        text = f"{where}{name}{of_class}{does}{amount}. It shows at {row.place}{after}."
        if self.unknown:
            places = some(self.unknown, _MAX_PLACES)
            text += (
                f" The difference may come from what could not be compared: {places}."
            )
        return text


def _amount(row: TensorDifference) -> str:
    if row.has_other_shape:
        return f", of shapes {row.shapes[0]} and {row.shapes[1]}"
    if row.why:
        return ""
    if row.has_other_counts:
        (nan, its_nan), (inf, its_inf) = map(row.numbers, ("num_nan", "num_inf"))
        return f", by {nan} nan and {inf} inf against {its_nan} and {its_inf}"
    text = f", by {row.relative:.2g} of its norm"
    if row.factor is not None:
        return f"{text}: it is {row.factor:.6g} times the reference"
    times, dtype = row.times, coarser(*row.dtypes)
    if times is not None and times < 1e6 and epsilon(dtype):
        text += f", {rounded(times)} times what {dtype} rounding explains"
    return text


@dataclass
class StepContext:
    """Facts of a step beside its rows.

    Attributes:
        lone_sources: The inputs, parameters and buffers of modules that one run lacks.
        settings: How the settings of modules differ, in sentences.
        detached: The modules that no gradient reaches in the first run, and those in
            the reference, that one reaches in the other; from the loss on.
        has_other_random: Whether random numbers were drawn from unequal states.
    """

    lone_sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    detached: Sequence[Sequence[str]] = ((), ())
    has_other_random: bool = False


def find_root_difference(
    rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference | None:
    """Finds the first difference that is made where it shows.

    Args:
        rows: The judged rows of one step, in the order of execution.
        known: What else is known of the step.
    """
    row = next((row for row in rows if _begins(row)), None)
    first = _detached(row, rows, known)
    if first is None and row is not None:
        first = _by_phase(row, rows, known)
    if first is None:
        return None
    if first.row.rank is not None:
        key = first.row.place.key
        on = {r.rank for r in rows if r.place.key == key and _begins(r)}
        first.ranks = tuple(sorted(rank for rank in on if rank is not None))
    is_module_known = first.kind != "gradients"
    name = first.module if is_module_known else first.row.place.module
    texts = known.settings.get(name)
    if texts and first.kind not in ("batch", "loss", "detached"):
        first.remark = f"{first.remark} Its {'; its '.join(texts)}.".strip()
    return first


def _begins(row: TensorDifference) -> bool:
    """True if a difference may begin with a row."""
    is_of_gradient = row.place.phase == BACKWARD
    return row.verdict == INTRODUCED or (row.has_other_shape and not is_of_gradient)


def _by_phase(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference:
    place = row.place
    if place.phase == STATE:
        return _in_weights(row, rows)
    given = [r for r in rows if r.place.role == "input" and _is_outermost(r, rows)]
    other = (r for r in given if r.rank == row.rank and r.has_other_shape)
    batch = next(other, row if row in given else None)
    if batch is not None:
        return RootDifference("", "", "batch", batch)
    if place.phase == BACKWARD:
        is_of_call = place.is_of_call
        return (_in_backward if is_of_call else _in_gradients)(row, rows, known)
    return _in_forward(row, rows, known)


def _in_weights(
    row: TensorDifference, rows: Sequence[TensorDifference]
) -> RootDifference:
    state = [r for r in rows if r.place.phase == STATE]
    num = sum(map(_begins, state))
    remark = f"{num} of {len(state)} parameters and buffers differ."
    place = row.place
    return RootDifference(place.module, place.class_name, "weights", row, remark=remark)


def _is_outermost(row: TensorDifference, rows: Sequence[TensorDifference]) -> bool:
    """True if no recorded module has called the module of a row."""
    if not row.place.module or row.place.caller:
        return not row.place.module
    return not any(r.place.phase == FORWARD and not r.place.module for r in rows)


def _in_forward(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference:
    """The module that returned a tensor, or whose code made what another is given."""
    place = row.place
    before = list(itertools.takewhile(lambda each: each is not row, rows))
    module, kind = place.module, place.class_name
    if place.role == "input":
        module = place.caller
        kind = _classes(rows).get(module, "")
    returned = (
        r.place.module
        for r in reversed(before)
        if r.place.role == "output" and r.place.caller == module != r.place.module
    )
    unknown = [
        r.name
        for r in before
        if r.why and r.rank == row.rank and _is_source(r, row, module)
    ]
    unknown += known.lone_sources.get(module, ())
    remark = ""
    if known.has_other_random:
        remark = "Random numbers were drawn from unequal states."
    after = next(returned, "")
    first = RootDifference(module, kind, "forward", row, after, remark=remark)
    first.unknown = tuple(unknown)
    return first


def _is_source(given: TensorDifference, row: TensorDifference, module: str) -> bool:
    """True if a module had a tensor when it made that of a row."""
    place = given.place
    if place.phase == STATE:
        return place.module == module
    if place.role == "output":
        return place.caller == module != place.module
    is_this_call = row.place.module != module or place.call == row.place.call
    return place.module == module and is_this_call


def _classes(rows: Iterable[TensorDifference]) -> dict[str, str]:
    return {row.place.module: row.place.class_name for row in rows}


_WITHOUT_CODE = ("Sequential", "ModuleList", "ModuleDict")


def _in_backward(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference:
    """Finds the modules that used a tensor whose gradient differs."""
    place, kinds = row.place, _classes(rows)
    given = [r.place for r in rows if _is_tensor_of(row, r, rows)]
    users = [p.module for p in given if p.role == "input" and p.is_leaf]
    if place.role == "input_gradient" and not users:
        users = [place.module]
    names = list(dict.fromkeys(users))
    if any(p.role == "output" and not p.module for p in given):  # the model returns it
        if not names:
            return RootDifference("", "", "loss", row)
        remark = f"One of {', '.join(names)}, or the gradient that the model was given."
        return RootDifference("", kinds.get("", ""), "backward", row, remark=remark)
    # Code between modules may use the tensor, too: a residual does.
    others = [place.caller] if place.module != place.caller else []
    others += [p.module for p in given if not p.is_leaf]
    others = [n for n in dict.fromkeys(others) if kinds.get(n) not in _WITHOUT_CODE]
    module, remark = place.caller, ""
    if len(names) == 1 and not others:
        (module,) = names
    elif names:
        module = _common_parent([*names, *others])
        code = " or ".join(name or "the model" for name in others)
        code = f", or code of {code} itself" if others else ""
        remark = f"One of {', '.join(names)}{code}."
    return RootDifference(module, kinds.get(module, ""), "backward", row, remark=remark)


def _is_tensor_of(
    gradient: TensorDifference,
    used: TensorDifference,
    rows: Sequence[TensorDifference],
) -> bool:
    """True if a row is of the forward's tensor whose gradient another row has."""
    if used.place.phase != FORWARD or used.rank != gradient.rank:
        return False
    key = gradient.place.forward_key
    source = next((r for r in rows if r.place.key == key), None)
    return source is not None and source.mine.tensor == used.mine.tensor


def _common_parent(names: Sequence[str]) -> str:
    """The name of the innermost module that has all of these."""
    parts = zip(*(name.split(".") for name in names), strict=False)
    common = itertools.takewhile(lambda at: len(set(at)) == 1, parts)
    return ".".join(each[0] for each in common)


_BETWEEN = "clipping, unscaling, accumulation or an all-reduce"


def _in_gradients(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference:
    """Finds whether backward made a gradient, or code between it and the step."""
    place = row.place
    gradients = [r for r in rows if r.place.role == "parameter_gradient"]
    left = {r.place.fqn for r in rows if r.place.role == "accumulated_gradient"}
    made = [r for r in gradients if r.verdict == INTRODUCED and r.rank == row.rank]
    several = len({r.place.module for r in made}) > 1
    first = RootDifference("", "", "gradients", row)
    if place.role == "parameter_gradient" and place.fqn in left:
        first.remark = f"Made between backward and step: {_BETWEEN}."
    elif place.role == "parameter_gradient" and not left and several:
        first.remark = f"Made by {_BETWEEN}, or by the backward of these layers."
    else:
        first = RootDifference(place.module, place.class_name, "backward", row)
        own = [r for r in rows if r.rank == row.rank and r.place.module == place.module]
        unknown = [r.name for r in own if r.why and r.place.phase != STATE]
        unknown += known.lone_sources.get(place.module, ())
        first.unknown = tuple(unknown)
    return first


def unreached(
    entries: Sequence[RecordedTensor], references: Sequence[RecordedTensor]
) -> list[str]:
    """The modules that ran, and that a gradient reaches in the reference alone.

    One also reaches a module that returns the tensor of another's row.
    """
    gradients = [each.line for each in entries if each.line.phase == BACKWARD]
    forward = [each for each in entries if each.line.phase == FORWARD]
    keys = {line.forward_key for line in gradients}
    tensors = {(e.rank, e.tensor) for e in forward if e.line.key in keys}
    outputs = (e for e in forward if e.line.role == "output")
    reached = {e.line.module for e in outputs if (e.rank, e.tensor) in tensors}
    reached |= {line.module for line in gradients}
    its = (e.line.module for e in references if e.line.phase == BACKWARD)
    missing = {each.line.module for each in forward} - reached
    return [name for name in dict.fromkeys(its) if reached and name in missing]


def _detached(
    row: TensorDifference | None, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference | None:
    """The module that no gradient reaches in one run, if nothing before explains it."""
    if row is not None:
        is_output = row.place.role == "output_gradient" and not row.place.module
        if row.place.phase != BACKWARD or is_output:
            return None
    for names, run in zip(known.detached, RUNS, strict=True):
        own = [r for r in rows if names and r.place.module == names[0]]
        outputs = [r for r in own if r.place.role == "output"] or own
        if not outputs:
            continue
        shown = outputs[-1]
        why = "it is detached behind that, or not used for the loss there."
        if shown.mine.requires_grad != shown.its.requires_grad:
            why = "it does not require gradients there: frozen, or under no_grad()."
        if names[1:]:
            why += f" Nor does one reach {some(names[1:], _MAX_PLACES)}."
        text = f"In {run} no gradient reaches {shown.place}; {why}"
        kind = shown.place.class_name
        return RootDifference(names[0], kind, "detached", shown, remark=text)
    return None
