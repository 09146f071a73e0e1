"""`compare()`: two recordings, layer by layer, and the first cause of a difference."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...base.modules import is_within
from ...base.text import capitalized, counted, either, numbered, some, with_progress
from .comparison import Comparison, RootDifference, has_other_shape
from .judged_rows import (
    EQUAL,
    FLAGGED,
    INTRODUCED,
    PROPAGATED,
    ROUNDING,
    TensorDifference,
    differences_of,
    judge_all,
)
from .matching import (
    Matched,
    Pair,
    StepTensor,
    entries_of_rank,
    entries_of_ranks,
    match,
)
from .recordings import (
    RankStep,
    RecordedRun,
    RecordedTensor,
    read_run,
)
from .run_settings import OPTIMIZER, has_unequal_states
from .summary import BOUNDS, Summary
from .tensor_hooks import BACKWARD, FORWARD, STATE

# Remarks before anything is compared: how the two runs were unlike.


Remark = tuple[int, str]  # a step, and a sentence without its end
_MAX_NAMES = 6
_SETTINGS = {
    "devices": "devices",
    "dtypes": "dtypes of weights",
    "autocast": "autocast",
    "matmul_precision": "float32 matmul precision",
    "deterministic": "deterministic algorithms",
    "threads": "threads",
    "training": "training mode",
}


def run_remarks(run: RecordedRun, reference: RecordedRun) -> Iterator[str]:
    """Sentences on two runs: damage, versions, ranks, steps."""
    yield from (*run.damage(), *reference.damage())
    mine, its = run.heads[0].get("versions", {}), reference.heads[0].get("versions", {})
    for name in sorted({*mine, *its}):
        if mine.get(name) != its.get(name):
            yield f"{name}: {mine.get(name, 'none')} against {its.get(name, 'none')}."
    if run.num_ranks != reference.num_ranks:
        yield f"{counted(run.num_ranks, 'rank')} against {reference.num_ranks}."
    only = sorted({*run.steps} ^ {*reference.steps})
    if only:
        yield f"Steps of one run only, not compared: {_some(map(str, only))}."


def step_remarks(
    step: int, mine: Sequence[RankStep], its: Sequence[RankStep]
) -> list[Remark]:
    """Sentences on a step: settings, dropout, random states, failures."""
    found = of_ranks([(a.rank, _rank_remarks(a, b)) for a, b in rank_pairs(mine, its)])
    for side in (*mine, *its):
        found += [f"not recorded: {text}" for text in side.modes.get("failures", [])]
        if side.modes.get("raised"):
            found.append(f"rank {side.rank} raised {side.modes['raised']} in this step")
    return [(step, text) for text in found]


def _rank_remarks(mine: RankStep, its: RankStep) -> Iterator[str]:
    yield from _tie_remarks(mine, its)
    own, other = mine.modes, its.modes
    for key, name in _SETTINGS.items():
        if key in own and key in other and own[key] != other[key]:
            yield f"{name}: {_text(own.get(key))} against {_text(other.get(key))}"
    dropout = own.get("dropout") or other.get("dropout")
    if dropout:
        on = counted(len(dropout), "module")
        yield f"dropout is on in {on}, such as {dropout[0] or 'the model'}"
    yield from _compiled_remarks(mine, its)
    yield from _random_state_remarks(own, other)


def rank_pairs(
    mine: Sequence[RankStep], its: Sequence[RankStep]
) -> list[tuple[RankStep, RankStep]]:
    """Each rank's step in both runs; the first ranks' where a run has other ranks."""
    if [step.rank for step in mine] != [step.rank for step in its]:
        return [(mine[0], its[0])]
    return list(zip(mine, its, strict=True))


def of_ranks(texts: Sequence[tuple[int, Iterable[str]]]) -> list[str]:
    """The texts of ranks, each once, with the ranks where not all have it."""
    ranks: dict[str, list[int]] = {}
    for rank, found in texts:
        for text in found:
            ranks.setdefault(text, []).append(rank)
    return [
        text if len(of) == len(texts) else f"{text} ({numbered('rank', sorted(of))})"
        for text, of in ranks.items()
    ]


def as_sentences(remarks: Sequence[Remark]) -> list[str]:
    """Writes remarks, one sentence for all steps that have the same."""
    steps: dict[str, list[int]] = {}
    for step, text in remarks:
        steps.setdefault(text, []).append(step)
    named = ((numbered("step", found), text) for text, found in steps.items())
    return [f"{capitalized(name)}: {text}." for name, text in named]


def left_out_remarks(
    step: int, rows: Sequence[TensorDifference], matched: Matched
) -> list[Remark]:
    """Names what was not compared, and why: one remark for all of one reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            reasons.setdefault(row.why, []).append(row.name)
    found = [
        f"{names[0]} was not compared: {why}"
        if len(names) == 1
        else f"{len(names)} tensors were not compared, {why}: {_some(names)}"
        for why, names in reasons.items()
    ]
    return [(step, text) for text in (*found, *_match_remarks(matched))]


