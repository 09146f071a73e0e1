"""The report of a bad step, in plain words first, and what a guard has checked."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...detector.frames import frames_text
from ...detector.selection import Wanted
from ...scanner.text import (
    as_lines,
    capitalized,
    counted,
    nonfinite_text,
    printable,
    some,
    text_html,
)
from ..files.json_text import SCHEMA, dumps, to_plain
from ..verdict.verdict import (
    BadEntry,
    EntryHeadroom,
    NonModuleOrigin,
    Verdict,
    is_of_flag,
    nonfinite_settings,
)
from ..watching.watch import ModelWatch
from .causes import BAD_DATA, NOT_REPRODUCIBLE, UNKNOWN, Cause
from .explanation import Explanation

# The sentence of a report that advises what to try.


def advice_for(
    verdict: Verdict,
    step: int = 0,
    is_cured: bool = False,
) -> str:
    """Writes what to try, by the bad entry and its origin.

    Args:
        verdict: The verdict, not clean.
        step: The step's number; before the first one weights were bad from the start.
        is_cured: A replay has tried what helps.

    Returns:
        The sentence without its full stop; "" where no help is known.
    """
    first = verdict.first
    assert first is not None
    if first.kind == "optimizer_state":
        return "load a checkpoint in which the optimizer's state is finite" * (step > 0)
    if verdict.source in ("weight", "buffer"):
        return _advise_on_tensor(first, verdict, step)
    if first.kind in ("input", "output") and first.signs == "-" and not first.num_nan:
        rule = {f"{first.fqn}:{first.label}": "-inf"}
        return f"if this is intended, as in a mask, allow={rule}"
    if is_cured:
        return ""
    if verdict.source == "batch":
        return "check the data of this batch"
    if verdict.batch_places:
        return f"check {', '.join(verdict.batch_places)}"
    return ""


def answers(explanation: Explanation | None, first: BadEntry) -> bool:
    """True if -inf, as masks have it, is known to be no intended one."""
    is_mask = first.signs == "-" and not first.num_nan
    cause = UNKNOWN if explanation is None else Cause.of(explanation.cause)
    return is_mask and not cause.may_be_intended


def _advise_on_tensor(first: BadEntry, verdict: Verdict, step: int) -> str:
    name = f"`{first.fqn}`" if first.kind == verdict.source else verdict.maker
    settings = nonfinite_settings(verdict.remarks)
    if settings:
        return f"set {' and '.join(settings)} to a finite number first; {_load(name)}"
    if step == 0 and verdict.source == "buffer":
        return ""  # the forward may write it, initialized or not
    if step == 0:
        return f"initialize {name} or load it again"
    if verdict.source == "buffer":  # the guard may put it back
        still = f"if {name} is still non-finite after this step"
        return f"{still}, load a checkpoint in which it is finite"
    return _load(name)


def _load(name: str) -> str:
    return f"load a checkpoint in which {name} is finite"


# Words for a bad entry, and for the gradients beside it.


_NEAREST = 8


def place_of(entry: BadEntry) -> str:
    """Returns the name of an entry's module, or of its tensor; or "the model"."""
    return entry.fqn or "the model"


def what_of(entry: BadEntry) -> str:
    """Writes how many bad values an entry holds, and which entry it is."""
    values = nonfinite_text(entry.num_nan, entry.num_inf, entry.signs)
    if entry.is_finite_now:
        return (
            f"what was read as the weight `{entry.label}` held {values}; the weight is "
            "finite now"
        )
    holds = f"holds {values}"
    if entry.class_name:
        return f"{entry.path.of_module('`')} ({entry.class_name}) {holds}"
    return f"the {entry.kind.replace('_', ' ')} `{entry.label}` {holds}"


def share_sentences(entry: BadEntry) -> list[str]:
    """Writes how many of an entry's values are bad, where it has more than one."""
    if entry.numel <= 1:
        return []
    bad = entry.num_nan + entry.num_inf
    are = "is" if bad == 1 else "are"
    return [f"{bad} of its {entry.numel} {entry.dtype} values {are} non-finite."]


