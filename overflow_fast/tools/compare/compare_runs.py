"""`compare()`: two runs, step by step, up to the first that differs.

For each step tensors are paired (`matching`), measured and judged (`judged_rows`), and
the first that differs is named (`first_difference`). What is unlike, or could not be
compared, is said once for all steps that have it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...base.text import capitalized, counted, numbered, some, with_progress
from .comparison import Comparison
from .earlier_steps import EarlierSteps
from .first_difference import (
    RUNS,
    StepContext,
    detached_modules,
    find_root_difference,
    ties_of,
)
from .judged_rows import (
    FLAGGED,
    INTRODUCED,
    PROPAGATED,
    TensorDifference,
    difference_of,
    error_of_layer,
    judge_all,
)
from .matching import Matched, is_shared, match, tensors_of
from .recordings import RankStep, RecordedRun, RecordedTensor, read_run
from .run_settings import RUN
from .unlike import Unlike

_MAX_NAMES = 6  # in a sentence; chosen


def compare_runs(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    names: Mapping[str, str],
    threshold: float | None,
    cosine: float | None,
) -> Comparison:
    """Compares two folders; see `overflow_fast.compare`."""
    mine, its = read_run(run), read_run(reference)
    result = Comparison(mine.name, its.name, threshold=threshold)
    steps, alone = StepComparison(result, names, threshold, cosine), list[int]()
    pairs = _paired_steps(mine, its, alone)
    for step, own, other in with_progress(pairs, "steps", None):
        steps.add(step, own, other)
        if result.first is not None:
            break
    is_whole = result.first is None or next(pairs, None) is None
    result.said += [*mine.damage(), *its.damage()]
    if len(mine.files) != len(its.files):
        ranks = counted(len(mine.files), "rank")
        result.said.append(f"{ranks} against {len(its.files)}.")
    if alone:
        result.said.append(f"Steps of one run only, not compared: {_some(alone)}.")
    mine_run, its_run = ({RUN: each.files[0].head.versions} for each in (mine, its))
    steps.unlike.add(mine_run, its_run, {})
    result.said += steps.sentences()
    if not is_whole:
        result.said.append("The steps behind it follow from it, and were not compared.")
    return result


def _paired_steps(
    run: RecordedRun, reference: RecordedRun, alone: list[int]
) -> Iterator[tuple[int, list[RankStep], list[RankStep]]]:
    """Yields the steps of both runs, and notes the numbers of those of one alone."""
    mine, its = run.steps(), reference.steps()
    own, other = next(mine, None), next(its, None)
    while own or other:
        if own and other and own[0] == other[0]:
            yield own[0], own[1], other[1]
            own, other = next(mine, None), next(its, None)
        elif other is None or (own and own[0] < other[0]):
            assert own is not None
            alone.append(own[0])
            own = next(mine, None)
        else:
            alone.append(other[0])
            other = next(its, None)


class StepComparison:
    """Compares steps of two runs, and keeps what is to be said of them.

    Args:
        result: Gets the steps.
        names: Patterns of module names of the first run, and what the reference has.
        threshold: See `overflow_fast.compare`.
        cosine: See there.

    Attributes:
        unlike: How the settings are unlike.
    """

    def __init__(
        self,
        result: Comparison,
        names: Mapping[str, str],
        threshold: float | None = None,
        cosine: float | None = None,
    ) -> None:
        self._result, self._names = result, names
        self._threshold, self._cosine = threshold, cosine
        self._remarks = dict[str, dict[int, None]]()  # the steps of each
        self._earlier = EarlierSteps()
        self.unlike = Unlike()

    def add(
        self,
        step: int,
        own: Sequence[RankStep],
        other: Sequence[RankStep],
        errors: Mapping[tuple[str, int], float] | None = None,
    ) -> None:
        """Compares a step.

        Args:
            step: Its number.
            own: What the ranks of the first run have recorded.
            other: What those of the reference have.
            errors: The relative errors that calls of modules make of their own, by
                module and call, where a float32 shadow has measured them.
        """
        entries, references = tensors_of(own, other)
        remarks = list(_not_recorded((*own, *other)))
        if is_shared(own) != is_shared(other) or len(own) != len(other):
            remarks.append(_NO_INPUT_GRADIENTS)
            entries, references = map(_without_input_gradients, (entries, references))
        matched = match(entries, references, self._names)
        rows = [difference_of(*pair, step) for pair in matched.pairs]
        judge_all(rows, any(side.end.tf32 for side in (*own, *other)))
        _apply_errors(rows, errors or {})
        if self._earlier.judge(rows):
            remarks.append(_NOT_JUDGED)
        known = self._context(own, other, matched)
        known.ties = ties_of(entries), ties_of(references)
        self._note_ties(*known.ties)
        known.detached = detached_modules(entries, references)
        first = find_root_difference(rows, known)
        first = None if first is None else self._earlier.described(first)
        self._earlier.add(step, rows)
        sides = (side.end.settings for side in (*own, *other))
        self._earlier.add_optimizers(sides, known.settings)
        mark(rows, self._threshold, self._cosine)
        self._result.num_alone += sum(map(len, matched.alone))
        self._result.add_step(step, rows, first)
        for text in (*remarks, *_left_out(rows, matched)):
            self._remarks.setdefault(text, {})[step] = None

    def _context(
        self, own: Sequence[RankStep], other: Sequence[RankStep], matched: Matched
    ) -> StepContext:
        known = StepContext(matched.missing_modules(), matched.lone_sources())
        both = own, other
        known.with_gradients = [
            i for i in (0, 1) if any(side.end.had_gradients for side in both[i])
        ]
        twins = {a.place.module: b.place.module for a, b in matched.pairs}
        settings = dict[str, dict[str, None]]()  # in sets that keep their order
        for a, b in _rank_pairs(own, other):
            found = self.unlike.add(a.end.settings, b.end.settings, twins)
            for name, texts in found.items():
                settings.setdefault(name, {}).update(dict.fromkeys(texts))
            drawn = sorted({*a.end.drawn, *b.end.drawn})
            if any(a.end.random.get(n) != b.end.random.get(n) for n in drawn):
                known.has_other_random = True
                text = f"the random states that {', '.join(drawn)} drew from"
                self.unlike.note(RUN, "random states", text)
        known.settings = {name: list(texts) for name, texts in settings.items()}
        return known

    def _note_ties(self, *ties: Mapping[str, str]) -> None:
        for found, rest, run in zip(ties, ties[::-1], RUNS, strict=True):
            for name, other in found.items():
                if name not in rest:
                    text = f"one tensor with {other} in {run} alone"
                    self.unlike.note(name, "tie", text)

    def sentences(self) -> Iterator[str]:
        """The remarks, each once, and in one line all that is also unlike."""
        for text, of in self._remarks.items():
            is_of_all = list(of) == self._result.steps
            where = "" if is_of_all else f"{numbered('step', list(of))}: "
            yield f"{capitalized(f'{where}{text}')}."
        if unlike := str(self.unlike):
            yield unlike


_NO_INPUT_GRADIENTS = (
    "gradients of modules' inputs are left out: models that ranks share give copies of "
    "them to modules"
)
_NOT_JUDGED = (
    "weights were not judged: their gradients differed by rounding before, of which an "
    "optimizer that divides by their size, as Adam does, makes whole steps"
)


def _not_recorded(sides: Sequence[RankStep]) -> Iterator[str]:
    compiled = dict.fromkeys(name for side in sides for name in side.end.compiled)
    if compiled:
        modules = _some(name or "the model" for name in compiled)
        yield f"nothing was recorded within {modules}: it is compiled"
    for side in sides:
        yield from (f"not recorded: {text}" for text in side.end.failures)
        if side.end.raised:
            yield f"rank {side.rank} raised {side.end.raised}"


def _rank_pairs(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> list[tuple[RankStep, RankStep]]:
    """Each rank's step in both runs; the first ranks' where a run has other ranks."""
    if [step.rank for step in own] != [step.rank for step in other]:
        return [(own[0], other[0])]
    return list(zip(own, other, strict=True))


def _without_input_gradients(entries: list[RecordedTensor]) -> list[RecordedTensor]:
    return [each for each in entries if each.place.role != "input_gradient"]


def _left_out(rows: Sequence[TensorDifference], matched: Matched) -> Iterator[str]:
    """Names what was not compared, and why: one remark for all of one reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            reasons.setdefault(row.why, []).append(row.name)
    for why, names in reasons.items():
        tensors = counted(len(names), "tensor")
        yield f"{tensors} not compared, {why}: {_some(names)}"
    for alone, run in zip(matched.alone, RUNS, strict=True):
        if alone:
            roles = collections.Counter(e.place.role.replace("_", " ") for e in alone)
            kinds = ", ".join(counted(n, role) for role, n in roles.most_common())
            names = list(dict.fromkeys(e.place.module or "the model" for e in alone))
            yield f"of {run} alone, not compared: {kinds} of {_some(names)}"
    pairs = [f"{a} = {b}" for a, b in matched.renamed.items() if a != b]
    if pairs:
        modules = counted(len(pairs), "module")
        yield f"{modules} paired by order and shape: {_some(pairs)}"


def _some(names: Iterable[object]) -> str:
    return some(map(str, names), _MAX_NAMES)


def _apply_errors(
    rows: Sequence[TensorDifference], errors: Mapping[tuple[str, int], float]
) -> None:
    """Lets the errors that layers make themselves decide about their outputs."""
    for row in rows:
        made = errors.get((row.place.module, row.place.call))
        if row.place.role == "output" and made is not None:
            row.made = made
            if made >= FLAGGED * error_of_layer(row):
                row.verdict = INTRODUCED
            elif row.verdict == INTRODUCED:
                row.verdict = PROPAGATED


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
