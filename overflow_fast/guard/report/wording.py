"""The words of a report: what its data say, each sentence beside the fields it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...detector.frames import frames_text
from ...scanner.notebook_html import text_html
from ...scanner.text import (
    as_lines,
    capitalized,
    counted,
    nonfinite_text,
    printable,
    some,
)
from ..verdict.verdict import (
    BadEntry,
    EntryHeadroom,
    NonModuleOrigin,
    Origin,
    SettingRemark,
    Verdict,
    is_of_flag,
)
from .causes import BAD_DATA, UNKNOWN, Cause

if TYPE_CHECKING:
    from .coverage import GuardCoverage
    from .explanation import Explanation
    from .report import Cost, Report

# The sentence of a report that advises what to try.


def advice_for(
    verdict: Verdict,
    step: int = 0,
    is_cured: bool = False,
    is_beyond_repair: bool = False,
) -> str:
    """Writes what to try, by the bad entry and its origin.

    Args:
        verdict: The verdict, not clean.
        step: The step's number; before the first one weights were bad from the start.
        is_cured: A replay has tried what helps.
        is_beyond_repair: The value stays, whatever becomes of the step.

    Returns:
        The sentence without its full stop; "" where no help is known.
    """
    first, origin = verdict.first, verdict.origin
    assert first is not None
    if origin.source == "update":  # it is undone, unless the policy is to warn
        settings = nonfinite_settings(origin.remarks)
        advice = f"set {' and '.join(settings)} to a finite number" if settings else ""
        load = _load(f"`{first.fqn}`") * is_beyond_repair
        return "; ".join(filter(None, [advice, load]))
    if first.kind == "optimizer_state":
        return "load a checkpoint in which the optimizer's state is finite" * (step > 0)
    if origin.source in ("weight", "buffer"):
        return _advise_on_tensor(first, origin, step)
    if first.kind in ("input", "output") and first.signs == "-" and not first.num_nan:
        rule = {f"{first.fqn}:{first.label}": "-inf"}
        return f"if this is intended, as in a mask, allow={rule}"
    if is_cured:
        return ""
    if origin.source == "batch":
        return "check the data of this batch"
    if origin.batch_places:
        return f"check {', '.join(origin.batch_places)}"
    return ""


def answers(explanation: Explanation | None, first: BadEntry) -> bool:
    """True if -inf, as masks have it, is known to be no intended one."""
    is_mask = first.signs == "-" and not first.num_nan
    if not is_mask or explanation is None:
        return is_mask and not UNKNOWN.may_be_intended
    from ...scanner.torch_ops import base_of, has

    op = explanation.op  # masks are logarithms of 0; quotients are none
    is_quotient = op is not None and has(base_of(op.name), "divides")
    return is_quotient or not Cause.of(explanation.cause).may_be_intended


def _advise_on_tensor(first: BadEntry, origin: Origin, step: int) -> str:
    name = f"`{first.fqn}`" if first.kind == origin.source else origin.maker
    settings = nonfinite_settings(origin.remarks)
    if settings:
        return f"set {' and '.join(settings)} to a finite number first; {_load(name)}"
    if step == 0 and origin.source == "buffer":
        return ""  # the forward may write it, initialized or not
    if step == 0:
        return f"initialize {name} or load it again"
    if origin.source == "buffer":  # the guard may put it back
        still = f"if {name} is still non-finite after this step"
        return f"{still}, load a checkpoint in which it is finite"
    return _load(name)


def nonfinite_settings(remarks: Iterable[str]) -> list[str]:
    """Lists the settings that are no finite numbers, from those sentences."""
    return [each.setting for each in remarks if isinstance(each, SettingRemark)]


def _load(name: str) -> str:
    return f"load a checkpoint in which {name} is finite"


# Words for a bad entry, and for the gradients beside it.


_NEAREST = 8  # names in a sentence; chosen
_FEW_GRADIENTS = 3  # in an exception; chosen


def what_of(entry: BadEntry) -> str:
    """Writes how many bad values an entry holds, and which entry it is."""
    if entry.not_scanned:
        return f"{_name_of(entry)} could not be scanned ({entry.not_scanned})"
    values = nonfinite_text(entry.num_nan, entry.num_inf, entry.signs)
    if entry.numel == 1 and not entry.is_finite_now:
        is_loss = entry.kind == "recorded" and entry.label == "loss"
        name = "the loss" if is_loss else _name_of(entry)
        return f"{name} is {values.removeprefix('1 ')}"
    if entry.is_finite_now:
        return (
            f"what was read as the weight `{entry.label}` held {values}; the weight is "
            "finite now"
        )
    return f"{_name_of(entry)} holds {values}"


def _written_by_update(entry: BadEntry) -> str:
    values = nonfinite_text(entry.num_nan, entry.num_inf, entry.signs)
    return f"the optimizer's step wrote {values} to {_name_of(entry)}"


def _name_of(entry: BadEntry) -> str:
    if entry.class_name:
        return f"{entry.path.of_module('`')} ({entry.class_name})"
    return f"the {entry.kind.replace('_', ' ')} `{entry.label}`"


def share_sentences(entry: BadEntry) -> list[str]:
    """Writes how many of an entry's values are bad, where it has more than one."""
    if entry.numel <= 1 or entry.not_scanned:
        return []
    bad = entry.num_nan + entry.num_inf
    are = "is" if bad == 1 else "are"
    return [f"{bad} of its {entry.numel} {entry.dtype} values {are} non-finite."]