def gradient_sentences(verdict: Verdict) -> list[str]:
    """Names the gradients that are bad, and the nearest ones that are not."""
    dirty, clean = verdict.dirty_gradients, verdict.clean_gradients
    if not dirty:
        return []
    sentences = [f"Non-finite gradients: {some(dirty, _NEAREST)}."]
    if clean:
        sentences.append(f"The nearest finite ones: {some(clean, _NEAREST)}.")
    return sentences


# The exit status that tells a launcher what to do about an incident.


# Megatron-LM's rerun machine ends with these: 16 asks for a run on other hardware,
# which tells a faulty device from the data; 17 says that a result was not valid.
DETERMINISTIC, TRANSIENT, OTHERWISE = 16, 17, 1


def exit_code_of(explanation: Explanation | None, is_repeated: bool) -> int:
    """Chooses the exit status for an incident.

    Args:
        explanation: The findings of the replay, or None.
        is_repeated: An earlier run ended with the same step and place: a restart does
            not help, and no launcher must be told to try one more.

    Returns:
        16 if the replay gave it again, 17 if the whole step was replayed and finite,
        else 1.
    """
    if is_repeated or explanation is None:
        return OTHERWISE
    if explanation.is_transient:
        return TRANSIENT
    if explanation.cause == NOT_REPRODUCIBLE.name:
        return OTHERWISE  # code that was not replayed may have made it
    is_known = explanation.op is not None or bool(explanation.phase)
    return DETERMINISTIC if is_known else OTHERWISE


# The sentences of a report on headroom.


_FEW_BITS = 8


def headroom_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes how large the first bad entry was when it was last seen finite."""
    if headroom is None or headroom.abs_max == 0:
        return []
    could = (
        f", which could grow {headroom.growth} before it overflows "
        f"{headroom.dtype} ({headroom.limit:.5g})"
    )
    near = could if headroom.bits <= _FEW_BITS else ""
    return [
        "When it was last seen finite, its largest magnitude was "
        f"{headroom.abs_max:.3g}{near}."
    ]


def least_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes which value is nearest to its dtype's maximum, if it is near."""
    if headroom is None or headroom.bits > _FEW_BITS:
        return []
    return [
        "The finite value nearest to its dtype's maximum: "
        f"{headroom.where}, which could grow {headroom.growth} before "
        f"{headroom.dtype} overflows."
    ]


# Words for where a non-finite value came from.


_FEW = 4


def who_made_it(first: BadEntry, verdict: Verdict) -> str:
    """Writes the origin of the first bad value, as far as it is known."""
    return " ".join([_sentence(first, verdict), *verdict.remarks])


def _sentence(first: BadEntry, verdict: Verdict) -> str:
    maker = verdict.maker
    if verdict.origin == "made":
        but = _exceptions(verdict)
        given = f"The inputs of {maker} were finite{' except ' * bool(but)}{but}"
        given += " when they were scanned, before its call" * bool(verdict.stale_inputs)
        return f"{given}; {_code_of(maker, verdict)} produced it."
    if verdict.origin == "given" and verdict.source == "unclear":
        return f"It was non-finite when the model received it: it came from {maker}."
    if verdict.source == "weight" and len(verdict.candidates) > 1:
        if not first.class_name:  # it is the weight itself
            return f"{capitalized(maker)}."
        return f"It was already non-finite when {place_of(first)} read it: {maker}."
    if verdict.origin == "given":
        return f"It was non-finite before the step: it came from {maker}."
    if verdict.origin == "unclear":
        return f"Which code produced it is not known: {maker}."
    if first.kind == "input" and verdict.source == "caller":
        name, *others = verdict.candidates
        if not isinstance(name, NonModuleOrigin) and not others:
            code = _code_of(name, verdict)
            return f"Module {first.fqn} received it; {code} produced it."
    if first.class_name and first.fqn and first.kind in ("input", "grad_output"):
        return f"Module {first.fqn} received it; it came from {maker}."
    return f"It came from {maker}."


def _exceptions(verdict: Verdict) -> str:
    """Lists the inputs of the maker that were non-finite by intent; "" for none."""
    exceptions = {"-inf": verdict.masks, "allowed values": verdict.allowed}
    return " and ".join(
        f"{what} in {', '.join(labels)}"
        for what, labels in exceptions.items()
        if labels
    )


