"""The words of a report: what its data say, each sentence beside the fields it says."""

from __future__ import annotations

from ...base.notebook_html import text_html
from ...base.text import as_lines, printable
from ...detector.frames import frames_text
from ..verdict.verdict import BadEntry
from .advice import advice_for, answers
from .answer import Need
from .causes import BAD_DATA, Cause
from .details import (
    cost_sentences,
    gradient_sentences,
    headroom_sentences,
    least_sentences,
    share_sentences,
)
from .entry_words import what_of, written_by_update
from .findings import (
    BETWEEN_FORWARDS,
    IN_LOOP,
    NOT_REDUCED,
    OF_OTHERS,
    OVERWRITTEN,
    REPLACED,
)
from .origin_words import exceptions, who_made_it
from .report_data import ReportData

_MOST_LINES = 7  # of an exception: what a tired reader takes in at once; chosen

_RECOMPUTED = (
    "It was finite in the forward and arose when backward computed that again "
    "(activation checkpointing)."
)
_WRITTEN = (
    "Which code produced it is not known: the batch, the training loop, or the model, "
    "which writes to what it is given."
)
_OF_LOSS = "It came from the code that computes the loss from the model's output."
_MAY_BE_BAD = "weights may be non-finite now"
_OUTCOMES = {
    "raise": "The optimizer step was not made.",
    "skip": "The optimizer step was skipped.",
    "warn": f"The optimizer step was made: {_MAY_BE_BAD}.",
}
_STAYS = "The optimizer step was made, and the {} stays non-finite."
_UNDONE = "The optimizer step was undone."
_RAISED = "The program's own code raised {} in this step."
_MOMENTS = {
    "after": "The optimizer step was made before its stats arrived (sync='lagged'): "
    f"{_MAY_BE_BAD}.",
    "evaluation": "It was found in a forward without autograd, and in no step.",
    "check": "It was found by `check()`, which can skip no optimizer step.",
}


