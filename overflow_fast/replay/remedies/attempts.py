"""Tries remedies in order, by the cause of a failure."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.module_kinds import is_normalization
from ..explanation import Explanation, Op, Remedy
from ..parts import batch_size
from ..places import span_of
from ..rerun import Rerun
from ..rows import Row
from .changes import (
    Bfloat16,
    Float32Modules,
    LineChange,
    ScaledGradients,
    SomeSamples,
)
from .checkpoints import of_checkpoints
from .line_edit import CodePlace, NotEditableError, SourceFile
from .line_forms import Written, forms_of
from .trials import Trials

_LINES = ("range overflow", "undefined", "singular gradient", "empty reduction")
_MAX_FORMS = 4


@dataclass
class Failure:
    """A failure that is explained.

    Attributes:
        found: Its explanation.
        row: The operation that is named, or None.
        place: The place of the call in which it failed.
        bad: The tensor that was non-finite before the step, or None.
        modules: The names of the modules that ran from the operation on, in order.
        checkpoints: Files of weights that the user gave, the newest last.
    """

    found: Explanation
    row: Row | None
    place: int
    bad: torch.Tensor | None = None
    modules: Sequence[str] = ()
    checkpoints: Sequence[str | os.PathLike[str]] = ()


def find_remedies(
    failure: Failure, rerun: Rerun, budget: int, step_seconds: float
) -> None:
    """Tries remedies on the step, and adds them to its explanation.

    Args:
        failure: The failure.
        rerun: Runs the step; its state is kept.
        budget: How many forwards may be run.
        step_seconds: How long a plain replay took.
    """
    trials = Trials(rerun, budget, step_seconds)
    try:
        for attempt in _attempts(failure, trials):
            if trials.is_over:
                break
            attempt()
    except NotEditableError as error:
        trials.notes.append(f"A change of the line was not tried: {error}.")
    found = failure.found
    found.remedies = sorted(trials.remedies, key=lambda each: not each.is_finite)
    found.notes += trials.notes


def _attempts(failure: Failure, trials: Trials) -> Iterator[Any]:
    cause = failure.found.cause
    if cause == "bad data":
        yield from _of_data(failure, trials)
    if cause == "bad weights":
        yield from of_checkpoints(failure.checkpoints, trials)
    if cause == "range overflow":
        yield from _of_precision(failure, trials)
    if cause in _LINES:
        yield from _of_lines(failure, trials)
    if cause == "range overflow" and failure.found.phase == "backward":
        yield from _of_scale(failure, trials)


def _of_lines(failure: Failure, trials: Trials) -> Iterator[Any]:
    """Guarded forms of the line of the operation."""
    op, row = failure.found.op, failure.row
    if op is None or row is None or not row.frames:
        return
    code, span = row.frames[0][0], span_of(row.frames)
    source = SourceFile(code.co_filename)
    node = None if span is None else source.node_at(span)
    if node is None:
        return
    place = CodePlace.of(code)
    forms = forms_of(Written(source, node), op, failure.found.cause)
    for _, form in zip(range(_MAX_FORMS), forms, strict=False):
        edit = source.edited(node, form.code)
        remedy = Remedy(
            form.text, edit.code, file=op.file, line=edit.first, last_line=edit.last
        )
        yield functools.partial(trials.attempt, remedy, LineChange(place, edit.text))


def _of_precision(failure: Failure, trials: Trials) -> Iterator[Any]:
    """Wider dtypes where float16 has overflowed."""
    op, models = failure.found.op, trials.rerun.models
    if op is None or not _is_half(op):
        return
    if len(models) == 1:
        ((prefix, model),) = models.items()
        names = _around(model, failure.found.module.removeprefix(prefix))
        yield from _of_modules(model, names[:1], trials)
        yield from _up_to_norms(failure, model, prefix, trials)
        yield from _of_modules(model, names[1:], trials)
    remedy = Remedy("bfloat16", "model.to(torch.bfloat16)")
    if any(
        each.dtype == torch.float16 for m in models.values() for each in m.parameters()
    ):
        text = "bfloat16 for the model"
    else:
        text = "bfloat16 for autocast"
        remedy = Remedy(text, "torch.autocast(device_type, dtype=torch.bfloat16)")
    remedy = Remedy(text, remedy.code)
    yield functools.partial(trials.attempt, remedy, Bfloat16())


def _of_modules(
    model: torch.nn.Module, names: list[str], trials: Trials
) -> Iterator[Any]:
    """The smallest module around the operation that helps in float32, by halving."""
    helped: dict[int, bool] = {}

    def attempt(place: int) -> None:
        remedy = Remedy(
            f"{names[place]} in float32",
            f'overflow_fast.keep_in_fp32(model, ["{names[place]}"])',
        )
        helped[place] = trials.attempt(remedy, Float32Modules((names[place],)))

    if not names or any(each.is_finite for each in trials.remedies):
        return
    low, high = -1, len(names) - 1
    yield lambda: attempt(high)
    while helped.get(high) and high - low > 1:
        middle = (low + high) // 2
        yield functools.partial(attempt, middle)
        low, high = (low, middle) if helped.get(middle) else (middle, high)


def _up_to_norms(
    failure: Failure, model: torch.nn.Module, prefix: str, trials: Trials
) -> Iterator[Any]:
    """All from the operation up to normalizations, which make values small again.

    A residual stream stays large beyond the first of them.
    """
    modules = dict(model.named_modules())
    ran = [name.removeprefix(prefix) for name in failure.modules]
    ran = [name for name in ran if name and name in modules]
    norms = [name for name in ran if is_normalization(modules[name])]
    if not norms or any(each.is_finite for each in trials.remedies):
        return
    names = ran[: ran.index(norms[0])]
    for until in ([norms[0]], _patterns(norms, modules)):
        remedy = Remedy(
            f"float32 up to {until[0] if len(until) == 1 else f'{until[0]} ...'}",
            f"overflow_fast.keep_in_fp32(model, {names}, until={until})",
        )
        change = Float32Modules(tuple(names), tuple(until))
        yield functools.partial(trials.attempt, remedy, change)
        if len(norms) == 1 or trials.remedies[-1].is_finite:
            return


def _patterns(norms: list[str], modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Patterns of normalizations by the last parts of their names, or the names."""
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in norms)
    alike = [n for n in modules if n.rpartition(".")[2] in lasts]
    if not all(is_normalization(modules[name]) for name in alike):
        return norms
    return [f"*{last}" for last in lasts]


