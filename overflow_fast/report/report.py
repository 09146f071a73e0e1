"""The report of a bad step: in plain words first, then the frames."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..core.notebook import text_html
from ..files.json_text import SCHEMA, dumps, to_plain
from ..replay.explanation import Explanation
from ..text import as_lines
from ..verdict.hardware import is_of_flag
from ..verdict.remedy import Remedy
from ..verdict.verdict import BadEntry, EntryHeadroom, Verdict
from .advice import advice_for, answers
from .entry_sentences import gradient_sentences, place_of, share_sentences, what_of
from .exit_code import exit_code_of
from .frames import frames_text
from .headroom_sentences import headroom_sentences, least_sentences
from .origin import who_made_it

_RECOMPUTED = (
    "It was finite in the forward and arose when backward computed that again "
    "(activation checkpointing)."
)
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

    Attributes:
        report: The `Report`.
        exit_code: 16 if the replay gave it again, 17 if the replay was finite, else 1.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
        self.exit_code = exit_code_of(report.explanation, bool(report.repeats))

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteError, (self.report,)


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


@dataclass
class Report:
    """A guard's findings in a step, and its action.

    Attributes:
        step: The optimizer's step, counted from 0.
        action: "raise", "warn" or "skip".
        verdict: The first bad entry, and its origin.
        least_headroom: The finite value of the step that came nearest to the end of its
            dtype.
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
        remedy: The modules to run in float32 where float16 overflowed, or None.
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
    remedy: Remedy | None = None
    explanation: Explanation | None = None
    repeats: str = ""

    def __str__(self) -> str:
        """Writes the event, the answer, the details as lines, and then the frames."""
        rest = as_lines([*self._details(), *self._cost_sentences()])
        lines = [as_lines(self._event()), *self._answer(), rest]
        text = "\n".join(filter(None, lines))
        if not self.frames:
            return text
        return "\n".join([text, "", *frames_text(self.verdict.batch, self.frames)])

    def _repr_html_(self) -> str:
        first, *rest = self._event()
        lines = [*rest, *self._answer(), *self._details(), *self._cost_sentences()]
        return text_html(first, lines, str(self))

    def short_text(self, note: str) -> str:
        """Writes the headline, the outcome of the step, and a note."""
        return as_lines([self.headline(), *self._outcome(), note])

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict of strings, finite numbers, lists and dicts."""
        plain = to_plain(dataclasses.asdict(self))
        if self.verdict.first is not None:
            plain["verdict"]["first"]["place"] = place_of(self.verdict.first)
        event, details, cost = self._event(), self._details(), self._cost_sentences()
        summary = "\n".join([*event, *self._answer(), *details, *cost])
        texts = {"summary": summary, "sentences": [*event, *details]}
        return {"schema": SCHEMA, "kind": "report", **plain, **texts}

    def to_json(self) -> str:
        """Writes the report as one line of JSON, non-finite numbers as strings."""
        return dumps(self.to_dict())

    def _answer(self) -> list[str]:
        return [] if self.explanation is None else str(self.explanation).splitlines()

    def sentences(self) -> list[str]:
        """Lists all but the explanation and the frames, the headline first."""
        return [*self._event(), *self._details(), *self._cost_sentences()]

    def _event(self) -> list[str]:
        if self.verdict.first is None:
            return [f"Step {self.step} is clean.", *self.notes]
        return [self.headline(), *self._outcome(), *self.notes]

    def _details(self) -> list[str]:
        first = self.verdict.first
        if first is None:
            return []
        origin = "" if self.is_of_state else self._origin(first)
        is_answered = answers(self.explanation, first) or self._is_written_in_step
        advice = advice_for(self.verdict, self.step, self.remedy) * (not is_answered)
        return [
            *share_sentences(first),
            *([_RECOMPUTED] if self.verdict.is_recomputed else []),
            *headroom_sentences(self.verdict.headroom),
            *least_sentences(self.least_headroom),
            *gradient_sentences(self.verdict),
            *([origin] if origin else []),
            *([f"What to try: {advice}."] if advice else []),
            *([f"Evidence is in `{self.evidence}`."] if self.evidence else []),
            *([f"To look at it, open `{self.page}`."] if self.page else []),
            *self.not_covered,
        ]

    def _origin(self, first: BadEntry) -> str:
        """Writes who made it; "" if hooks do not know it, and the replay does."""
        is_told = self.explanation is not None and self.explanation.names_maker
        is_unclear = self.verdict.origin == "unclear" or self._is_written_in_step
        return "" if is_unclear and is_told else who_made_it(first, self.verdict)

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