class ReportText:
    """The sentences of a report.

    Args:
        report: The report.
    """

    unit = "step"  # what is judged

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.verdict, self.explanation = report.verdict, report.explanation
        self.origin = report.verdict.origin

    def text(self) -> str:
        """The frames, and the answer with all that it rests on, the remedies last."""
        batch, lines = self.verdict.batch, self.report.frames
        frames = [*frames_text(batch, lines), ""] if lines else []
        first, *more = self._event()
        above = as_lines([*more, *self._details(), *self._reasons()])
        answer = [printable(first), above, *self._explained(), as_lines(self._advice())]
        return "\n".join([*frames, *filter(None, answer)])

    def answer(self) -> str:
        """The exception's text: at most seven lines, the remedies at the end.

        Terminals and logs of jobs show the end of a text. Of what does not fit the
        remedy, the line that failed and what is new stay longest; of a row of several
        lines the first one stays. All else is in the report.
        """
        words = None if self.explanation is None else self.explanation.words
        rows = [] if words is None else words.needed()
        open_ends = [*self.report.notes, *self._why()]
        rows += [(Need.ORIGIN, [printable(each)]) for each in open_ends]
        rows += [(Need.REMEDY, [printable(each)]) for each in self._advice()]
        rows += [] if words is None else words.needed_remedies()
        outcome = " ".join([*self._outcome(), *self._where()])
        lines = [printable(self._event()[0]), printable(outcome)]
        room = _MOST_LINES - len(lines)
        shown = dict[int, list[str]]()
        for i in sorted(range(len(rows)), key=lambda i: rows[i][0]):
            row = rows[i][1]
            shown[i] = row if len(row) <= room else row[: min(room, 1)]
            room -= len(shown[i])
        return "\n".join([*lines, *(line for i in sorted(shown) for line in shown[i])])

    def _where(self) -> list[str]:
        """Where all is that an exception has no room for."""
        holder = "guard.last_report" if self.report.raised else "error.report"
        kept = self._kept()
        return kept[-1:] or [f"All that is known: `print({holder})`."]

    def _kept(self) -> list[str]:
        """The files that are kept of the step."""
        report, found = self.report, list[str]()
        if report.evidence:
            _, _, number = report.evidence.rpartition(".")
            again = f" (report {number} of this step)" if number.isdigit() else ""
            found.append(f"Evidence is in `{report.evidence}`{again}.")
        if report.page:
            found.append(f"To look at it, open `{report.page}`.")
        return found

    def _why(self) -> list[str]:
        """The origin of the value, in sentences."""
        first = self.verdict.first
        if first is None:
            return []
        origin = "" if self.report.is_of_state else self._origin(first)
        recomputed = [_RECOMPUTED] if self.verdict.is_recomputed else []
        return [*recomputed, *([origin] if origin else [])]

    def html(self) -> str:
        """The report as HTML, for a notebook."""
        first, *rest = self._event()
        lines = [*rest, *self._advice(), *self._reasons()]
        details = [*lines, *self._details()]
        rows = [] if self.explanation is None else self.explanation.words.parts()
        return text_html(first, details, self.text(), rows)

    def short_text(self, note: str) -> str:
        """The headline, the outcome, advice where a skip repairs nothing, a note."""
        rest = self._advice() if self.report.is_beyond_repair else []
        if self.report.moment == "evaluation":  # its notes say which batch of it
            rest = [*self.report.notes, *rest]
        return as_lines([self.headline(), *self._outcome(), *rest, note])

    def summary(self) -> str:
        """The answer, the details and the remedies, a sentence a line."""
        above = [*self._event(), *self._details(), *self._reasons()]
        return "\n".join([*above, *self._explained(), *self._advice()])

    def sentences(self) -> list[str]:
        """All but the explanation and the frames, the headline first."""
        return [
            *self._event(),
            *self._advice(),
            *self._reasons(),
            *self._details(),
        ]

    def _event(self) -> list[str]:
        if self.verdict.first is None:
            return [f"Step {self.report.step} is clean.", *self.report.notes]
        return [self.headline(), *self._outcome(), *self.report.notes]

    def _explained(self) -> list[str]:
        return [] if self.explanation is None else self.explanation.words.rows()

    def _reasons(self) -> list[str]:
        """The reasons for the answer, and where there is more."""
        if self.verdict.first is None:
            return []
        return [*self._why(), *self._kept()]

    def _advice(self) -> list[str]:
        first = self.verdict.first
        if first is None or answers(self.explanation, first):
            return []
        if self._is_written_in_step or self._is_by_others:
            return []
        report = self.report
        is_noted = self._is_noted(IN_LOOP) or self._is_noted(BETWEEN_FORWARDS)
        found = self.explanation
        given = "" if found is None else found.advice
        how = report.step, self._is_cured, report.is_beyond_repair, is_noted
        advice = advice_for(self.verdict, *how, given)
        if not (advice or self._is_cured or found is None):
            advice = given or Cause.of(found.cause).advice
        return [f"What to try: {advice}."] if advice else []

    def _details(self) -> list[str]:
        cost, before = cost_sentences(self.report.cost), self.verdict.headroom
        if self.verdict.first is None:
            return cost
        return [
            *share_sentences(self.verdict.first),
            *(headroom_sentences(before) if not self._is_noted(REPLACED) else ()),
            *least_sentences(self.report.least_headroom),
            *gradient_sentences(self.verdict),
            *self.report.not_covered,
            *cost,
        ]

    def _origin(self, first: BadEntry) -> str:
        """The maker: what hooks know, or what they add to a replay's answer.

        A replay names the operation; where bad inputs and weights came from, it does
        not know.
        """
        found = self.explanation
        if found is not None and found.is_of_loss and self._may_be_of_loss(first):
            return _OF_LOSS  # fewer candidates than the hooks have
        if self._is_by_others:
            return ""  # hooks know of a replaced one, and of the step, not of others
        if self._is_noted(NOT_REDUCED):
            return ""  # a replay leaves what ranks make together, which the note says
        if not self._is_told:
            # Inputs are scanned when a call ends: one whose write torch did not see
            # may have been finite before.
            is_open = self.origin.how == "given" and self._is_noted(OVERWRITTEN)
            return _WRITTEN if is_open else who_made_it(first, self.verdict, self.unit)
        if found is not None and found.phase == "optimizer":
            return ""  # its step was made again: what it may come from was tried
        is_given = self.origin.how == "given" and not self._is_written_in_step
        if is_given and not self._is_settled and not self._is_of_sample:
            return who_made_it(first, self.verdict, self.unit)
        # The masks are those of the first bad call: not of another maker.
        but = exceptions(self.verdict) if self.origin.how == "made" else ""
        given = [f"Given to {self.origin.maker}: {but}."] if but else []
        return " ".join([*given, *self.origin.remarks])

    def _may_be_of_loss(self, first: BadEntry) -> bool:
        """True if the hooks leave it open, and have seen a forward that was finite."""
        is_of_forward = first.kind in ("input", "output")
        is_seen = not is_of_forward and "the model" not in self.origin.candidates
        return is_seen and self.origin.how == "unclear"

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
        is_open = len(self.origin.candidates) > 1
        found = self.explanation
        return is_open and found is not None and found.cause != BAD_DATA.name

    @property
    def _is_by_others(self) -> bool:
        """True for a weight that code outside of the optimizers has made non-finite."""
        return self._is_noted(REPLACED) or self._is_noted(OF_OTHERS)

    def _is_noted(self, note: str) -> bool:
        return self.explanation is not None and note in self.explanation.notes

    @property
    def _is_of_sample(self) -> bool:
        """True for bad data whose place and sample the first line says.

        Where the loop has called the model before, it may have computed them.
        """
        found = self.explanation
        if found is None or found.sample is None or self.origin.after:
            return False
        return found.cause == BAD_DATA.name

    @property
    def _is_written_in_step(self) -> bool:
        """True for a weight that the step itself has written, by the replay."""
        first, found = self.verdict.first, self.explanation
        is_weight = first is not None and first.kind == "weight"
        return is_weight and found is not None and found.phase == "forward"

    def headline(self) -> str:
        """The answer in a line: the step, what is bad, the cause and its place."""
        event = self.event()
        if self.explanation is None:
            return f"{event}."
        words = self.explanation.words
        why = words.why_unknown()
        if why:
            return f"{event}; unknown why: {why}."
        gist, name = words.gist(), self.explanation.tensor
        if self.verdict.first is not None and self.verdict.first.fqn == name:
            gist = gist.replace(f"the parameter {name} held", "it held", 1)
        return f"{event}. {gist}." if gist else f"{event}."

    def event(self) -> str:
        """The step and what is bad in it, without the cause."""
        if self.verdict.first is None:  # too many were skipped, for a monitor
            return f"Step {self.report.step} is finite"
        where = f" on {self.report.where}" if self.report.where else ""
        step = f"Step {self.report.step}"
        subject = "The state is not finite" if self.report.is_of_state else step
        if self.origin.source == "update":  # finite before, and again if it is undone
            return f"{subject}{where}: {written_by_update(self.verdict.first)}"
        return f"{subject}{where}: {what_of(self.verdict.first)}"

    def _outcome(self) -> list[str]:
        """The outcome of the optimizer's step, as far as that is known."""
        if self.report.skipped_by:
            return [f"The {self.report.skipped_by} skipped the optimizer step."]
        first, is_made = self.verdict.first, self.report.action == "warn"
        if self.report.moment == "before":
            is_update = self.origin.source == "update"
            stays = self.report.is_beyond_repair and (is_made or is_update)
            if first is not None and stays:
                return [_STAYS.format(first.kind.replace("_", " "))]
            if is_update and not is_made:
                return [_UNDONE]
            return [_OUTCOMES[self.report.action]]
        if self.report.raised:
            return [_RAISED.format(self.report.raised)]
        return [_MOMENTS[self.report.moment]] if self.report.moment else []