def _tie_remarks(mine: RankStep, its: RankStep) -> Iterator[str]:
    """Names parameters that are one tensor with another in one run alone."""
    ties, others = (_ties(s.row for s in side.sources) for side in (mine, its))
    for found, rest, whose in ((ties, others, "first"), (others, ties, "reference")):
        names = [f"{name} = {found[name]}" for name in found if name not in rest]
        if names:
            yield f"tied in the {whose} run alone: {_some(names)}"


def _ties(rows: Iterable[RecordedTensor]) -> dict[str, str]:
    """The parameters of one rank that are one tensor with an earlier one: its name."""
    found = [(r.line, r.place.fqn) for r in rows if r.place.role == "parameter"]
    names = {line.order: name for line, name in found}
    return {
        name: names[line.same]
        for line, name in found
        if line.same is not None and line.same in names and 0 not in line.shape
    }


def _compiled_remarks(mine: RankStep, its: RankStep) -> Iterator[str]:
    """Names the compiled modules of which only what goes in and comes out is known."""
    hidden = [_hidden_modules(side) for side in (mine, its)]
    names = [name or "the model" for name in dict.fromkeys((*hidden[0], *hidden[1]))]
    if names:
        whose = ["both runs" if all(hidden) else "the first run", "the reference run"]
        yield (
            f"modules within {_some(names)} were not recorded, which is compiled in "
            f"{whose[not hidden[0]]}"
        )


def _hidden_modules(step: RankStep) -> list[str]:
    seen = [s.row.place.module for s in step.sources if s.row.place.phase == FORWARD]
    return [
        name
        for name in step.modes.get("compiled", ())
        if not any(is_within(each, name) for each in seen)
    ]