def gradient_sentences(verdict: Verdict, most: int = _NEAREST) -> list[str]:
    """Names the gradients that are bad, and the nearest ones that are not."""
    dirty, clean = verdict.dirty_gradients, verdict.clean_gradients
    if not dirty:
        return []
    sentences = [f"Non-finite gradients: {some(dirty, most)}."]
    if clean:
        sentences.append(f"The nearest finite ones: {some(clean, most)}.")
    return sentences


# The sentences of a report on headroom.


_FEW_BITS = 8  # room to grow 256-fold; chosen


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


_FEW = 4  # names in a sentence; chosen


def who_made_it(first: BadEntry, verdict: Verdict) -> str:
    """Writes the origin of the first bad value, as far as it is known."""
    if first.not_scanned:
        return "It is not known whether its values are finite."
    return " ".join([_sentence(first, verdict), *verdict.origin.remarks])


def _sentence(first: BadEntry, verdict: Verdict) -> str:
    origin, maker = verdict.origin, verdict.origin.maker
    if origin.how == "made":
        but = _exceptions(verdict)
        given = f"The inputs of {maker} were finite{' except ' * bool(but)}{but}"
        given += " when they were scanned, before its call" * bool(origin.stale_inputs)
        return f"{given}; {_code_of(maker, origin)} produced it."
    if origin.how == "given" and origin.source == "unclear":
        return f"It was non-finite when the model received it: it came from {maker}."
    if origin.source == "weight" and len(origin.candidates) > 1:
        if not first.class_name:  # it is the weight itself
            return f"{capitalized(maker)}."
        return f"It was already non-finite when {first.place} read it: {maker}."
    if origin.how == "given":
        return f"It was non-finite before the step: it came from {maker}."
    if origin.how == "unclear":
        return f"Which code produced it is not known: {maker}."
    if first.kind == "input" and origin.source == "caller":
        name, *others = origin.candidates
        if not isinstance(name, NonModuleOrigin) and not others:
            code = _code_of(name, origin)
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


def _code_of(name: str, origin: Origin) -> str:
    """Names the code of a module, as near as it is known."""
    after = f", after {origin.after}," if origin.after else ""
    if not origin.unwatched:
        return f"code in {_module(name)} itself{after}"
    names = some(origin.unwatched, _FEW)
    return f"code in {_module(name)}{after} (not watched within it: {names})"