def _around(model: torch.nn.Module, name: str) -> list[str]:
    """A module's name and those of the modules around it that are called."""
    names, modules = [], dict(model.named_modules())
    while name:
        if (
            getattr(type(modules.get(name)), "forward", None)
            is not torch.nn.Module.forward
        ):
            names.append(name)
        name = name.rpartition(".")[0]
    return names


def _is_half(op: Op) -> bool:
    return any(each.dtype == "float16" for each in [*op.outputs, *op.inputs])


def _of_data(failure: Failure, trials: Trials) -> Iterator[Any]:
    """The step without the samples that are not finite."""
    found, rerun = failure.found, trials.rerun
    size, bad = batch_size(rerun.calls[failure.place]), failure.bad
    if not rerun.team.can_cut(failure.place):
        return
    if size is None or bad is None or not bad.dim() or len(bad) != size:
        return
    rows = bad.detach().isfinite().reshape(size, -1).all(1).nonzero().flatten().tolist()
    if not rows:
        return
    name = found.tensor
    remedy = Remedy(
        f"without the {size - len(rows)} of {size} samples whose {name} is not finite",
        f"keep = torch.isfinite({name}).reshape({size}, -1).all(1)",
    )
    change = SomeSamples(failure.place, tuple(rows))
    yield functools.partial(trials.attempt, remedy, change)


def _of_scale(failure: Failure, trials: Trials) -> Iterator[Any]:
    """A smaller loss scale where gradients of a scaled loss overflow."""
    op = failure.found.op
    scales = [
        float(held.abs().max())
        for call in trials.rerun.calls
        for held in call.held.values()
        if held.numel() == 1
    ]
    if op is None or not _is_half(op) or not scales or max(scales) <= 1:
        return
    for factor in (2**4, 2**10):
        scale = max(1.0, max(scales) / factor)
        change = ScaledGradients(scale / max(scales))
        remedy = Remedy(
            f"a loss scale of {scale:g} instead of {max(scales):g}",
            f"torch.amp.GradScaler(init_scale={scale:g})",
        )
        yield functools.partial(trials.attempt, remedy, change)