def _code_of(name: str, verdict: Verdict) -> str:
    """Names the code of a module, as near as it is known."""
    after = f", after {verdict.after}," if verdict.after else ""
    if not verdict.unwatched:
        return f"code in {_module(name)} itself{after}"
    names = some(verdict.unwatched, _FEW)
    return f"code in {_module(name)}{after} (not watched within it: {names})"


def _module(name: str) -> str:
    """Names a module so that a number is not taken for another thing."""
    return name if name == "the model" else f"module {name}"


_RECOMPUTED = (
    "It was finite in the forward and arose when backward computed that again "
    "(activation checkpointing)."
)
_OF_LOSS = "It came from the code that computes the loss from the model's output."
_MAY_BE_BAD = "weights may be non-finite now"
_OUTCOMES = {
    "raise": "The optimizer step is not made: NonFiniteError is raised before it.",
    "skip": "The optimizer step was skipped.",
    "warn": f"The optimizer step was made: {_MAY_BE_BAD}.",
}
_MOMENTS = {
    "after": "The optimizer step was made before its stats arrived (sync='lagged'): "
    f"{_MAY_BE_BAD}.",
    "evaluation": "It was found in a forward without autograd, and in no step.",
    "check": "It was found by `check()`, which can skip no optimizer step.",
}