def _module(name: str) -> str:
    """Names a module so that a number is not taken for another thing."""
    return name if name == "the model" else f"module {name}"


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

    def __init__(self, report: Report) -> None:
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
        """The answer in the first line, what it rests on, and the remedy at the end.

        Terminals and logs of jobs show the end of a text. What else is known is in the
        report: the chain, the replays, what was not checked, all names of gradients.
        """
        first, *more = self._event()
        words = None if self.explanation is None else self.explanation.words
        details = [] if self._is_told else self._few_details()
        rows = [] if words is None else words.short_rows()
        remedies = [] if words is None else words.remedy_rows()
        above, advice = as_lines([*more, *details]), as_lines(self._advice())
        reasons = as_lines(self._reasons())
        lines = [printable(first), above, *rows, reasons, advice, *remedies]
        return "\n".join(filter(None, lines))

    def html(self) -> str:
        """The report as HTML, for a notebook."""
        first, *rest = self._event()
        lines = [*rest, *self._advice(), *self._reasons()]
        details = [*lines, *self._details()]
        rows = [] if self.explanation is None else self.explanation.words.parts()
        return text_html(first, details, self.text(), rows)

    def short_text(self, note: str) -> str:
        """The headline, the outcome, advice where a skip repairs nothing, a note."""
        advice = self._advice() if self.report.is_beyond_repair else []
        return as_lines([self.headline(), *self._outcome(), *advice, note])

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
        first = self.verdict.first
        if first is None:
            return []
        report = self.report
        origin = "" if report.is_of_state else self._origin(first)
        return [
            *([_RECOMPUTED] if self.verdict.is_recomputed else []),
            *([origin] if origin else []),
            *([f"Evidence is in `{report.evidence}`."] if report.evidence else []),
            *([f"To look at it, open `{report.page}`."] if report.page else []),
        ]

    def _advice(self) -> list[str]:
        first = self.verdict.first
        if first is None or answers(self.explanation, first):
            return []
        if self._is_written_in_step or self._is_replaced:
            return []
        report = self.report
        how = report.step, self._is_cured, report.is_beyond_repair
        advice = advice_for(self.verdict, *how)
        return [f"What to try: {advice}."] if advice else []

    def _details(self) -> list[str]:
        first = self.verdict.first
        if first is None:
            return cost_sentences(self.report.cost)
        return [
            *share_sentences(first),
            *headroom_sentences(self.verdict.headroom),
            *least_sentences(self.report.least_headroom),
            *gradient_sentences(self.verdict),
            *self.report.not_covered,
            *cost_sentences(self.report.cost),
        ]

    def _few_details(self) -> list[str]:
        """The details that an exception has where the cause is not known."""
        first = self.verdict.first
        if first is None:
            return []
        return [
            *share_sentences(first),
            *headroom_sentences(self.verdict.headroom),
            *least_sentences(self.report.least_headroom),
            *gradient_sentences(self.verdict, _FEW_GRADIENTS),
        ]

    def _origin(self, first: BadEntry) -> str:
        """The maker: what hooks know, or what they add to a replay's answer.

        A replay names the operation; where bad inputs and weights came from, it does
        not know.
        """
        found = self.explanation
        if found is not None and found.is_of_loss and self._may_be_of_loss(first):
            return _OF_LOSS  # fewer candidates than the hooks have
        if self._is_of_ranks:
            return ""  # a replay leaves what ranks make together, which the note says
        if not self._is_told:
            is_open = self.origin.how == "given" and self._is_overwritten
            return _WRITTEN if is_open else who_made_it(first, self.verdict)
        if found is not None and found.phase == "optimizer":
            return ""  # its step was made again: what it may come from was tried
        is_given = self.origin.how == "given" and not self._is_written_in_step
        if is_given and not self._is_settled and not self._is_of_sample:
            return who_made_it(first, self.verdict)
        # The masks are those of the first bad call: not of another maker.
        but = _exceptions(self.verdict) if self.origin.how == "made" else ""
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
    def _is_of_ranks(self) -> bool:
        """True if each rank's own gradients are finite in the replay."""
        from .explanation import NOT_REDUCED

        return self.explanation is not None and NOT_REDUCED in self.explanation.notes

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
    def _is_overwritten(self) -> bool:
        """True if the step has written to its batch, by the replay.

        Inputs are scanned when a call ends: one that torch did not see written may have
        been finite before.
        """
        from .explanation import OVERWRITTEN

        return self.explanation is not None and OVERWRITTEN in self.explanation.notes

    @property
    def _is_replaced(self) -> bool:
        """True for a weight that the program has put into another one's place."""
        from .explanation import REPLACED

        return self.explanation is not None and REPLACED in self.explanation.notes

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
        gist, why = words.gist(), words.why_unknown()
        if gist:
            return f"{event}. {gist}."
        return f"{event}; unknown why: {why}." if why else f"{event}."

    def event(self) -> str:
        """The step and what is bad in it, without the cause."""
        if self.verdict.first is None:  # too many were skipped, for a monitor
            return f"Step {self.report.step} is finite"
        where = f" on {self.report.where}" if self.report.where else ""
        step = f"Step {self.report.step}"
        subject = "The state is not finite" if self.report.is_of_state else step
        if is_of_flag(self.verdict):
            label = self.verdict.first.label
            return f"{subject} has overflowed{where}: the {label} is set"
        if self.origin.source == "update":  # finite before, and again if it is undone
            return f"{subject}{where}: {_written_by_update(self.verdict.first)}"
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


