"""Explains replays that name no operation: they are finite, or have raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..guard.explaining import USE_RUN
from ..guard.report.causes import (
    LEFT_OVER_GRADIENTS,
    NOT_REPRODUCIBLE,
    ONLY_COMPILED,
)
from ..guard.report.explanation import NOT_REPLAYED, Explanation, Remedy
from ..scanner.modules import (
    module_of_parameter,
    parameters_of,
    reduces,
)
from ..scanner.tensors import place_of
from ..scanner.text import counted, error_line
from ..torch_internals.compiler import has_compiled
from ..torch_internals.replaying import active_modes
from . import bad_step as notes
from .bad_step import BadStep
from .calls import name_outside
from .effects.rule import StoppedError
from .explain_origin import explain_mask, first_bad_weight
from .nan_bits import gradient_of_payload
from .replay_ranks import GIVEN, OnRank
from .replayer import ReplayCheck, Replayer, ReplayResult

_RATE = 3  # runs in all, if the budget has them; chosen, not measured


class WithoutOperation:
    """Explains replays in which no operation makes what is bad.

    Args:
        replayer: Runs the step.
        incident: What a guard saw; None where nobody watched.
        may_run: Whether the budget allows so many forwards more.
        replay_check: Has compared the first run with the step, or None.
        changed: What a replay changes, and cannot be put back.
        set_meanwhile: Numbers of the models that the step has set, a replay not.
    """

    def __init__(
        self,
        replayer: Replayer,
        incident: BadStep | None,
        may_run: Callable[[int], bool],
        replay_check: ReplayCheck | None,
        changed: Sequence[str],
        set_meanwhile: Sequence[str],
    ) -> None:
        self._replayer = replayer
        self._replay_check = replay_check
        self._incident = incident
        self._may_run = may_run
        self._changed, self._set_meanwhile = changed, set_meanwhile

    def is_forward_finite(self, first: ReplayResult) -> bool:
        """True if a forward was bad, and its replay is not, before what it gave back.

        The gradients that its outputs were given came of the bad values of the step.
        """
        incident, check = self._incident, self._replay_check
        if incident is None or incident.kind not in ("input", "output"):
            return False
        if first.state != GIVEN or not self._replayer.ranks.is_alone:
            return False
        difference = None if check is None else check.difference()
        return difference is not None and difference.path.role == "output"

    def clean(self, first: ReplayResult) -> Explanation:
        """The replay is finite: it was a transient, or is outside of what was run."""
        incident = self._incident
        if incident is None:
            found = first_bad_weight(self._replayer.models, "parameter", "buffer")
            return found or _explain_finite(first)
        if incident.is_of_flag:
            from .flag_search import explain_flag  # of devices with such a flag

            return explain_flag(self._replayer)
        names = incident.gradients.keys()
        if incident.kind == "gradient" and names and names <= incident.left_over.keys():
            return _left_over(incident)
        if incident.kind == "weight":
            return Explanation(notes=[notes.OTHER_WEIGHT])
        if any(call.has_stand_ins for call in self._replayer.calls):
            return Explanation(notes=[notes.STOOD_IN])
        if incident.kind == "buffer":
            found = first_bad_weight(self._replayer.models, "buffer")
            if found is not None:
                return found
        if not first.has_backward and incident.kind in ("gradient", "grad_output"):
            return Explanation("backward", notes=[self._no_backward()])
        is_forward = self.is_forward_finite(first)
        if first.bad_held and not is_forward:
            return Explanation(notes=[notes.GIVEN_BAD, self._outside()])
        if incident.kind == "recorded" and not self._replayer.returns_loss:
            return Explanation("forward", notes=[self._outside()])
        ranks, models = self._replayer.ranks, self._replayer.models
        is_reduced = ranks.is_alone or reduces(models)  # as the step's gradients were
        if incident.kind == "gradient" and not is_reduced:
            return Explanation("backward", notes=[notes.NOT_REDUCED])
        if incident.kind == "gradient" and self._replayer.state.has_hooks:
            return Explanation("backward", notes=[notes.NOT_CALLED])
        if not self._replayer.returns_loss and self._has_several_gradients():
            return Explanation(notes=[self._outside()])
        doubt = self._doubt(incident)
        if doubt:
            return Explanation(notes=[f"The replay is finite, but {doubt}."])
        from .program_globals import changed_names, global_values  # seldom needed

        num_bad, num_runs = 0, 1
        lost = self._replayer.state.lost
        before = global_values(lost)
        while num_runs < _RATE and self._may_run(len(self._replayer.calls)):
            num_runs += 1
            again = self._replayer.run()
            num_bad += again.is_forward if is_forward else not again.is_clean
        if num_runs > 1:
            changed = changed_names(before, global_values(lost))
            self._changed = [*self._changed, *changed]
        return self._not_reproducible(first, num_bad, num_runs)

    def not_in_eager(self, first: ReplayResult, traced: ReplayResult) -> Explanation:
        """It was bad without a table and is clean, or meant, with one."""
        if first.is_clean:
            return self._masked(first, traced) or self.clean(first)
        if traced.has_raised:
            return Explanation(notes=[notes.RAISED_FINITE])
        if not traced.is_clean and first.is_forward == traced.is_forward:
            return Explanation(
                "backward" if traced.is_in_gradients else "forward",
                notes=["The infs come only from constants and may be intentional."],
            )
        again = self._replayer.run() if self._may_run(1) else first
        if again.is_clean or not has_compiled():
            if self._changed:
                text = notes.effects_text(self._changed)
                return Explanation(notes=[notes.SOME.format(text)])
            text = "replays of the same step differ: some of them are finite"
            return Explanation("forward", NOT_REPRODUCIBLE.name, evidence=[text])
        phase = "forward" if first.bad_outputs else "backward"
        text = (
            "compiled code gives it each time, and the same code run eagerly does not"
        )
        return Explanation(phase, ONLY_COMPILED.name, evidence=[text])

    def _masked(self, first: ReplayResult, traced: ReplayResult) -> Explanation | None:
        """The explanation where the alarm is of infs that code wrote as constants."""
        incident, table = self._incident, traced.table
        if incident is None or incident.kind not in ("input", "output") or not table:
            return None
        sources = table.masked_modules.get(incident.module, ())
        found = explain_mask(sources, self._replayer.calls[-1])
        if found is not None and first.has_backward:
            found.evidence.append("run again, the step's gradients are finite")
        return found

    def failed(self, error: Exception) -> Explanation:
        """The replay has raised, or was ended before an effect."""
        if isinstance(error, StoppedError):
            return Explanation(notes=[notes.STOPPED.format(error)])
        what = str(error) if isinstance(error, OnRank) else error_line(error)
        return Explanation(notes=[f"The replay raised {what}."])

    def _not_reproducible(
        self, first: ReplayResult, num_bad: int, num_runs: int
    ) -> Explanation:
        incident = self._incident
        assert incident is not None
        is_gradient = incident.kind in ("gradient", "grad_output")
        found = Explanation(
            "backward" if is_gradient else "forward", NOT_REPRODUCIBLE.name
        )
        found.evidence.append(
            f"{num_bad} of {num_runs} replays of the same step are non-finite"
        )
        if incident.is_made and not incident.is_received:
            found.module = incident.module
        check = self._replay_check
        difference = None if check is None else check.difference()
        if difference is not None:
            found.evidence.append(str(difference))
            is_alarm = difference.path.module == incident.module
            if not (is_gradient or (is_alarm and incident.is_received)):
                found.module = difference.path.module  # it came before the alarm
        if incident.kind == "gradient":
            is_told = self._whose(found, first, incident)
            if not self._replayer.returns_loss and not is_told:
                # Parameters may get gradients from the loss itself.
                return Explanation(notes=[self._outside()])
            are_all = incident.gradients.keys() >= first.gradients.keys()
            if not is_told and len(first.gradients) > 1 and are_all:  # as by clipping
                return Explanation(evidence=found.evidence, notes=[notes.ALL_BAD])
            if incident.had_gradients:
                return Explanation(notes=[notes.OLD])
            found.notes.append(NOT_REPLAYED)
        if self._changed:
            text = f"The replay is finite, but {notes.effects_text(self._changed)}."
            return Explanation(notes=[text])
        if not is_gradient and found.module:
            self._ask_elsewhere(found)
        found.notes.append(f"It ran on {self._places()}.")
        return found

    def _ask_elsewhere(self, found: Explanation) -> None:
        """Adds what the module gives on the CPU, where it ran on another device."""
        from .second_device import FirstCall, compare_devices, is_elsewhere

        models = self._replayer.models
        if not is_elsewhere(models) or not self._may_run(len(self._replayer.calls)):
            return
        first_call = FirstCall(found.module)
        self._replayer.run(observers=[first_call])
        if first_call.call is not None:
            errors = compare_devices(first_call.call, first_call.output)
            found.evidence += [str(errors)] if errors is not None else []

    def _places(self) -> str:
        """Names the devices of the models, and the host: one of them may be faulty."""
        models = self._replayer.models.values()
        devices = {p.device for model in models for p in parameters_of(model)}
        return " and ".join(sorted(map(place_of, devices))) or "no device of a weight"

    def _whose(
        self, found: Explanation, clean: ReplayResult, incident: BadStep
    ) -> bool:
        """Names the gradient that the bad values came from; whether its bits tell."""
        text, names = "", list(incident.gradients)
        if len(names) == 1:
            found.tensor = names[0]
            found.evidence.append(f"only the gradient of {names[0]} is bad")
        else:
            name, text = gradient_of_payload(incident.gradients, clean.gradients)
            found.tensor = name
            found.evidence += [text] if text else []
        if found.tensor:
            found.module = module_of_parameter(found.tensor)
        return bool(text)

    def _doubt(self, incident: BadStep) -> str:
        """Why a finite replay may not have been the same step, or ""."""
        modes = active_modes()
        if modes:
            return f"ran without {', '.join(modes)}"
        if any(call.is_part_of_compiled for call in self._replayer.calls):
            return "it ran eagerly what was compiled together with code around it"
        if incident.is_late:
            return "the weights may have been stepped since"
        if incident.num_dropped:
            return f"{incident.num_dropped} earlier forwards of the step were not kept"
        if self._set_meanwhile:
            return notes.set_text(self._set_meanwhile)
        if any(call.is_overwritten() for call in self._replayer.calls):
            return "the batch was written to in the step"
        if self._replayer.state.is_of_other_form():
            return (
                "the program changed the class or the hooks of a module since the "
                "step's forward"
            )
        name = name_outside(self._replayer.calls)
        return notes.outside_text(name) if name else ""

    def _has_several_gradients(self) -> bool:
        """True if several backwards came to an output: the last one's is replayed."""
        return any(call.num_held > len(call.held) for call in self._replayer.calls)

    def _outside(self) -> str:
        if self._set_meanwhile:  # what lies within guard.run() does not set it either
            return f"The replay is finite, but {notes.set_text(self._set_meanwhile)}."
        check = self._replay_check
        difference = None if check is None else check.difference()
        unlike = f", and not what the step did: {difference}" if difference else ""
        return (
            "What was replayed, the models' own forward and backward, is finite"
            f"{unlike}. The loss outside of them was not replayed: use "
            f"`{USE_RUN}`."
        )

    def _no_backward(self) -> str:
        sizes = [call.not_held for call in self._replayer.calls if call.not_held]
        if sizes:
            size = f"{max(sizes) / 2**20:.0f} MiB"
            why = f"the gradients of the model's output were too large to hold ({size})"
        else:
            why = "what backward was called on is not known"
        return f"Backward was not replayed: {why}. Use `guard.run(lambda: loss)`."


def _left_over(incident: BadStep) -> Explanation:
    """The gradients are those of an earlier step; the replay began without any."""
    name, *others = incident.gradients
    more = f" and {counted(len(others), 'other')}" if others else ""
    steps = incident.left_over.values()
    found = Explanation(cause=LEFT_OVER_GRADIENTS.name, tensor=name)
    found.module = module_of_parameter(name)
    found.evidence.append(
        f"`{name}`{more}: {notes.LEFT_OVER.format(min(steps))}; the step is finite "
        "without them"
    )
    text = f"clear what step {min(steps)} left"
    found.remedies.append(Remedy(text, "optimizer.zero_grad()", is_finite=True))
    return found


def _explain_finite(result: ReplayResult) -> Explanation:
    """Describes a step that nobody watched, and that is finite."""
    open_ends = [notes.MASKED] * result.has_mask
    open_ends += [notes.NO_LOSS] * (not result.has_backward)
    if open_ends:
        return Explanation(notes=open_ends)
    evidence = ["the step is finite when it is run"]
    return Explanation(cause=NOT_REPRODUCIBLE.name, evidence=evidence)
