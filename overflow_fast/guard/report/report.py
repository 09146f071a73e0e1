"""The report of a bad step, and the error that has it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ..files.json_text import SCHEMA, dumps, to_plain
from .exit_code import exit_code_of
from .report_data import ReportData
from .wording import ReportText


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
        self.exit_code = exit_code_of(report.explanation)

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteError, (self.report,)


NonFiniteError.__module__ = "overflow_fast"  # as programs import it


class Report(ReportData):
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
            "check", when the program's own code "raised", or "" where it is of no step,
            or not decided yet.
        skipped_by: What has skipped the step instead of the guard: "GradScaler", or the
            optimizer's kernel on a device.
        explanation: The findings of a replay of the step; None if there was none.
        raised: The type of the exception that the program's own code has raised in the
            step, or "".
        is_beyond_repair: A weight or an optimizer's state stays non-finite, whatever
            becomes of the step: a checkpoint helps.
    """

    @property
    def _text(self) -> ReportText:
        return ReportText(self)

    def __str__(self) -> str:
        """Writes the frames, the details as lines, and the answer at the end."""
        return self._text.text()

    __repr__ = __str__  # in a console, too

    def _repr_html_(self) -> str:
        return self._text.html()

    def answer(self) -> str:
        """Writes the event, its cause and its remedy, the remedy at the end."""
        return self._text.answer()

    def headline(self) -> str:
        """Writes the first sentence: the step, the bad values, and their place."""
        return self._text.headline()

    def short_text(self, note: str) -> str:
        """Writes the headline, the outcome of the step, and a note."""
        return self._text.short_text(note)

    def sentences(self) -> list[str]:
        """Lists all but the explanation and the frames, the headline first."""
        return self._text.sentences()

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict of strings, finite numbers, lists and dicts."""
        found, plain = self.explanation, asdict(replace(self, explanation=None))
        plain["verdict"] = self.verdict.to_dict()
        if self.verdict.first is not None:
            plain["verdict"]["first"]["place"] = self.verdict.first.place
        plain = to_plain({**plain, "explanation": found and found.to_dict()})
        texts = {"summary": self._text.summary(), "sentences": self.sentences()}
        return {"schema": SCHEMA, "kind": "report", **plain, **texts}

    def to_json(self) -> str:
        """Writes the report as one line of JSON, non-finite numbers as strings."""
        return dumps(self.to_dict())
