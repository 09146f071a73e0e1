"""`compare()`: two runs, step by step, up to the first that differs.

For each step tensors are paired (`matching`), measured and judged (`judged_rows`), and
the first that differs is named (`first_difference`). What is unlike, or could not be
compared, is said once for all steps that have it.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...base.text import capitalized, counted, numbered, some, with_progress
from .comparison import Comparison
from .earlier_steps import EarlierSteps
from .first_difference import RUNS, StepContext, find_root_difference, unreached
from .judged_rows import TensorDifference, difference_of, judge_all
from .matching import Matched, is_shared, match, tensors_of
from .recorded import RankStep, RecordedTensor, RecordingError, read_run
from .run_settings import RUN
from .unlike import Unlike

_MAX_NAMES = 6  # in a sentence; chosen


def compare(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares two recordings layer by layer, and names the first that differs.

    Steps are compared in their order, up to the first that differs. Modules are paired
    by the names that the model gives them, whatever wraps it; where names differ, in
    their order, by equal results and then by class and shapes. Differences are measured
    in units of what rounding explains: from 8 times on, and if what it was computed
    from differs 8 times less, a tensor counts as made differently there.

    Args:
        run: The folder of a recording.
        reference: The folder of the one to compare it with.
        names: Regular expressions in module names of `run`, and their replacements.

    Returns:
        The comparison. Print it, or see its `first`.

    Raises:
        RecordingError: If a folder holds no recording. It is a ValueError.
        ValueError: If a pattern is wrong.
    """
    names = names_of(names)
    mine, its = read_run(run), read_run(reference)
    result = Comparison(mine.name, its.name)
    steps = StepComparison(result, names)
    both = sorted(mine.files.keys() & its.files.keys())
    for step in with_progress(both, "steps", len(both)):
        own, other = mine.ranks(step), its.ranks(step)
        if own and other:
            steps.add(step, own, other)
        if result.first is not None:
            break
    for each in (mine, its):
        if both and not result.steps and each.damaged:
            raise RecordingError(each.damaged[0])
    result.said += [*mine.damage(), *its.damage()]
    if alone := sorted(mine.files.keys() ^ its.files.keys()):
        result.said.append(f"Steps of one run only, not compared: {_some(alone)}.")
    result.said += steps.sentences()
    if result.first is not None and both[-1] > result.first.row.step:
        result.said.append("The steps behind it follow from it, and were not compared.")
    return result


def names_of(names: Mapping[str, str] | None) -> dict[str, str]:
    """The patterns of module names, and their replacements.

    Raises:
        TypeError: If it is no mapping of texts.
        ValueError: If a text is no regular expression, or no replacement for it.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a mapping of texts, got {type(names).__name__}")
    for pattern, new in names.items():
        if not isinstance(pattern, str) or not isinstance(new, str):
            raise TypeError(f"names must map texts to texts, got {pattern!r}: {new!r}")
        try:
            re.sub(pattern, new, "")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"names has {pattern!r}: {new!r}, which is wrong: {error}"
            ) from None
    return dict(names)


class StepComparison:
    """Compares steps of two runs, and keeps what is to be said of them.

    Args:
        result: Gets the steps.
        names: Patterns of module names of the first run, and what the reference has.

    Attributes:
        unlike: How the settings are unlike.
    """

    def __init__(self, result: Comparison, names: Mapping[str, str]) -> None:
        self._result, self._names = result, names
        self._remarks = dict[str, dict[int, None]]()  # the steps of each
        self._earlier = EarlierSteps()
        self.unlike = Unlike()

    def add(
        self,
        step: int,
        own: Sequence[RankStep],
        other: Sequence[RankStep],
    ) -> None:
        """Compares a step.

        Args:
            step: Its number.
            own: What the ranks of the first run have recorded.
            other: What those of the reference have.
        """
        entries, references = tensors_of(own, other)
        remarks = list(_not_recorded((*own, *other)))
        if len(own) != len(other):
            remarks.append(f"{counted(len(own), 'rank')} against {len(other)}")
        if is_shared(own) != is_shared(other) or len(own) != len(other):
            remarks.append(_NO_INPUT_GRADIENTS)
            entries, references = map(_without_input_gradients, (entries, references))
        matched = match(entries, references, self._names)
        rows = [difference_of(*pair, step) for pair in matched.pairs]
        judge_all(rows, any(side.line.tf32 for side in (*own, *other)))
        if self._earlier.judge(rows):
            remarks.append(_NOT_JUDGED)
        known = self._context(own, other, matched)
        known.detached = (
            unreached(entries, references),
            unreached(references, entries),
        )
        first = find_root_difference(rows, known)
        first = None if first is None else self._earlier.described(first)
        self._earlier.add(step, rows)
        sides = (side.line.settings for side in (*own, *other))
        self._earlier.add_optimizers(sides, known.settings)
        self._result.num_alone += sum(map(len, matched.alone))
        self._result.add_step(step, rows, first)
        for text in (*remarks, *_left_out(rows, matched)):
            self._remarks.setdefault(text, {})[step] = None

    def _context(
        self, own: Sequence[RankStep], other: Sequence[RankStep], matched: Matched
    ) -> StepContext:
        known = StepContext(matched.lone_sources())
        twins = {a.line.module: b.line.module for a, b in matched.pairs}
        settings = dict[str, dict[str, None]]()  # in sets that keep their order
        for a, b in _rank_pairs(own, other):
            found = self.unlike.add(a.line.settings, b.line.settings, twins)
            for name, texts in found.items():
                settings.setdefault(name, {}).update(dict.fromkeys(texts))
            drawn = sorted({*a.line.drawn, *b.line.drawn})
            if any(a.line.random.get(n) != b.line.random.get(n) for n in drawn):
                known.has_other_random = True
                text = f"the random states that {', '.join(drawn)} drew from"
                self.unlike.note(RUN, "random states", text)
        known.settings = {name: list(texts) for name, texts in settings.items()}
        return known

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
    compiled = dict.fromkeys(name for side in sides for name in side.line.compiled)
    if compiled:
        modules = _some(name or "the model" for name in compiled)
        yield f"nothing was recorded within {modules}: it is compiled"
    for side in sides:
        yield from (f"not recorded: {text}" for text in side.line.failures)
        if side.line.raised:
            yield f"rank {side.rank} raised {side.line.raised}"


def _rank_pairs(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> list[tuple[RankStep, RankStep]]:
    """Each rank's step in both runs; the first ranks' where a run has other ranks."""
    if [step.rank for step in own] != [step.rank for step in other]:
        return [(own[0], other[0])]
    return list(zip(own, other, strict=True))


def _without_input_gradients(entries: list[RecordedTensor]) -> list[RecordedTensor]:
    return [each for each in entries if each.line.role != "input_gradient"]


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
            roles = collections.Counter(e.line.role.replace("_", " ") for e in alone)
            kinds = ", ".join(counted(n, role) for role, n in roles.most_common())
            names = list(dict.fromkeys(e.line.module or "the model" for e in alone))
            yield f"of {run} alone, not compared: {kinds} of {_some(names)}"
    pairs = [f"{a} = {b}" for a, b in matched.renamed.items() if a != b]
    if pairs:
        modules = counted(len(pairs), "module")
        yield f"{modules} paired by order and shape: {_some(pairs)}"


def _some(names: Iterable[object]) -> str:
    return some(map(str, names), _MAX_NAMES)
