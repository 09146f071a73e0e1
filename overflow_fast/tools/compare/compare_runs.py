"""`compare()`: two runs, step by step, up to the first that differs.

For each step tensors are paired (`matching`), measured and judged (`judged_rows`), and
the first that differs is named (`first_difference`). What is unlike, or could not be
compared, is said once for all steps that have it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...base.text import capitalized, counted, numbered, some, with_progress
from .comparison import Comparison
from .first_difference import (
    RUNS,
    RootDifference,
    StepContext,
    detached_modules,
    find_root_difference,
    ties_of,
)
from .judged_rows import (
    EQUAL,
    FLAGGED,
    INTRODUCED,
    PROPAGATED,
    TensorDifference,
    difference_of,
    error_of_layer,
    judge_all,
)
from .matching import Matched, StepTensor, is_shared, match, tensors_of
from .recordings import RankStep, RecordedRun, read_run
from .run_settings import OPTIMIZER, RUN, Settings
from .tensor_hooks import STATE

_MAX_NAMES = 6
# Settings that choose an implementation of the same update.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


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
        result.said.append(
            f"{counted(len(mine.files), 'rank')} against {len(its.files)}."
        )
    if alone:
        found = some(map(str, alone), _MAX_NAMES)
        result.said.append(f"Steps of one run only, not compared: {found}.")
    heads = [{RUN: run.files[0].head.versions} for run in (mine, its)]
    steps.add_settings(*heads)
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
        self._remarks = dict[str, list[int]]()  # the steps of each
        self._unlike = dict[str, list[str]]()  # the names that a setting differs of
        self._updates = EarlierSteps()

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
        if is_shared(own) != is_shared(other) or len(own) != len(other):
            self._say(step, _NO_INPUT_GRADIENTS)
            entries, references = map(_without_input_gradients, (entries, references))
        matched = match(entries, references, self._names)
        rows = [difference_of(pair, step) for pair in matched.pairs]
        judge_all(rows, any(side.end.tf32 for side in (*own, *other)))
        _apply_errors(rows, errors or {})
        optimizers = self._add_ranks(step, own, other, matched)
        if self._updates.explain(rows, optimizers):
            self._say(step, _NOT_JUDGED)
        known = self._context(own, other, matched)
        known.ties = ties = ties_of(entries), ties_of(references)
        for found, rest, run in zip(ties, ties[::-1], RUNS, strict=True):
            for name in (each for each in found if each not in rest):
                text = f"one tensor with {found[name]} in {run} alone"
                self._note_unlike(name, text)
        known.detached = detached_modules(entries, references)
        first = find_root_difference(rows, known)
        first = None if first is None else self._updates.described(first)
        self._updates.add(step, rows)
        mark(rows, self._threshold, self._cosine)
        self._result.num_alone += sum(map(len, matched.alone))
        self._result.add_step(step, rows, first)
        for text in _left_out(rows, matched):
            self._say(step, text)

    def _say(self, step: int, text: str) -> None:
        self._remarks.setdefault(text, []).append(step)

    def _add_ranks(
        self,
        step: int,
        own: Sequence[RankStep],
        other: Sequence[RankStep],
        matched: Matched,
    ) -> OptimizersPair:
        """Adds how the settings of each rank are unlike, and what was not recorded."""
        self._twins = {
            p.entry.place.module: p.reference.place.module for p in matched.pairs
        }
        self._differing = dict[str, list[str]]()
        optimizers = OptimizersPair()
        for mine, its in _rank_pairs(own, other):
            found = self.add_settings(mine.end.settings, its.end.settings)
            for name, texts in found.items():
                known = self._differing.setdefault(name, [])
                known += [text for text in texts if text not in known]
            optimizers.add(mine.end.settings, its.end.settings)
        optimizers.differing = {
            name: texts
            for name, texts in self._differing.items()
            if name.startswith(OPTIMIZER)
        }
        compiled = {name: None for s in (*own, *other) for name in s.end.compiled}
        if compiled:
            modules = some((name or "the model" for name in compiled), _MAX_NAMES)
            self._say(step, f"nothing was recorded within {modules}: it is compiled")
        for side in (*own, *other):
            for text in side.end.failures:
                self._say(step, f"not recorded: {text}")
            if side.end.raised:
                self._say(step, f"rank {side.rank} raised {side.end.raised}")
        return optimizers

    def add_settings(self, mine: Settings, its: Settings) -> dict[str, list[str]]:
        """Adds how settings are unlike.

        Returns:
            Sentences on those, without their end, by the name that has them.
        """
        found = dict[str, list[str]]()
        for key, values in mine.items():
            name, _, call = key.partition(" #")
            twin = self._twins.get(name, name) if hasattr(self, "_twins") else name
            others = its.get(f"{twin} #{call}" if call else twin)
            for setting in dict.fromkeys((*values, *(others or ()))):
                if others is None or values.get(setting) == others.get(setting):
                    continue
                pair = (d.get(setting, "none") for d in (values, others))
                text = "{} is {}, against {}".format(setting, *pair)
                found.setdefault(name, []).append(text)
        for name, texts in found.items():
            if texts[0].startswith("class is"):  # its other settings follow from that
                del texts[1:]
            for text in texts:
                self._note_unlike(name or "the model", text)
        return found

    def _note_unlike(self, name: str, text: str) -> None:
        """Notes a setting; a schedule of learning rates is one, not one a step."""
        setting = text.partition(" is ")[0]
        known = (t for t, names in self._unlike.items() if name in names)
        if not any(t.partition(" is ")[0] == setting for t in known):
            self._unlike.setdefault(text, []).append(name)

    def _context(
        self, own: Sequence[RankStep], other: Sequence[RankStep], matched: Matched
    ) -> StepContext:
        known = StepContext(matched.missing_modules(), matched.lone_sources())
        known.settings = self._differing
        known.with_gradients = [
            i
            for i, run in enumerate((own, other))
            if any(s.end.had_gradients for s in run)
        ]
        for a, b in _rank_pairs(own, other):
            drawn = {*a.end.drawn, *b.end.drawn}
            mine, its = a.end.random, b.end.random
            if any(mine.get(name) != its.get(name) for name in drawn):
                known.has_other_random = True
                names = ", ".join(sorted(drawn))
                self._note_unlike(RUN, f"the random states that {names} drew from")
        return known

    def sentences(self) -> Iterator[str]:
        """The remarks, each once, and in one line all that is also unlike."""
        steps = self._result.steps
        for text, of in self._remarks.items():
            where = "" if of == steps else f"{numbered('step', sorted({*of}))}: "
            yield f"{capitalized(f'{where}{text}')}."
        unlike = [
            text + f" ({some(names, _MAX_PLACES)})" * (names != [RUN])
            for text, names in self._unlike.items()
        ]
        if unlike:
            more = [f"{len(unlike) - _MAX_UNLIKE} more"] * (len(unlike) > _MAX_UNLIKE)
            yield f"Also unlike: {'; '.join([*unlike[:_MAX_UNLIKE], *more])}."


_MAX_PLACES, _MAX_UNLIKE = 3, 12
_NO_INPUT_GRADIENTS = (
    "gradients of modules' inputs are left out: models that ranks share give copies of "
    "them to modules"
)
_NOT_JUDGED = (
    "weights were not judged: their gradients differed by rounding before, of which an "
    "optimizer that divides by their size, as Adam does, makes whole steps"
)


def _rank_pairs(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> list[tuple[RankStep, RankStep]]:
    """Each rank's step in both runs; the first ranks' where a run has other ranks."""
    if [step.rank for step in own] != [step.rank for step in other]:
        return [(own[0], other[0])]
    return list(zip(own, other, strict=True))


def _without_input_gradients(entries: list[StepTensor]) -> list[StepTensor]:
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


def _some(names: Iterable[str]) -> str:
    return some(names, _MAX_NAMES)


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


# Weights of a later step: of an update, or of gradients that differed before.


@dataclasses.dataclass
class OptimizersPair:
    """The optimizers of a step of both runs.

    Attributes:
        classes: Their classes; empty where none was recorded.
        differing: How their settings differ, in sentences.
    """

    classes: set[str] = dataclasses.field(default_factory=set)
    differing: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, *sides: Settings) -> None:
        """Adds the classes that the settings of a rank name."""
        found = (
            v for side in sides for k, v in side.items() if k.startswith(OPTIMIZER)
        )
        self.classes |= {values.get("class", "") for values in found}


class EarlierSteps:
    """Judges weights by the gradients of the steps before, and describes an update."""

    def __init__(self) -> None:
        self._steps, self._with_gradients = list[int](), list[int]()
        self._is_equal = self._has_equal_gradients = True
        self._last = set[str]()  # the parameters with a gradient in the last of them
        # Of each rank's parameter the largest relative difference of its gradients; of
        # buffers, by the name "", of all that was propagated.
        self._relative = dict[tuple[int | None, str], float]()
        self._classes = set[str]()
        self._differing = dict[str, list[str]]()

    def explain(
        self, rows: Sequence[TensorDifference], optimizers: OptimizersPair
    ) -> bool:
        """Finds weights and buffers that differ no more than what they were made of.

        Args:
            rows: The judged rows of the step.
            optimizers: The optimizers that step the weights after it.

        Returns:
            True if weights could not be judged.
        """
        left = False
        for row in rows:
            name = "" if row.place.role == "buffer" else row.place.fqn
            before = self._relative.get((row.rank, name), 0.0)
            if row.place.phase != STATE or row.verdict != INTRODUCED or not before:
                continue
            is_linear = name == "" or self._is_linear
            row.propagated = before if is_linear else math.inf
            if row.measures is not None and row.relative <= FLAGGED * row.propagated:
                row.verdict = PROPAGATED
                left |= not is_linear
        self._classes |= optimizers.classes
        self._differing = {**optimizers.differing, **self._differing}
        return left

    @property
    def _is_linear(self) -> bool:
        """True if an update is as far apart as gradients: no optimizer divides them."""
        return bool(self._changes) or self._classes == {"'SGD'"} or not self._classes

    @property
    def _changes(self) -> list[str]:
        """The settings that differ and change what an update is, in sentences."""
        return [
            f"{capitalized(name)}: {'; '.join(texts)}."
            for name, texts in self._differing.items()
            if any(text.partition(" is ")[0] not in _IMPLEMENTATIONS for text in texts)
        ]

    def add(self, step: int, rows: Sequence[TensorDifference]) -> None:
        """Adds a step that was compared."""
        compared = [row for row in rows if row.measures is not None]
        found = [r for r in compared if r.place.role == "parameter_gradient"]
        if compared:
            self._steps.append(step)
            self._is_equal &= all(row.verdict == EQUAL for row in compared)
        if found:
            self._with_gradients.append(step)
            self._last = {each.place.fqn for each in found}
            self._has_equal_gradients &= all(each.verdict == EQUAL for each in found)
        for row in rows:
            names = [row.place.fqn] * (row.place.role == "parameter_gradient")
            for name in (*names, *[""] * (row.verdict == PROPAGATED)):
                before = self._relative.get((row.rank, name), 0.0)
                self._relative[row.rank, name] = max(before, row.relative)

    def described(self, first: RootDifference) -> RootDifference:
        """Adds what is known of the steps before to the first difference."""
        row, steps = first.row, self._with_gradients
        before = "no difference" if self._is_equal else "no more than rounding"
        first = dataclasses.replace(first, earlier=tuple(self._steps), before=before)
        is_update = first.kind == "weights" and row.place.role == "parameter"
        is_next = bool(steps) and steps[-1] == row.step - 1
        if not is_update or not is_next or row.place.fqn not in self._last:
            return first
        if row.has_other_shape:
            return first
        how = "gradients equal" + " but for rounding" * (not self._has_equal_gradients)
        makers = " ".join(self._changes)
        if not makers:
            makers = "The optimizer, its state, or other code that writes to weights"
            makers += " makes it."
        return dataclasses.replace(
            first,
            kind="update",
            earlier=tuple(steps),
            before=how,
            remark=f"{first.remark} {makers}",
        )
