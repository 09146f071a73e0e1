"""Explanations without an operation: the replay is finite, or has ended."""

from __future__ import annotations

from collections.abc import Callable

from ..core.devices import place_of
from ..core.wrapped import reduces
from ..torch_internals.compiler import has_compiled
from ..torch_internals.replay_internals import active_modes
from . import notes
from .bad_leaf import first_bad_weight
from .explanation import NOT_REPLAYED, Explanation
from .flagged import explain_flag
from .incident import Incident
from .outcome import Outcome
from .payload import of_whom
from .places import module_of_parameter
from .rerun import Rerun
from .second_opinion import Overheard, is_elsewhere, opinion_of
from .team import OnRank, text_of
from .witness import difference_of

_RATE = 3


class Answers:
    """Explanations without an operation.

    Args:
        rerun: Runs the step.
        incident: What a guard saw; None where nobody watched.
        may_run: Whether the budget allows so many forwards more.

    Attributes:
        changed: What a replay changes, and cannot be put back.
    """

    def __init__(
        self,
        rerun: Rerun,
        incident: Incident | None,
        may_run: Callable[[int], bool],
    ) -> None:
        self._rerun = rerun
        self._incident = incident
        self._may_run = may_run
        self.changed: list[str] = []

    def clean(self, first: Outcome) -> Explanation:
        """The replay is finite: it was a transient, or is outside of what was run."""
        incident = self._incident
        if incident is None:
            found = first_bad_weight(self._rerun.models, "parameter", "buffer")
            return found or _finite(first)
        if incident.is_of_flag:
            return explain_flag(self._rerun)
        if incident.kind == "weight":
            return Explanation(notes=[notes.OTHER_WEIGHT])
        if any(call.has_stand_ins for call in self._rerun.calls):
            return Explanation(notes=[notes.STOOD_IN])
        if incident.kind == "buffer":
            found = first_bad_weight(self._rerun.models, "buffer")
            if found is not None:
                return found
        if not first.has_backward and incident.kind in ("gradient", "grad_output"):
            return Explanation("backward", notes=[self._no_backward()])
        if first.bad_held:
            return Explanation(notes=[notes.GIVEN_BAD, self._outside()])
        if incident.kind == "recorded" and not self._rerun.returns_loss:
            return Explanation("forward", notes=[self._outside()])
        if incident.kind == "gradient" and self._leaves_reduction_out():
            return Explanation("backward", notes=[notes.NOT_REDUCED])
        if incident.kind == "gradient" and self._rerun.state.has_hooks:
            return Explanation("backward", notes=[notes.NOT_CALLED])
        doubt = self._doubt(incident)
        if doubt:
            return Explanation(notes=[f"The replay is finite, but {doubt}."])
        num_bad, num_runs = 0, 1
        while num_runs < _RATE and self._may_run(len(self._rerun.calls)):
            num_runs += 1
            num_bad += not self._rerun.run().is_clean
        return self._not_reproducible(first, num_bad, num_runs)

    def not_in_eager(self, first: Outcome, armed: Outcome) -> Explanation:
        """It was bad without a table and is clean, or meant, with one."""
        if first.is_clean:
            return self.clean(first)
        if not armed.is_clean and first.is_forward == armed.is_forward:
            return Explanation(
                "backward"
                if armed.bad_gradients and not armed.bad_outputs
                else "forward",
                notes=["Its infs come from constants alone: they may be meant."],
            )
        again = self._rerun.run() if self._may_run(1) else first
        if again.is_clean or not has_compiled():
            if self.changed:
                text = notes.effects_text(self.changed)
                return Explanation(notes=[notes.SOME.format(text)])
            text = "replays of the same step differ: some of them are finite"
            return Explanation("forward", "not reproducible", evidence=[text])
        phase = "forward" if first.bad_outputs else "backward"
        text = (
            "compiled code gives it each time, and the same code run eagerly does not"
        )
        return Explanation(phase, "only in compiled code", evidence=[text])

    def failed(self, error: Exception) -> Explanation:
        """The replay has raised."""
        what = str(error) if isinstance(error, OnRank) else text_of(error)
        return Explanation(notes=[f"The replay raised {what}."])

    def note_overwritten(self, found: Explanation) -> None:
        """Adds that the batch is not what it was, if that is seen."""
        if any(call.is_overwritten() for call in self._rerun.calls):
            found.notes.append(
                "The batch was written to in the step: the replay saw other data."
            )

    def _not_reproducible(
        self, first: Outcome, num_bad: int, num_runs: int
    ) -> Explanation:
        incident = self._incident
        assert incident is not None
        is_gradient = incident.kind in ("gradient", "grad_output")
        found = Explanation(
            "backward" if is_gradient else "forward", "not reproducible"
        )
        found.evidence.append(
            f"{num_bad} of {num_runs} replays of the same step are non-finite"
        )
        if incident.is_made:
            found.module = incident.module
        difference = difference_of(self._rerun.watched)
        if difference is not None:
            found.evidence.append(str(difference))
            if not is_gradient:  # what was seen there first came before the alarm
                found.module = difference.module
        if incident.kind == "gradient":
            is_told = self._whose(found, first, incident)
            if not self._rerun.returns_loss and not is_told:
                # Parameters may get gradients from the loss itself.
                return Explanation(notes=[self._outside()])
            if not is_told and _are_all(incident, first):
                return Explanation(evidence=found.evidence, notes=[notes.ALL_BAD])
            if incident.had_gradients:
                return Explanation(notes=[notes.OLD])
            found.notes.append(NOT_REPLAYED)
        if self.changed:
            text = f"The replay is finite, but {notes.effects_text(self.changed)}."
            return Explanation(notes=[text])
        if not is_gradient and found.module:
            self._ask_elsewhere(found)
        found.notes.append(f"It ran on {self._places()}.")
        return found

    def _ask_elsewhere(self, found: Explanation) -> None:
        """Adds what the module gives on the CPU, where it ran on another device."""
        models = self._rerun.models
        if not is_elsewhere(models) or not self._may_run(len(self._rerun.calls)):
            return
        overheard = Overheard(found.module)
        self._rerun.run(change=overheard)
        if overheard.call is not None:
            opinion = opinion_of(overheard.call, overheard.output)
            found.evidence += [str(opinion)] if opinion is not None else []

    def _places(self) -> str:
        """Names the devices of the models, and the host: one of them may be faulty."""
        models = self._rerun.models.values()
        devices = {p.device for model in models for p in model.parameters()}
        return " and ".join(sorted(map(place_of, devices))) or "no device of a weight"

    def _whose(self, found: Explanation, clean: Outcome, incident: Incident) -> bool:
        """Names the gradient that the bad values came from; whether its bits tell."""
        text, names = "", list(incident.gradients)
        if len(names) == 1:
            found.tensor = names[0]
            found.evidence.append(f"only the gradient of {names[0]} is bad")
        else:
            name, text = of_whom(incident.gradients, clean.gradients)
            found.tensor = name
            found.evidence += [text] if text else []
        if found.tensor:
            found.module = module_of_parameter(found.tensor)
        return bool(text)

    def _doubt(self, incident: Incident) -> str:
        """Why a finite replay may not have been the same step, or ""."""
        modes = active_modes()
        if modes:
            return f"ran without {', '.join(modes)}"
        if any(call.is_part_of_compiled for call in self._rerun.calls):
            return "it ran eagerly what was compiled together with code around it"
        if incident.is_late:
            return "the weights may have been stepped since"
        if incident.num_dropped:
            return f"{incident.num_dropped} earlier forwards of the step were not kept"
        if any(call.is_overwritten() for call in self._rerun.calls):
            return "the batch was written to in the step"
        return ""

    def _leaves_reduction_out(self) -> bool:
        """Tells whether ranks reduced gradients in the step, and not in its replay."""
        return not self._rerun.team.is_alone and not reduces(self._rerun.models)

    def _outside(self) -> str:
        return (
            "The models' own forward and backward are finite; the loss outside of them "
            "was not replayed. Use `guard.run(lambda: loss)`."
        )

    def _no_backward(self) -> str:
        sizes = [call.not_held for call in self._rerun.calls if call.not_held]
        if sizes:
            size = f"{max(sizes) / 2**20:.0f} MiB"
            why = f"the gradients of the model's output were too large to hold ({size})"
        else:
            why = "what backward was called on is not known"
        return f"Backward was not replayed: {why}. Use `guard.run(lambda: loss)`."


def _finite(outcome: Outcome) -> Explanation:
    """Describes a step that nobody watched, and that is finite."""
    open_ends = [notes.MASKED] * outcome.has_mask
    open_ends += [notes.NO_LOSS] * (not outcome.has_backward)
    if open_ends:
        return Explanation(notes=open_ends)
    evidence = ["the step is finite when it is run"]
    return Explanation(cause="not reproducible", evidence=evidence)


def _are_all(incident: Incident, clean: Outcome) -> bool:
    """Tells whether all of several gradients are bad, as clipping makes them."""
    return (
        len(clean.gradients) > 1 and incident.gradients.keys() >= clean.gradients.keys()
    )