class NonFiniteError(FloatingPointError):
    """Raised for a step with a nan or an inf under `on_overflow="raise"`.

    Its text ends with the cause and the remedy; the frames are in its report.

    Attributes:
        report: The `Report`.
        exit_code: 16 if the replay gave it again, 17 if the replay was finite, else 1.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report.answer())
        self.report = report
        self.exit_code = exit_code_of(report.explanation, bool(report.repeats))

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteError, (self.report,)


NonFiniteError.__module__ = "overflow_fast"  # as programs import it


@dataclass(frozen=True)
class Cost:
    """The time that the guard itself took, by the host's clock.

    Attributes:
        step_seconds: The time from the judgement before to this one.
        guard_seconds: The part of it that was spent in the guard: its hooks, scans on
            the CPU, launches, waits and judgement. Not the time of kernels on a device.
        share: The guard's share of all watched steps so far.
    """

    step_seconds: float = 0.0
    guard_seconds: float = 0.0
    share: float = 0.0


@dataclass(frozen=True)
class GuardCoverage:
    """The tensors and steps that a guard's clean verdicts cover, and the gaps.

    Attributes:
        tensors_listed: How many tensors the frames list.
        tensors_scanned: How many scans that took.
        bytes_scanned: How many bytes the scanned tensors have.
        not_scanned: How many listed tensors were not scanned, by the reason.
        opaque: How many values may hold tensors and were not looked into, by type.
        modules: How many modules the models have.
        modules_watched: How many of them are watched.
        steps: How many steps there were.
        steps_watched: How many of them were checked, in whatever detail.
        without_gradient: How many parameters had no gradient in the last watched step.
        not_watched: The kinds of tensors that `watch` leaves out.
        has_seen_loss: True if a loss was among the outputs, or recorded.
        failures: How often the guard itself failed, so that something was not judged.
        rules_unused: The rules of `allow` that nothing has matched yet.
        ignores_spikes: True if spikes were asked for, and cannot be looked for.
    """

    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: dict[str, int]
    opaque: dict[str, int]
    modules: int
    modules_watched: int
    steps: int
    steps_watched: int
    without_gradient: int
    not_watched: list[str]
    has_seen_loss: bool
    failures: int
    rules_unused: list[str]
    ignores_spikes: bool = False

    @classmethod
    def of(
        cls,
        watches: Sequence[ModelWatch],
        steps: int,
        steps_watched: int,
        without_gradient: int,
        failures: int,
        rules_unused: list[str],
        ignores_spikes: bool,
    ) -> GuardCoverage:
        """Sums up what the watches of a guard have checked so far."""
        found = [watch.recorder.coverage for watch in watches]
        reasons: Counter[str] = Counter()
        opaque: Counter[str] = Counter()
        for each in found:
            reasons.update(each.reasons())
            opaque.update(each.opaque())
        wanted = watches[0].wanted
        counts = [watch.modules.count(watch.model) for watch in watches]
        return cls(
            sum(each.tensors_listed for each in found),
            sum(each.tensors_scanned for each in found),
            sum(each.bytes_scanned for each in found),
            dict(reasons),
            dict(opaque),
            sum(count for count, _ in counts),
            sum(count for _, count in counts) if wanted.activations else 0,
            steps,
            steps_watched,
            without_gradient,
            [kind for kind in Wanted._fields if not getattr(wanted, kind)],
            any(watch.has_seen_loss for watch in watches),
            failures,
            rules_unused,
            ignores_spikes,
        )

    @classmethod
    def unknown(cls, failures: int) -> GuardCoverage:
        """Makes the coverage of a guard whose counts cannot be read."""
        return cls(0, 0, 0, {}, {}, 0, 0, 0, 0, 0, [], False, failures, [])

    def gaps(self) -> list[str]:
        """Lists what was not checked, in sentences."""
        sentences = []
        if self.not_scanned:
            counts = (f"{count} x {why}" for why, count in self.not_scanned.items())
            sentences.append(f"Not scanned: {', '.join(counts)}.")
        if self.opaque:
            counts = (
                f"{counted(count, 'value')} of type {name}"
                for name, count in self.opaque.items()
            )
            sentences.append(f"Not looked into: {', '.join(counts)}.")
        if self.not_watched:
            kinds = ", ".join(kind.replace("_", " ") for kind in self.not_watched)
            is_default = self.not_watched == ["optimizer_state"]
            why = "off by default" if is_default else "not in `watch`"
            sentences.append(f"Not checked ({why}): {kinds}.")
        if 0 < self.modules_watched < self.modules:
            left_out = self.modules - self.modules_watched
            sentences.append(f"{left_out} of {self.modules} modules were left out.")
        if self.steps_watched < self.steps:
            count = self.steps - self.steps_watched
            sentences.append(f"{count} of {self.steps} steps were not watched.")
        if self.without_gradient:
            parameters = counted(self.without_gradient, "parameter")
            sentences.append(f"{parameters} had no gradient.")
        if not self.has_seen_loss and "loss" not in self.not_watched:
            sentences.append("No loss was seen: `guard.record(loss=loss)` adds it.")
        if self.ignores_spikes:
            sentences.append("Spikes were not looked for: they need `sync='step'`.")
        if self.failures:
            times = counted(self.failures, "time")
            sentences.append(f"The guard itself failed {times}.")
        return sentences

    def __str__(self) -> str:
        """Writes what was checked, what was not, and the rules that match nothing."""
        checked = (
            f"Checked {self.tensors_listed} tensors in {self.tensors_scanned} scans "
            f"of {self.bytes_scanned} bytes in {self.steps_watched} steps."
        )
        unused = [
            f"The rule {rule!r} has matched nothing: compare it with a report's labels."
            for rule in self.rules_unused
        ]
        return printable(" ".join([checked, *self.gaps(), *unused]))


@dataclass
class Report:
    """A guard's findings in a step, and its action.

    Attributes:
        step: The optimizer's step, counted from 0.
        action: "raise", "warn" or "skip".
        verdict: The first bad entry, and its origin.
        least_headroom: The finite value of the step that came nearest to its dtype's
            maximum.
        frames: The last frames up to the first bad one, as text.
        not_covered: What was not checked, in sentences.
        cost: The time that the guard took.
        num_skipped: How many steps were skipped so far, this one included.
        evidence: The folder with the tensors and the batch, or None.
        page: The page beside the evidence, or None.
        notes: Further sentences.
        where: The rank, host and device that found it, where ranks decide together.
        is_of_state: True if it is of a state that was to be saved, and of no step.
        moment: When it was found: "before" the optimizer's step, "after" it
            (`sync="lagged"`), in an "evaluation" (a forward without autograd), by a
            "check", or "" where it is of no step, or not decided yet.
        skipped_by: What has skipped the step instead of the guard: "GradScaler", or the
            optimizer's kernel on a device.
        explanation: The findings of a replay of the step; None if there was none.
        repeats: The earlier run that the log has the same step and entry of, or "".
    """

    step: int
    action: str
    verdict: Verdict
    least_headroom: EntryHeadroom | None = None
    frames: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    num_skipped: int = 0
    evidence: str | None = None
    page: str | None = None
    notes: list[str] = field(default_factory=list)
    where: str | None = None
    is_of_state: bool = False
    moment: str = ""
    skipped_by: str = ""
    explanation: Explanation | None = None
    repeats: str = ""

    def __str__(self) -> str:
        """Writes the frames, the details as lines, and the answer at the end."""
        batch = self.verdict.batch
        frames = [*frames_text(batch, self.frames), ""] if self.frames else []
        details = [as_lines(self._details())] if self._is_told else []
        return "\n".join([*frames, *filter(None, details), self.answer()])

    def answer(self) -> str:
        """Writes the event, its cause and its remedy, the remedy at the end.

        Terminals and logs of jobs show the end of a text. Details are left out where
        the cause is known.
        """
        above, rows, advice = self._parts()
        return "\n".join(filter(None, [as_lines(above), *rows, as_lines(advice)]))

    def _parts(self) -> tuple[list[str], list[str], list[str]]:
        """The sentences above the explanation, its rows, and those below."""
        details = [] if self._is_told else self._details()
        above = [*self._event(), *details, *self._reasons()]
        return above, self._explained(), self._advice()

    def _repr_html_(self) -> str:
        first, *rest = self._event()
        lines = [*rest, *self._explained(), *self._advice(), *self._reasons()]
        return text_html(first, [*lines, *self._details()], str(self))

    def short_text(self, note: str) -> str:
        """Writes the headline, the outcome of the step, and a note."""
        return as_lines([self.headline(), *self._outcome(), note])

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict of strings, finite numbers, lists and dicts."""
        plain = to_plain(dataclasses.asdict(self))
        if self.verdict.first is not None:
            plain["verdict"]["first"]["place"] = place_of(self.verdict.first)
        details = self._details() if self._is_told else []
        lines = [*details, *itertools.chain(*self._parts())]
        texts = {"summary": "\n".join(lines), "sentences": self.sentences()}
        return {"schema": SCHEMA, "kind": "report", **plain, **texts}

    def to_json(self) -> str:
        """Writes the report as one line of JSON, non-finite numbers as strings."""
        return dumps(self.to_dict())

    def sentences(self) -> list[str]:
        """Lists all but the explanation and the frames, the headline first."""
        return [
            *self._event(),
            *self._advice(),
            *self._reasons(),
            *self._details(),
        ]

    def _event(self) -> list[str]:
        if self.verdict.first is None:
            return [f"Step {self.step} is clean.", *self.notes]
        return [self.headline(), *self._outcome(), *self.notes]

    def _explained(self) -> list[str]:
        return [] if self.explanation is None else str(self.explanation).splitlines()

    def _reasons(self) -> list[str]:
        """Lists what led to the answer, and where there is more."""
        first = self.verdict.first
        if first is None:
            return []
        origin = "" if self.is_of_state else self._origin(first)
        return [
            *([_RECOMPUTED] if self.verdict.is_recomputed else []),
            *([origin] if origin else []),
            *([f"Evidence is in `{self.evidence}`."] if self.evidence else []),
            *([f"To look at it, open `{self.page}`."] if self.page else []),
        ]

    def _advice(self) -> list[str]:
        first = self.verdict.first
        if first is None or answers(self.explanation, first):
            return []
        if self._is_written_in_step:
            return []
        advice = advice_for(self.verdict, self.step, self._is_cured)
        return [f"What to try: {advice}."] if advice else []

    def _details(self) -> list[str]:
        first = self.verdict.first
        if first is None:
            return self._cost_sentences()
        return [
            *share_sentences(first),
            *headroom_sentences(self.verdict.headroom),
            *least_sentences(self.least_headroom),
            *gradient_sentences(self.verdict),
            *self.not_covered,
            *self._cost_sentences(),
        ]

    def _origin(self, first: BadEntry) -> str:
        """Writes who made it: what hooks know, or what they add to a replay's answer.

        A replay names the operation; where bad inputs and weights came from, it does
        not know.
        """
        found = self.explanation
        if found is not None and found.is_of_loss and self._may_be_of_loss(first):
            return _OF_LOSS  # fewer candidates than the hooks have
        if not self._is_told:
            return who_made_it(first, self.verdict)
        if found is not None and found.phase == "optimizer":
            return ""  # its step was made again: what it may come from was tried
        is_given = self.verdict.origin == "given" and not self._is_written_in_step
        if is_given and not self._is_settled:
            return who_made_it(first, self.verdict)
        # The masks are those of the first bad call: not of another maker.
        but = _exceptions(self.verdict) if self.verdict.origin == "made" else ""
        given = [f"Given to {self.verdict.maker}: {but}."] if but else []
        return " ".join([*given, *self.verdict.remarks])

    def _may_be_of_loss(self, first: BadEntry) -> bool:
        """True if the hooks leave it open, and have seen a forward that was finite."""
        is_of_forward = first.kind in ("input", "output")
        is_seen = not is_of_forward and "the model" not in self.verdict.candidates
        return is_seen and self.verdict.origin == "unclear"

    @property
    def _is_cured(self) -> bool:
        """True if a remedy was tried in a replay, and has helped."""
        found = [] if self.explanation is None else self.explanation.remedies
        return any(each.is_recommended for each in found)

    @property
    def _is_told(self) -> bool:
        """True if a replay has told what made the value."""
        return self.explanation is not None and self.explanation.names_maker

    @property
    def _is_settled(self) -> bool:
        """True if a replay settles what hooks leave open: who made a bad input.

        Bad data may still be the batch's, or computed by the loop.
        """
        is_open = len(self.verdict.candidates) > 1
        found = self.explanation
        return is_open and found is not None and found.cause != BAD_DATA.name

    @property
    def _is_written_in_step(self) -> bool:
        """True for a weight that the step itself has written, by the replay."""
        first, found = self.verdict.first, self.explanation
        is_weight = first is not None and first.kind == "weight"
        return is_weight and found is not None and found.phase == "forward"

    def headline(self) -> str:
        """Writes the first sentence: the step, the bad values, and their place."""
        assert self.verdict.first is not None
        where = f" on {self.where}" if self.where else ""
        subject = "The state" if self.is_of_state else f"Step {self.step}"
        if is_of_flag(self.verdict):
            label = self.verdict.first.label
            return f"{subject} has overflowed{where}: the {label} is set."
        return f"{subject} is not finite{where}: {what_of(self.verdict.first)}."

    def _outcome(self) -> list[str]:
        """Lists the outcome of the optimizer's step, as far as that is known."""
        if self.skipped_by:
            return [f"The {self.skipped_by} skipped the optimizer step."]
        if self.moment == "before":
            return [_OUTCOMES[self.action]]
        return [_MOMENTS[self.moment]] if self.moment else []

    def _cost_sentences(self) -> list[str]:
        if not self.cost.step_seconds:
            return []
        share = f"{self.cost.share:.1%}"
        return [f"The guard takes {share} of the time of a watched step."]


# The place that an incident is laid at: a rank, its host, its device.


_FORM = re.compile(r"rank (\d+) of (\d+) \((.+), ([^,]+)\)")


@dataclass(frozen=True)
class RankInfo:
    """A rank and what it runs on. `str()` of it is as reports have it.

    Attributes:
        rank: The rank.
        world_size: How many ranks there are.
        host: The name of its host.
        device: Its device, such as "cuda:2".
    """

    rank: int
    world_size: int
    host: str
    device: str

    def __str__(self) -> str:
        """Writes "rank 2 of 4 (node3, cuda:2)"."""
        return f"rank {self.rank} of {self.world_size} ({self.host}, {self.device})"

    @classmethod
    def of(cls, text: str | None) -> RankInfo | None:
        """Reads what `str()` has written; None for anything else."""
        found = _FORM.fullmatch(text or "")
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), found[3], found[4])
