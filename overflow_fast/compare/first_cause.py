"""The first layer that computes differently from equal inputs."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

from .first_difference import First, has_other_shape
from .judged_rows import MADE_HERE, Difference
from .places_of import BACKWARD, FORWARD, STATE
from .run_reader import RankStep
from .surroundings import has_unequal_states

_USED_ELSEWHERE = "Or code outside of it, such as the loss, uses the parameter itself."


@dataclass
class Known:
    """Facts of a step beside its rows.

    Attributes:
        settings: The settings of both runs' ranks, see `surroundings.modes()`.
        missing: The modules of which a run has tensors that the other lacks.
        had_gradients: Whether parameters had gradients before the step, in a run.
        lone_inputs: The modules of which a run has inputs that the other lacks.
    """

    settings: Sequence[tuple[RankStep, RankStep]] = ()
    missing: Container[str] = ()
    had_gradients: bool = False
    lone_inputs: Container[str] = ()


def first_of(rows: Sequence[Difference], known: Known | None = None) -> First | None:
    """Finds the first difference that is made where it shows.

    Args:
        rows: The judged rows of one step, in the order of execution.
        known: What else is known of the step.
    """
    known = known or Known()
    row = next((row for row in rows if row.verdict == MADE_HERE), None)
    if row is None:
        return None
    place = row.place
    if place.phase == STATE:
        others = [r for r in rows if r.place.phase == STATE and r.verdict == MADE_HERE]
        total = sum(r.place.phase == STATE for r in rows)
        remark = f"{len(others)} of {total} parameters and buffers differ."
        return First(place.module, place.class_name, "weights", row, remark=remark)
    given = (r for r in rows if r.place.role == "input" and not r.place.module)
    other = next((r for r in given if r.rank == row.rank and has_other_shape(r)), None)
    if other is not None:
        return First("", "", "batch", other)
    if place.phase == BACKWARD:
        return _in_backward(row, rows, known)
    if place.role == "input" and not place.module:
        return First("", "", "batch", row)
    before = rows[: rows.index(row)]
    if place.role == "input":
        module = place.caller
        kind = next((r.place.class_name for r in rows if r.place.module == module), "")
    else:
        module, kind = place.module, place.class_name
    after = _returned_last(before, module)
    remark = _of_dropout(row, module, known) if "ropout" in kind else ""
    unknown = _not_compared(before, row, module, known)
    return First(module, kind, "forward", row, after, remark=remark, unknown=unknown)


def _not_compared(
    before: Sequence[Difference], row: Difference, module: str, known: Known
) -> tuple[str, ...]:
    """Names the tensors that a module was given of which nothing is known."""
    found = [
        each.name
        for each in before
        if each.measures is None and each.rank == row.rank
        if _is_source(each, row, module)
    ]
    lone = [f"{module or 'the model'}: inputs of one run alone"]
    return (*found, *(lone if module in known.lone_inputs else ()))


def _is_source(given: Difference, row: Difference, module: str) -> bool:
    """Tells whether a module had a tensor when it made that of a row."""
    place = given.place
    if place.phase != FORWARD:
        return False
    if place.role == "output":
        return place.caller == module != place.module
    is_this_call = row.place.module != module or place.call == row.place.call
    return place.module == module and is_this_call


def _of_dropout(row: Difference, module: str, known: Known) -> str:
    """Describes why a module with dropout differs, where it is known."""
    if row.reference_name:  # its name in the other run is another
        return ""
    sides = [s for s in known.settings if row.rank in (None, s[0].rank)]
    for mine, its in ((a.modes, b.modes) for a, b in sides[:1]):
        is_on = [module in side.get("dropout", ()) for side in (mine, its)]
        if "dropout" in mine and "dropout" in its and is_on[0] != is_on[1]:
            return "Its dropout is on in one run alone."
        if all(is_on) and has_unequal_states(mine, its):
            return "It drops other values: the random states of the runs were unequal."
    return ""


def _returned_last(before: Sequence[Difference], module: str) -> str:
    """The last module that had returned to this one."""
    calls = (
        row.place.module
        for row in reversed(before)
        if row.place.role == "output" and row.place.caller == module
    )
    return next((name for name in calls if name and name != module), "")


def _in_backward(row: Difference, rows: Sequence[Difference], known: Known) -> First:
    """Finds the modules that used a tensor whose gradient differs."""
    place = row.place
    if place.role == "parameter_gradient":
        is_known = not known.had_gradients and _has_compared(row, rows, known)
        kind = "backward" if is_known else "gradients"
        older = "Parameters had gradients before the step began."
        remark = older if known.had_gradients else _USED_ELSEWHERE
        return First(place.module, place.class_name, kind, row, remark=remark)
    given = [r.place for r in rows if _is_given(r, row, rows)]
    users = [each for each in given if each.role == "input" and each.is_leaf]
    if place.role == "input_gradient" and not users:
        users = [place]
    names = list(dict.fromkeys(user.module for user in users))
    is_returned = any(each.role == "output" and not each.module for each in given)
    if is_returned and not names:
        return First("", "", "loss", row)
    if is_returned:
        remark = f"One of {', '.join(names)}, or the gradient that the model was given."
        kind = next((r.place.class_name for r in rows if not r.place.module), "")
        return First("", kind, "backward", row, remark=remark)
    if len(names) == 1:
        return First(users[0].module, users[0].class_name, "backward", row)
    module = _common_parent(names) if names else place.caller
    kind = next((r.place.class_name for r in rows if r.place.module == module), "")
    remark = f"One of {', '.join(names)}." if names else ""
    return First(module, kind, "backward", row, remark=remark)


def _has_compared(row: Difference, rows: Sequence[Difference], known: Known) -> bool:
    """Tells whether all that a parameter's module was given and made was compared."""
    module = row.place.module
    own = (r for r in rows if r.rank == row.rank and r.place.module == module)
    is_whole = all(r.measures is not None or r.place.phase == STATE for r in own)
    return is_whole and module not in known.missing


def _common_parent(names: Sequence[str]) -> str:
    """The name of the innermost module that has all of these."""
    parts = [name.split(".") for name in names]
    common = itertools.takewhile(
        lambda at: len(set(at)) == 1, zip(*parts, strict=False)
    )
    return ".".join(each[0] for each in common)


def _is_given(
    used: Difference, gradient: Difference, rows: Sequence[Difference]
) -> bool:
    """Tells whether an input is the tensor whose gradient is a row."""
    place = gradient.place
    role = place.role.removesuffix("_gradient")
    for row in rows:
        its = row.place
        is_source = (its.module, its.call, its.role, its.path) == (
            *(place.module, place.call, role),
            place.path,
        )
        if is_source:
            orders = {row.order, row.same}
            return used.rank == gradient.rank and bool(
                orders & {used.order if used.same is None else used.same}
            )
    return False
