"""`compare()`: two recordings, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import said_first
from .comparison_result import Comparison
from .first_cause import Known, first_of
from .first_difference import First
from .judged_rows import Difference, difference_of
from .matching import Matched, match
from .msprobe_dump import find_dumps, read_dumps
from .places_of import FORWARD
from .run_reader import RankStep, Run, read_run
from .whole import Entry, entries_of_rank, entries_of_ranks
from .yardstick import judge_all


def compare_runs(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    names: Mapping[str, str],
    threshold: float | None,
    cosine: float | None,
) -> Comparison:
    """Compares two folders; see `overflow_fast.compare`."""
    mine, its = _read(run), _read(reference)
    result = Comparison(mine.name, its.name, [], threshold=threshold)
    result.said += said_first.of_runs(mine, its)
    for step in sorted({*mine.steps} & {*its.steps}):
        own, other = mine.steps[step], its.steps[step]
        result.said += said_first.of_step(step, own, other)
        rows, first = _compare_step(result, step, own, other, names)
        result.rows += rows
        result.first = result.first or first
    mark(result.rows, threshold, cosine)
    result.said += [
        f"{path} cannot be read ({why}): its tensors were compared by fingerprints."
        for path, why in {**mine.unread, **its.unread}.items()
    ]
    if not mine.steps or not its.steps:
        result.said.append(f"{_empty(mine, its)} holds no whole step.")
    result.said += [
        f"{each.name}: no forward of the model was recorded."
        for each in (mine, its)
        if each.steps and not _has_forward(each)
    ]
    return result


def _has_forward(run: Run) -> bool:
    sources = (s for ranks in run.steps.values() for r in ranks for s in r.sources)
    return any(each.row.place.phase == FORWARD for each in sources)


def _read(folder: str | os.PathLike[str]) -> Run:
    """Reads a recording, or a dump of msprobe."""
    dumps = find_dumps(Path(folder))
    return read_dumps(Path(folder), dumps) if dumps else read_run(folder)


def _empty(mine: Run, its: Run) -> str:
    return mine.name if not mine.steps else its.name


def _compare_step(
    result: Comparison,
    step: int,
    own: Sequence[RankStep],
    other: Sequence[RankStep],
    names: Mapping[str, str],
) -> tuple[list[Difference], First | None]:
    entries, references = _entries(own, other)
    if _is_shared(own) != _is_shared(other) or len(own) != len(other):
        result.said.append(_NO_INPUT_GRADIENTS.format(step=step))
        entries, references = map(_without_input_gradients, (entries, references))
    matched = match(entries, references, names)
    result.said += said_first.of_matches(step, matched)
    rows = [difference_of(pair, step) for pair in matched.pairs]
    judge_all(rows, matched.pairs, _has_tf32(own) or _has_tf32(other))
    for row in rows:
        if row.why:
            result.said.append(f"Step {step}: {row.name} was not compared: {row.why}.")
    return rows, first_of(rows, _known(own, other, matched))


def _known(
    own: Sequence[RankStep], other: Sequence[RankStep], matched: Matched
) -> Known:
    return Known(
        list(zip(own, other, strict=False)),
        matched.missing_modules(),
        any(step.modes.get("had_gradients") for step in (*own, *other)),
        matched.lone_inputs(),
    )


def _entries(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> tuple[list[Entry], list[Entry]]:
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
    "Step {step}: gradients of modules' inputs are left out: models that ranks share "
    "give copies of them to modules."
)


def _is_shared(steps: Sequence[RankStep]) -> bool:
    return any(_parts(step) for step in steps)


def _without_input_gradients(entries: list[Entry]) -> list[Entry]:
    return [each for each in entries if each.place.role != "input_gradient"]


def _parts(step: RankStep) -> dict[object, object]:
    found = {s.row.place.key: s.row.part for s in step.sources}
    return {key: part for key, part in found.items() if part is not None}


def _has_tf32(steps: Sequence[RankStep]) -> bool:
    return any(step.modes.get("tf32") for step in steps)


def mark(
    rows: Sequence[Difference], threshold: float | None, cosine: float | None
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