def _random_state_remarks(own: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """Describes what unequal random states mean, where it is known who drew."""
    mine, its = own.get("random", {}), other.get("random", {})
    unequal = [name for name in mine if name in its and mine[name] != its[name]]
    if not unequal:
        return
    names = ", ".join(unequal)
    if "drawn" not in own or "drawn" not in other:  # an older recording, or no own one
        yield f"the random states were unequal ({names}): what was drawn may differ"
        return
    drawn = [name for name in unequal if name in {*own["drawn"], *other["drawn"]}]
    if drawn:
        yield (
            f"random numbers were drawn, from unequal states ({', '.join(drawn)}): "
            "what depends on them differs"
        )
    else:
        yield f"the random states were unequal ({names}), but nothing was drawn of them"


def _match_remarks(matched: Matched) -> Iterator[str]:
    """Sentences on tensors without a twin, and modules paired by their order."""
    for entries, whose in (
        (matched.only, "first"),
        (matched.only_reference, "reference"),
    ):
        if entries:
            yield f"{_missing(entries)} of the {whose} run alone"
    if matched.renamed:
        pairs = [f"{a} = {b}" for a, b in matched.renamed.items() if a != b]
        if pairs:
            were = (
                f"{counted(len(pairs), 'module')} w{'as' if len(pairs) == 1 else 'ere'}"
            )
            yield f"{were} paired by order and shape: {_some(pairs)}"
    if matched.is_coarse:
        yield (
            "too many modules have other names to align each with each: they were "
            "paired by equal results, and by order and shape between those"
        )


def differing_settings(
    steps: Sequence[tuple[RankStep, RankStep]], pairs: Sequence[Pair]
) -> dict[str, list[str]]:
    """Describes the plain attributes and arguments that differ, by module.

    Args:
        steps: The step of each rank in both runs, see `rank_pairs()`.
        pairs: The tensors that belong together, for the modules that do.
    """
    twins = {p.entry.place.module: p.reference.place.module for p in pairs}
    sides = [(a.rank, _settings(a, False), _settings(b, False)) for a, b in steps]
    return _differing_of_ranks(sides, twins)


def differing_optimizers(
    steps: Sequence[tuple[RankStep, RankStep]],
) -> dict[str, list[str]] | None:
    """Describes the settings of optimizers that differ; None if they are not known."""
    sides = [(a.rank, _settings(a, True), _settings(b, True)) for a, b in steps]
    if not all(mine and its for _, mine, its in sides):
        return None
    return _differing_of_ranks(sides, {})


_Settings = Mapping[str, Mapping[str, str]]


def _settings(step: RankStep, is_of_optimizer: bool) -> _Settings:
    """The settings of a rank's modules, or of its optimizers."""
    found = step.modes.get("settings", {}).items()
    return {k: v for k, v in found if k.startswith(OPTIMIZER) == is_of_optimizer}


def _differing_of_ranks(
    sides: Sequence[tuple[int, _Settings, _Settings]], twins: Mapping[str, str]
) -> dict[str, list[str]]:
    found = [(rank, _differing(mine, its, twins)) for rank, mine, its in sides]
    modules = dict.fromkeys(module for _, own in found for module in own)
    return {
        module: of_ranks([(rank, own.get(module, ())) for rank, own in found])
        for module in modules
    }


def _differing(
    own: _Settings, other: _Settings, twins: Mapping[str, str]
) -> dict[str, list[str]]:
    """Describes those of one rank, see `differing_settings()`."""
    found: dict[str, list[str]] = {}
    for key, values in own.items():
        module, _, call = key.partition(" #")
        twin = twins.get(module, module)
        its_values = other.get(f"{twin} #{call}" if call else twin)
        if its_values is None or its_values == values:
            continue
        texts = [
            f"{name} is {values.get(name, 'not there')}, against "
            f"{its_values.get(name, 'none')} in the reference"
            for name in dict.fromkeys((*values, *its_values))
            if values.get(name) != its_values.get(name)
        ]
        if texts:
            found.setdefault(module, []).extend(texts)
    return found


def setting_remarks(differing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Names modules with other attributes or arguments: one remark for the same."""
    modules: dict[str, list[str]] = {}
    for module, texts in differing.items():
        for text in texts:
            modules.setdefault(text, []).append(module or "the model")
    for text, names in modules.items():
        yield f"{text}: {_some(names)}"


def modules_without_gradients(
    entries: Sequence[StepTensor], references: Sequence[StepTensor]
) -> tuple[list[str], list[str]]:
    """The modules that ran in both runs, and that a gradient reaches in one alone."""
    sides = []
    for own, other in ((entries, references), (references, entries)):
        ran = {e.place.module for e in own if e.place.phase == FORWARD}
        reached = _reached_modules(own)
        found = [e.place.module for e in other if e.place.phase == BACKWARD]
        missing = (each for each in found if each in ran and each not in reached)
        sides.append(list(dict.fromkeys(missing)) if reached else [])
    return sides[0], sides[1]


def _reached_modules(entries: Sequence[StepTensor]) -> set[str]:
    """The modules with a gradient, also where that of one tensor is another's row."""
    reached = [e.place for e in entries if e.place.phase == BACKWARD]
    keys = {
        (p.module, p.call, p.role.removesuffix("_gradient"), p.path) for p in reached
    }
    forward = [e for e in entries if e.place.phase == FORWARD]
    tensors = {_first_order(e) for e in forward if e.place.key in keys}
    outputs = (e for e in forward if e.place.role == "output")
    shared = {e.place.module for e in outputs if _first_order(e) in tensors}
    return {each.module for each in reached} | shared


def _first_order(entry: StepTensor) -> tuple[int | None, int]:
    return entry.rank, entry.order if entry.same is None else entry.same


def _missing(entries: Sequence[StepTensor]) -> str:
    roles = collections.Counter(e.place.role.replace("_", " ") for e in entries)
    counts = ", ".join(counted(count, role) for role, count in roles.most_common())
    ranks = {entry.rank for entry in entries if entry.rank is not None}
    on = f" ({numbered('rank', sorted(ranks))})" if ranks else ""
    modules = list(dict.fromkeys(e.place.module or "the model" for e in entries))
    return f"not compared: {counts} of {_some(modules)}{on},"


def _some(names: Iterable[str]) -> str:
    return some(names, _MAX_NAMES)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# The first layer that computes differently from equal inputs.


_USED_ELSEWHERE = (
    "Or code outside of it, such as the loss or a hook, uses the parameter itself."
)


@dataclass
class StepContext:
    """Facts of a step beside its rows.

    Attributes:
        settings: The settings of both runs' ranks, see `run_settings.modes()`.
        missing: The modules of which a run has tensors that the other lacks.
        with_gradients: Which runs, 0 or 1, had gradients when a step's backward began.
        differing: The plain attributes and arguments of modules that differ.
        without_gradients: The modules that no gradient reaches in the first run, and
            those in the reference, that one reaches in the other; from the loss on.
        ties: The parameters of each run that are one tensor with an earlier one.
        lone_sources: The inputs, parameters and buffers of modules that one run lacks.
    """

    settings: Sequence[tuple[RankStep, RankStep]] = ()
    missing: Container[str] = ()
    with_gradients: Sequence[int] = ()
    lone_sources: Mapping[str, Sequence[str]] = field(default_factory=dict)
    differing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ties: Sequence[Mapping[str, str]] = ()
    without_gradients: tuple[list[str], list[str]] = field(
        default_factory=lambda: ([], [])
    )


def find_root_difference(
    rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference | None:
    """Finds the first difference that is made where it shows.

    Args:
        rows: The judged rows of one step, in the order of execution.
        known: What else is known of the step.
    """
    first = _first_difference(rows, known)
    if first is not None and first.row.rank is not None:
        key = first.row.place.key
        on = {r.rank for r in rows if r.place.key == key and _begins(r)}
        first.ranks = tuple(sorted(rank for rank in on if rank is not None))
    texts = [] if first is None else known.differing.get(first.module, ())
    if first is None or not texts:
        return first
    is_computed = first.kind in ("forward", "backward")
    if not is_computed and first.row.place.role != "buffer":
        return first
    remark = f"{first.remark} Its {'; its '.join(texts)}."
    return dataclasses.replace(first, remark=remark.strip())


def _first_difference(
    rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference | None:
    row = next((row for row in rows if _begins(row)), None)
    detached = _detached(row, rows, known)
    if detached is not None or row is None:
        return detached
    place = row.place
    if place.phase == STATE:
        others = [r for r in rows if r.place.phase == STATE and _begins(r)]
        total = sum(r.place.phase == STATE for r in rows)
        remark = f"{len(others)} of {total} parameters and buffers differ."
        if None not in row.requires_grad and len({*row.requires_grad}) == 2:
            run = _RUNS[bool(row.requires_grad[0])]
            remark = f"It does not require gradients in {run}: frozen there. {remark}"
        return RootDifference(
            place.module, place.class_name, "weights", row, remark=remark
        )
    given = (r for r in rows if r.place.role == "input" and _is_outermost(r, rows))
    other = next((r for r in given if r.rank == row.rank and has_other_shape(r)), None)
    if other is not None:
        return RootDifference("", "", "batch", other)
    if place.phase == BACKWARD:
        return _in_backward(row, rows, known)
    if place.role == "input" and _is_outermost(row, rows):
        return RootDifference("", "", "batch", row)
    before = rows[: rows.index(row)]
    if place.role == "input":
        module = place.caller
        kind = next((r.place.class_name for r in rows if r.place.module == module), "")
    else:
        module, kind = place.module, place.class_name
    after = _returned_last(before, module)
    remark = _describe_dropout(row, module, known) if "ropout" in kind else ""
    unknown = _not_compared(before, row, module, known)
    return RootDifference(
        module, kind, "forward", row, after, remark=remark, unknown=unknown
    )


_RUNS = "the first run", "the reference run"


def _detached(
    row: TensorDifference | None, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference | None:
    """The module that no gradient reaches in one run, if nothing before explains it."""
    if row is not None:
        is_output = row.place.role == "output_gradient" and not row.place.module
        if row.place.phase != BACKWARD or is_output:
            return None
    for names, run in zip(known.without_gradients, _RUNS, strict=True):
        own = [r for r in rows if names and r.place.module == names[0]]
        outputs = [r for r in own if r.place.role == "output"] or own
        if not outputs:
            continue
        shown = outputs[-1]
        required = shown.requires_grad[0] != shown.requires_grad[1]
        why = "it is detached behind that, or not used for the loss there."
        if required:
            why = "it does not require gradients there: frozen, or under no_grad()."
        if names[1:]:
            why += f" Nor any of {_some(names[1:])}."
        kind, name = shown.place.class_name, names[0]
        text = f"In {run} no gradient reaches {shown.place}; {why}"
        return RootDifference(name, kind, "detached", shown, remark=text)
    return None


def _begins(row: TensorDifference) -> bool:
    """True if a difference may begin with a row."""
    is_of_gradient = row.place.phase == BACKWARD
    return row.verdict == INTRODUCED or (has_other_shape(row) and not is_of_gradient)


def _is_outermost(row: TensorDifference, rows: Sequence[TensorDifference]) -> bool:
    """True if no recorded module has called the module of a row."""
    if not row.place.module or row.place.caller:
        return not row.place.module
    return not any(r.place.phase == FORWARD and not r.place.module for r in rows)


def _not_compared(
    before: Sequence[TensorDifference],
    row: TensorDifference,
    module: str,
    known: StepContext,
) -> tuple[str, ...]:
    """Names the tensors that a module was given of which nothing is known."""
    found = [
        each.name
        for each in before
        if each.measures is None and each.rank == row.rank
        if _is_source(each, row, module)
    ]
    return (*found, *known.lone_sources.get(module, ()))


def _is_source(given: TensorDifference, row: TensorDifference, module: str) -> bool:
    """True if a module had a tensor when it made that of a row."""
    place = given.place
    if place.phase == STATE:
        return place.module == module
    if place.role == "output":
        return place.caller == module != place.module
    is_this_call = row.place.module != module or place.call == row.place.call
    return place.module == module and is_this_call


def _describe_dropout(row: TensorDifference, module: str, known: StepContext) -> str:
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


def _returned_last(before: Sequence[TensorDifference], module: str) -> str:
    """The last module that had returned to this one."""
    calls = (
        row.place.module
        for row in reversed(before)
        if row.place.role == "output" and row.place.caller == module
    )
    return next((name for name in calls if name and name != module), "")


def _in_backward(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> RootDifference:
    """Finds the modules that used a tensor whose gradient differs."""
    place = row.place
    if not place.is_of_call:
        remark = _between(row, rows)
        if remark is not None:
            return RootDifference("", "", "gradients", row, remark=remark)
        tie = _describe_tie(place.fqn, known)
        if tie:
            return RootDifference("", "", "gradients", row, remark=tie)
        is_known = not known.with_gradients and _has_compared(row, rows, known)
        kind = "backward" if is_known else "gradients"
        if len(known.with_gradients) == 1:
            (run,) = known.with_gradients
            older = (
                f"In {_RUNS[run]} alone parameters had gradients when backward began"
            )
            older += ", to which it adds."
            return RootDifference("", "", "gradients", row, remark=older)
        older = "Parameters had gradients before backward began, to which it adds."
        remark = older if known.with_gradients else _USED_ELSEWHERE
        return RootDifference(place.module, place.class_name, kind, row, remark=remark)
    given = [r.place for r in rows if _is_given(r, row, rows)]
    users = [each for each in given if each.role == "input" and each.is_leaf]
    if place.role == "input_gradient" and not users:
        users = [place]
    names = list(dict.fromkeys(user.module for user in users))
    is_returned = any(each.role == "output" and not each.module for each in given)
    if is_returned and not names:
        return RootDifference("", "", "loss", row)
    if is_returned:
        remark = f"One of {', '.join(names)}, or the gradient that the model was given."
        kind = next((r.place.class_name for r in rows if not r.place.module), "")
        return RootDifference("", kind, "backward", row, remark=remark)
    # Code between modules may use the tensor, too: a residual does.
    others = [place.caller] if place.module != place.caller else []
    others += [each.module for each in given if not each.is_leaf]
    kinds = {r.place.module: r.place.class_name for r in rows}
    others = [n for n in dict.fromkeys(others) if kinds.get(n) not in _WITHOUT_CODE]
    if len(names) == 1 and not others:
        return RootDifference(users[0].module, users[0].class_name, "backward", row)
    module = _common_parent([*names, *others]) if names else place.caller
    kind = kinds.get(module, "")
    code = either(name or "the model" for name in others) if others else ""
    code = f", or code of {code} itself" * bool(code)
    remark = f"One of {', '.join(names)}{code}." if names else ""
    return RootDifference(module, kind, "backward", row, remark=remark)


def ties_of(*runs: Sequence[StepTensor]) -> list[dict[str, str]]:
    """The ties of the first rank of both runs."""
    return [_ties(e.row for e in run if e.rank == run[0].rank) for run in runs]


def _describe_tie(fqn: str, known: StepContext) -> str:
    """Describes whose gradients are added to a parameter's, if it is a shared one."""
    found = []
    for ties in known.ties:
        first = ties.get(fqn, fqn)
        names = (first, *(name for name in ties if ties[name] == first))
        found.append(_some(name for name in names if name != fqn))
    if not any(found):
        return ""
    if all(found):
        return f"It is one tensor with {found[0]}: the backward of each adds to it."
    run, name = _RUNS[not found[0]], found[0] or found[1]
    return (
        f"In {run} alone it is one tensor with {name}, whose gradient is added to it."
    )


_BETWEEN = "clipping, unscaling, accumulation or an all-reduce"


def _between(row: TensorDifference, rows: Sequence[TensorDifference]) -> str | None:
    """Describes what code between backward and step did; None: it may be backward."""
    finals = [r for r in rows if r.place.role == "parameter_gradient"]
    made = [r for r in finals if r.verdict == INTRODUCED and r.rank == row.rank]
    others = [r for r in rows if r.place.phase == BACKWARD and r not in finals]
    is_equal = all(r.verdict in (EQUAL, ROUNDING) for r in others if r.measures)
    is_seen = any(
        r.place.role == "accumulated_gradient" and r.place.fqn == row.place.fqn
        for r in others
    )
    if not is_seen and (
        len({r.place.module for r in made}) < 2
        or not is_equal
        or any(r.place.role == "accumulated_gradient" for r in others)
    ):
        return None
    if row.place.role == "accumulated_gradient":
        return None
    text = f"Made between backward and step: {_BETWEEN}."
    if not is_seen:
        text = f"Made by {_BETWEEN}, or by the backward of these layers."
    text += " Within backward all gradients that were compared are equal." * is_equal
    return f"{text} {_common_factor(made)}".rstrip()


def _common_factor(rows: Sequence[TensorDifference]) -> str:
    """Describes the number that all gradients were multiplied by, if there is one."""
    factors = [r.factor for r in rows if math.prod(r.shapes[1]) >= 4]
    known = [each for each in factors if each is not None]
    if len(known) < len(factors) or not known:
        return ""
    middle = sorted(known)[len(known) // 2]
    if any(abs(each - middle) > 1e-2 * abs(middle) for each in known):
        return ""
    which = "The one that differs is"
    if len(rows) > 1:
        which = f"All {len(rows)} that differ are"
    text = f"{which} {middle:.6g} times the reference's"
    whole = 1 / middle if 0 < abs(middle) < 1 else middle
    if whole > 1.5 and abs(whole - round(whole)) < 1e-3:
        text += f", as where {round(whole)} ranks or micro-batches are summed in one "
        text += "run and averaged in the other"
    return f"{text}."


_WITHOUT_CODE = ("Sequential", "ModuleList", "ModuleDict")


def _has_compared(
    row: TensorDifference, rows: Sequence[TensorDifference], known: StepContext
) -> bool:
    """True if all that a parameter's module was given and made was compared."""
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
    used: TensorDifference, gradient: TensorDifference, rows: Sequence[TensorDifference]
) -> bool:
    """True if an input is the tensor whose gradient is a row."""
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


def compare_runs(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    names: Mapping[str, str],
    threshold: float | None,
    cosine: float | None,
) -> Comparison:
    """Compares two folders; see `overflow_fast.compare`."""
    mine, its = read_run(run), read_run(reference)
    result = Comparison(mine.name, its.name, [], threshold=threshold)
    remarks, earlier = list[Remark](), EarlierSteps()
    shared = sorted({*mine.steps} & {*its.steps})
    for step in with_progress(shared, "steps", len(shared)):
        own = [each.read() for each in mine.steps[step]]
        other = [each.read(own) for each in its.steps[step]]
        mine.has_forward |= _has_forward(own)
        its.has_forward |= _has_forward(other)
        before = result.num_alone
        rows, first = _compare_step(result, remarks, step, own, other, names, earlier)
        if first is not None and result.first is None:
            result.first = earlier.described(first)
        earlier.add(rows, result.num_alone - before)
        remarks += earlier.add_optimizers(step, rank_pairs(own, other))
        mark(rows, threshold, cosine)
        result.add_step(rows)
    result.said += [*run_remarks(mine, its), *as_sentences(remarks)]
    result.said += [
        f"{path} cannot be read ({why}): its tensors were compared by fingerprints."
        for path, why in {**mine.unread, **its.unread}.items()
    ]
    if not mine.steps or not its.steps:
        empty = its if mine.steps else mine
        result.said.append(f"{empty.name} holds no whole step.")
    result.said += [
        f"{each.name}: no forward of the model was recorded."
        for each in (mine, its)
        if each.steps and not each.has_forward and not _has_other_forward(each, shared)
    ]
    return result


def _has_forward(ranks: Sequence[RankStep]) -> bool:
    sources = (source for rank in ranks for source in rank.sources)
    return any(each.row.place.phase == FORWARD for each in sources)


def _has_other_forward(run: RecordedRun, compared: Sequence[int]) -> bool:
    """True if a step that was not compared has a forward."""
    others = (run.steps[step] for step in sorted({*run.steps} - {*compared}))
    return any(_has_forward([each.read() for each in ranks]) for ranks in others)


_MAKERS = "other code that writes to weights"
_ROUNDED = (
    " makes it; or rounding: where an optimizer divides by the size of gradients, as "
    "Adam does, one that is rounding alone makes a step as long as any other."
)


# Settings that choose an implementation of the same update.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


def _is_same_update(optimizers: Mapping[str, Sequence[str]] | None) -> bool:
    """True if of the settings that differ none changes what an update is."""
    texts = (text for found in (optimizers or {}).values() for text in found)
    return all(text.partition(" is ")[0] in _IMPLEMENTATIONS for text in texts)


def _describe_update(
    optimizers: Mapping[str, Sequence[str]] | None, is_exact: bool
) -> str:
    """Describes what can have made an update differ.

    Args:
        optimizers: The settings of optimizers that differ; None if they are not known.
        is_exact: Whether the gradients before were equal bit for bit.
    """
    found = [f"{name}: {'; '.join(of)}." for name, of in (optimizers or {}).items()]
    text = " ".join(map(capitalized, found))
    if found and not _is_same_update(optimizers):
        return text
    first = "The optimizer, its state, its settings, or"
    if found:
        first = f"{text} That, the optimizer's state, or"
    elif optimizers is not None:
        first = "The settings of the optimizers are equal: their state, or"
    return f"{first} {_MAKERS}" + (" makes it." if is_exact else _ROUNDED)


class EarlierSteps:
    """Keeps what is to be known of the steps before that of the first difference."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._with_gradients: list[int] = []  # of parameters, which were compared
        self._has_equal_gradients = self._is_equal = self._is_whole = True
        self._last: set[str] = set()  # the parameters that had one in the last of them
        self._optimizers: dict[str, list[str]] | None = None  # what of them differs
        self._may_divide = True
        self.errors = UpdateErrors()

    def add(self, rows: Sequence[TensorDifference], num_alone: int) -> None:
        """Adds the rows of a step, and how many tensors of it one run alone has."""
        compared = [row for row in rows if row.measures is not None]
        if not compared:
            return
        step = compared[0].step
        self._steps.append(step)
        self._is_equal &= all(row.verdict == EQUAL for row in compared)
        self._is_whole &= len(compared) == len(rows) and not num_alone
        found = [r for r in compared if r.place.role == "parameter_gradient"]
        if found:
            self._with_gradients.append(step)
            self._last = {each.place.fqn for each in found}
            self._has_equal_gradients &= all(each.verdict == EQUAL for each in found)

    @property
    def may_divide(self) -> bool:
        """True if all optimizers so far had equal settings, and may normalize."""
        is_known = self._optimizers is not None
        return is_known and _is_same_update(self._optimizers) and self._may_divide

    def add_optimizers(
        self, step: int, ranks: Sequence[tuple[RankStep, RankStep]]
    ) -> list[Remark]:
        """Adds the settings of a step's optimizers.

        Returns:
            Remarks on optimizers that differ and did not before: a schedule of learning
            rates is one difference, not one a step.
        """
        found = differing_optimizers(ranks)
        if found is None:
            return []
        for each in (_settings(side, True) for pair in ranks for side in pair):
            self._may_divide &= all(g["class"] != "'SGD'" for g in each.values())
        known = self._optimizers or {}
        new = {name: texts for name, texts in found.items() if name not in known}
        self._optimizers = {**known, **new}
        return [(step, text) for text in setting_remarks(new)]

    def described(self, first: RootDifference) -> RootDifference:
        """Adds what is known of these steps to the first difference."""
        row, steps = first.row, self._with_gradients
        first = dataclasses.replace(
            first,
            earlier=tuple(self._steps),
            is_equal_before=self._is_equal,
            is_whole_before=self._is_whole,
        )
        is_update = first.kind == "weights" and row.place.role == "parameter"
        is_next = bool(steps) and steps[-1] == row.step - 1
        if not is_update or not is_next or row.place.fqn not in self._last:
            return first
        if has_other_shape(row):
            return first
        how = "equal" if self._has_equal_gradients else "equal but for rounding"
        makers = _describe_update(self._optimizers, self._has_equal_gradients)
        remark = f"{first.remark} {makers}"
        return dataclasses.replace(
            first, kind="update", gradients=(tuple(steps), how), remark=remark
        )


def _compare_step(
    result: Comparison,
    remarks: list[Remark],
    step: int,
    own: Sequence[RankStep],
    other: Sequence[RankStep],
    names: Mapping[str, str],
    earlier: EarlierSteps,
) -> tuple[list[TensorDifference], RootDifference | None]:
    entries, references = _entries(own, other)
    copies = []
    if _is_shared(own) != _is_shared(other) or len(own) != len(other):
        copies.append((step, _NO_INPUT_GRADIENTS))
        entries, references = map(_without_input_gradients, (entries, references))
    matched = match(entries, references, names)
    rows = differences_of(matched.pairs, step)
    judge_all(rows, matched.pairs, _has_tf32(own) or _has_tf32(other))
    earlier.errors.explain(rows, matched.pairs, earlier.may_divide)
    result.num_alone += len(matched.only) + len(matched.only_reference)
    remarks += left_out_remarks(step, rows, matched)
    remarks += [*copies, *step_remarks(step, own, other)]
    differing = differing_settings(rank_pairs(own, other), matched.pairs)
    remarks += [(step, text) for text in setting_remarks(differing)]
    known = _known(own, other, matched)
    known.differing = differing
    known.ties = ties_of(entries, references)
    known.without_gradients = modules_without_gradients(entries, references)
    return rows, find_root_difference(rows, known)


_DIVIDED = "the rounding of gradients, which the optimizer divides by their size"


class UpdateErrors:
    """Finds weights and buffers that differ no more than what they were made with.

    Adam makes of a gradient that is nothing but rounding a step as long as any other:
    gradients that round differently move those elements of a weight apart that are no
    larger than their rounding, by two such steps at most.
    """

    def __init__(self) -> None:
        # Of each rank's parameter, the largest relative difference of its gradient in
        # the steps before; of buffers, by the name "", of all that was propagated.
        self._relative = dict[tuple[int | None, str], float]()
        self._sums = dict[tuple[int | None, str], torch.Tensor]()  # of its last weight
        self._share = dict[tuple[int | None, str], float]()  # of elements, see below
        self._moved = dict[tuple[int | None, str], float]()  # apart, at most

    def explain(
        self,
        rows: Sequence[TensorDifference],
        pairs: Sequence[Pair],
        may_divide: bool,
    ) -> None:
        """Explains the weights and buffers of a step, and keeps its gradients.

        Args:
            rows: The judged rows of the step.
            pairs: Their tensors.
            may_divide: Whether both runs have optimizers of equal settings, which may
                divide gradients by their size.
        """
        for row, pair in zip(rows, pairs, strict=True):
            name = "" if row.place.role == "buffer" else row.place.fqn
            if row.place.phase == STATE:
                self._explain(row, (row.rank, name))
            if row.place.role == "parameter" and pair.reference.summary is not None:
                self._explain_division(row, pair.reference.summary, may_divide)
            if row.place.role == "parameter_gradient":
                at = row.rank, row.place.fqn
                self._relative[at] = max(self._relative.get(at, 0.0), row.relative)
                self._add_share(at, row, pair.reference.summary)
            if row.verdict == PROPAGATED:
                at = row.rank, ""
                self._relative[at] = max(self._relative.get(at, 0.0), row.relative)

    def _explain(self, row: TensorDifference, at: tuple[int | None, str]) -> None:
        if row.verdict == INTRODUCED and at in self._relative:
            row.propagated = self._relative[at]
            if row.measures is not None and row.relative <= FLAGGED * row.propagated:
                row.verdict = PROPAGATED

    def _explain_division(
        self, row: TensorDifference, summary: Summary, may_divide: bool
    ) -> None:
        at = row.rank, row.place.fqn
        before = self._sums.get(at)
        self._sums[at] = summary.sums
        if before is None:
            return
        step = float((summary.sums - before).norm())
        moved = 2 * math.sqrt(self._share.get(at, 0.0)) * step
        moved = self._moved[at] = self._moved.get(at, 0.0) + moved
        if may_divide and row.verdict == INTRODUCED and row.measures is not None:
            bound = moved / summary.norm if summary.norm else 0.0
            if row.relative <= bound:
                row.propagated = max(row.propagated, bound)
                row.verdict = PROPAGATED
                row.notes.append(_DIVIDED)

    def _add_share(
        self, at: tuple[int | None, str], row: TensorDifference, summary: Summary | None
    ) -> None:
        """Adds the share of a gradient that is no larger than what rounding makes."""
        if summary is None or len(summary.magnitudes) != len(BOUNDS) + 1:
            return
        numel = max(1, math.prod(row.shapes[1]))
        size = FLAGGED * row.relative * summary.norm / math.sqrt(numel)
        if not size or not math.isfinite(size):
            return
        found = summary.magnitudes[bisect.bisect_left(BOUNDS, size)]
        num = max(1, summary.magnitudes[-1])
        found += num < numel  # what a sample does not show may be as much as one of it
        share = min(1.0, found / num)
        self._share[at] = max(self._share.get(at, 0.0), share)


def _known(
    own: Sequence[RankStep], other: Sequence[RankStep], matched: Matched
) -> StepContext:
    return StepContext(
        rank_pairs(own, other),
        matched.missing_modules(),
        [
            i
            for i, run in enumerate((own, other))
            if any(step.modes.get("had_gradients") for step in run)
        ],
        matched.lone_sources(),
    )


def _entries(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> tuple[list[StepTensor], list[StepTensor]]:
    """The tensors of both: rank by rank where both are shared alike, else as wholes."""
    if len(own) > 1 and [s.rank for s in own] == [s.rank for s in other]:
        pairs = list(zip(own, other, strict=True))
        if all(_parts(a) == _parts(b) for a, b in pairs):
            return (
                [e for step in own for e in entries_of_rank(step)],
                [e for step in other for e in entries_of_rank(step)],
            )
    return entries_of_ranks(own), entries_of_ranks(other)


_NO_INPUT_GRADIENTS = (
    "gradients of modules' inputs are left out: models that ranks share give copies of "
    "them to modules"
)


def _is_shared(steps: Sequence[RankStep]) -> bool:
    return any(_parts(step) for step in steps)


def _without_input_gradients(entries: list[StepTensor]) -> list[StepTensor]:
    return [each for each in entries if each.place.role != "input_gradient"]


def _parts(step: RankStep) -> dict[object, object]:
    found = {s.row.place.key: s.row.part for s in step.sources}
    return {key: part for key, part in found.items() if part is not None}


def _has_tf32(steps: Sequence[RankStep]) -> bool:
    return any(step.modes.get("tf32") for step in steps)


def mark(
    rows: Sequence[TensorDifference], threshold: float | None, cosine: float | None
) -> None:
    """Highlights the rows beyond the user's own thresholds.

    Args:
        rows: The rows.
        threshold: Of the largest absolute difference, or where that is not known of the
            relative one; None for no such threshold.
        cosine: The least cosine, or None.
    """
    for row in rows:
        measures = row.measures
        if measures is None:
            continue
        found = []
        largest = measures.max_abs
        value = measures.relative if largest is None else largest
        if threshold is not None and value > threshold:
            name = "relative difference" if largest is None else "max abs"
            found.append(f"{name} {value:.2g} > {threshold:g}")
        if cosine is not None and measures.cosine < cosine:
            found.append(f"cosine {measures.cosine:.4g} < {cosine:g}")
        row.highlight = "; ".join(found)