# What a guard has checked, and what it costs.


def cost_sentences(cost: Cost) -> list[str]:
    """Writes the guard's share of a step, where that was measured."""
    if not cost.step_seconds:
        return []
    return [f"The guard takes {cost.share:.1%} of the time of a watched step."]


def gaps_of(coverage: GuardCoverage) -> list[str]:
    """Lists what was not checked, in sentences."""
    sentences = []
    if coverage.not_scanned:
        counts = (f"{count} x {why}" for why, count in coverage.not_scanned.items())
        sentences.append(f"Not scanned: {', '.join(counts)}.")
    if coverage.opaque:
        counts = (
            f"{counted(count, 'value')} of type {name}"
            for name, count in coverage.opaque.items()
        )
        sentences.append(f"Not looked into: {', '.join(counts)}.")
    if coverage.not_watched:
        kinds = ", ".join(kind.replace("_", " ") for kind in coverage.not_watched)
        is_default = coverage.not_watched == ["optimizer_state"]
        why = "off by default" if is_default else "not in `watch`"
        sentences.append(f"Not checked ({why}): {kinds}.")
    if 0 < coverage.modules_watched < coverage.modules:
        left_out = coverage.modules - coverage.modules_watched
        sentences.append(f"{left_out} of {coverage.modules} modules were left out.")
    if coverage.steps_watched < coverage.steps:
        count = coverage.steps - coverage.steps_watched
        sentences.append(f"{count} of {coverage.steps} steps were not watched.")
    if coverage.without_gradient:
        parameters = counted(coverage.without_gradient, "parameter")
        sentences.append(f"{parameters} had no gradient.")
    if not coverage.has_seen_loss and "loss" not in coverage.not_watched:
        sentences.append("No loss was seen: `guard.record(loss=loss)` adds it.")
    if coverage.ignores_spikes:
        sentences.append("Spikes were not looked for: they need `sync='step'`.")
    if coverage.failures:
        times = counted(coverage.failures, "time")
        sentences.append(f"The guard itself failed {times}.")
    return sentences


def coverage_text(coverage: GuardCoverage) -> str:
    """Writes what was checked, what was not, and which rules match nothing."""
    unit = f"{coverage.steps_watched} steps"
    if coverage.requests and not coverage.steps:
        unit = counted(coverage.requests, "request")
    checked = (
        f"Checked {coverage.tensors_listed} tensors in {coverage.tensors_scanned} "
        f"scans of {coverage.bytes_scanned} bytes in {unit}."
    )
    by_torch = [
        f"Torch operations scan tensors on {device}, not its kernels: {why}."
        for device, why in coverage.unused_kernels.items()
    ]
    unused = [
        f"The rule {rule!r} has matched nothing: compare it with a report's labels."
        for rule in coverage.rules_unused
    ]
    return printable(" ".join([checked, *gaps_of(coverage), *by_torch, *unused]))
