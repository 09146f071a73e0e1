"""The decision tree of an explanation, as lists of questions.

The lists stand at the end of this file. Of each the first question counts that has an
answer:

    BEFORE     without a replay: it was bad before the step, or no replay can be made
    REPLAYED   of the first replay: it was ended, or it is finite
    FINITE     why a step that was bad can be finite when it is run again
    TRACED     of a replay that lists its operations: none of them made the bad values

Where none has one, an operation made the values, or a tensor held them before: see
`explain_origin.py` for the causes.
"""

from __future__ import annotations

from collections.abc import Callable

from ..base.modules import (
    class_name_of,
    gradient_taker,
    module_of_parameter,
    named_modules,
    parameters_of,
)
from ..base.shared_models import reduces
from ..base.tensors import place_of
from ..base.text import counted
from ..guard.kept_calls.call_keeper import GRAPH
from ..guard.process import world_size
from ..guard.report import notes
from ..guard.report.causes import LEFT_OVER_GRADIENTS, NOT_REPRODUCIBLE, ONLY_COMPILED
from ..guard.report.explanation import Explanation
from ..guard.report.findings import NOT_REDUCED, NOT_REPLAYED
from ..guard.report.remedy import Remedy
from ..torch_internals.compiler import has_compiled
from ..torch_internals.module_internals import asks_for_hooks
from ..torch_internals.replaying import active_modes
from .calls import is_forward_alone, name_outside
from .explain_origin import explain_mask, explain_root_op, first_bad_weight
from .named_tensors import state_by_name
from .op_table import OpTable
from .optimizer_step import explain_update
from .program_globals import changed_names, global_values
from .search import Question, Search, failed
from .tensor_kinds import sizes_and_bad
from .trace_back import RootOp

_MOST_MASKED = 8  # explanations; chosen, not measured
_NUM_RUNS = 3  # in all, if the budget has them; chosen, not measured
_LEFT_OVER = (
    "left over from step {}: non-finite since then, and not cleared before this step"
)
_GRADIENTS = ("gradient", "grad_output")  # kinds of what a backward has made


def _note(text: str, phase: str = "") -> Callable[[Search], Explanation]:
    """An answer that is a note alone."""
    return lambda search: Explanation(phase, notes=[text])


def _of_gradient(search: Search) -> bool:
    return search.step.kind == "gradient"


# Without a replay.


def _weight_before(search: Search) -> Explanation | None:
    """The explanation of a weight, unless the step's forward may have made it so."""
    step = search.step
    is_alone = is_forward_alone(search.replayer.calls)
    found = first_bad_weight(step.models, "parameter", is_alone=is_alone)
    if found is None and step.kind == "weight":  # -inf, which no rule allows
        models, within = step.models, step.module
        found = first_bad_weight(models, "parameter", masks=True, within=within)
    if found is None:
        is_state = step.kind == "optimizer_state"
        text = notes.WHICH_STEP
        return Explanation("optimizer", notes=[text]) if is_state else None
    weight, start = state_by_name(step.models)[found.tensor], step.kept.start
    if start is not None and start.written_in_step(weight):
        held = start.held(weight)
        if held is None:
            name = found.tensor
            text = f"the step's forward has written to {name}, which is non-finite now"
            note = notes.NOT_HELD.format(name)
            return Explanation(tensor=name, evidence=[text], notes=[note])
        if not sizes_and_bad([("", held)])[1]:
            return None
    if step.past.weights.get(found.tensor):
        return explain_update(step, found)
    return found


def _nothing_kept(search: Search) -> Explanation:
    why = search.step.kept.hidden_by
    if why == GRAPH:
        return Explanation(notes=[f"The step was not replayed: it {why}."])
    return Explanation(notes=[notes.NO_CALLS.format(f": it {why}" * bool(why))])


def _taken(search: Search) -> Explanation | None:
    engine = gradient_taker(search.step.models.values())
    return Explanation(notes=[notes.TAKEN.format(engine)]) if engine else None


# Of the first replay.


def _ended(search: Search) -> Explanation:
    assert search.first.error is not None
    search.step.error = search.first.error
    return failed(search.first.error)


def _is_finite(search: Search) -> bool:
    """True if the replay is finite, and nothing within it can be what was seen."""
    ends_within = search.is_seen_in_call or not search.step.reaches_loss
    is_finite = search.first.is_clean and not ends_within
    return is_finite or search.is_forward_finite


# Of a finite replay.


def _unwatched(search: Search) -> Explanation:
    is_alone = is_forward_alone(search.replayer.calls)
    kinds = "parameter", "buffer"
    found = first_bad_weight(search.step.models, *kinds, is_alone=is_alone)
    if found is not None:
        return found
    first = search.first
    open_ends = [notes.NO_LOSS] * (not (first.has_backward or is_alone))
    if first.has_mask:
        return Explanation(notes=[notes.MASKED, *open_ends])
    what = "step" if first.has_backward else "forward"
    evidence = [f"the {what} is finite when it is run"]
    masked = [] if first.table is None else masked_ops(first.table)
    if masked:
        open_ends.append(notes.MASKED_OPS.format("; ".join(map(masked_text, masked))))
    return Explanation(cause="", evidence=evidence, notes=open_ends)


def masked_ops(table: OpTable) -> list[Explanation]:
    """Explains operations of a finite step whose non-finite values are gone in the end.

    They were masked, clamped or divided away. Constants, such as a mask of -inf, and
    what was bad before the step are left out.

    Returns:
        One explanation for each line of code and operation, in order, at most eight.
    """
    found: dict[tuple[object, ...], Explanation] = {}
    for op in table.ops:
        is_new = op.makes_bad and not op.is_empty and op.place not in found
        if is_new and len(found) < _MOST_MASKED:
            root_op = RootOp(op, [op])
            found[op.place] = explain_root_op(root_op, table.ops, op.in_backward)
    return list(found.values())


def masked_text(found: Explanation) -> str:
    """Writes one of them: its line, its module, and why it is not finite."""
    op = found.op
    assert op is not None
    where = f" in {found.module}" if found.module else ""
    made = found.evidence[0] if found.evidence else found.cause
    return f"{op.place}: {op.code} ({op.name}{where}): {made}"


def _is_left_over(search: Search) -> bool:
    names, before = search.step.gradients.keys(), search.step.kept.left_over.keys()
    return _of_gradient(search) and bool(names) and names <= before


def _left_over(search: Search) -> Explanation:
    name, *others = search.step.gradients
    more = f" and {counted(len(others), 'other')}" if others else ""
    step = min(search.step.kept.left_over.values())
    text = f"{_LEFT_OVER.format(step)}; the step is finite without them"
    remedy = f"clear what step {step} left", "optimizer.zero_grad()"
    return Explanation(
        cause=LEFT_OVER_GRADIENTS.name,
        module=module_of_parameter(name),
        tensor=name,
        evidence=[f"`{name}`{more}: {text}"],
        remedies=[Remedy(*remedy, is_finite=True)],
    )


def _is_reduced(search: Search) -> bool:
    """True if gradients are made by ranks together, and the replay's are not."""
    is_alone = search.replayer.ranks.is_alone
    return _of_gradient(search) and not (is_alone or reduces(search.step.models))


def _has_several_backwards(search: Search) -> bool:
    """True if several came to an output: the last one's is replayed."""
    calls = search.replayer.calls
    are_several = any(call.num_held > len(call.held) for call in calls)
    return are_several and not search.replayer.returns_loss


def _other_step(search: Search) -> Explanation:
    return Explanation(notes=[notes.FINITE_BUT.format(_doubt(search))])


def _doubt(search: Search) -> str:
    """Why a finite replay may not have been the same step, or ""."""
    step, replayer = search.step, search.replayer
    modes = active_modes()
    if modes:
        return f"ran without {', '.join(modes)}"
    if any(call.is_part_of_compiled for call in replayer.calls):
        return "it ran eagerly what was compiled together with code around it"
    if step.is_late:
        return "the weights may have been stepped since"
    if step.is_rewritten:
        return "other code than a forward has written to weights in the step"
    difference = search.difference
    if difference is not None and difference.path.role == "weight":
        return str(difference)
    if search.num_unlike:
        number = counted(search.num_unlike, "forward")
        return f"{number} of the step that came to finite values then did not again"
    if step.kept.num_dropped:
        return f"{step.kept.num_dropped} earlier forwards of the step were not kept"
    if search.set_meanwhile:
        return notes.set_text(search.set_meanwhile)
    if any(call.is_overwritten() for call in replayer.calls):
        return "the batch was written to in the step"
    if replayer.state.is_of_other_form():
        return (
            "the program changed the class or the hooks of a module since the step's "
            "forward"
        )
    name = name_outside(replayer.calls)
    return notes.COMPUTED_OUTSIDE.format(name) if name else ""


def _again(search: Search) -> Explanation:
    """Runs it again: it is not reproducible, where all or some are finite."""
    replayer, is_forward = search.replayer, search.is_forward_finite
    num_bad, num_runs = 0, 1
    iterators = replayer.state.iterators
    before = global_values(iterators)
    while num_runs < _NUM_RUNS and search.budget.allows(len(replayer.calls)):
        num_runs += 1
        again = replayer.run()
        num_bad += again.is_forward if is_forward else not again.is_clean
    if num_runs > 1:
        search.changed += changed_names(before, global_values(iterators))
    text = f"{num_bad} of {num_runs} replays of the same step are non-finite"
    return _not_reproducible(search, text)


def _not_reproducible(search: Search, text: str) -> Explanation:
    step, first, difference = search.step, search.first, search.difference
    is_gradient = step.kind in ("gradient", "grad_output")
    phase = "backward" if is_gradient else "forward"
    found = Explanation(phase, NOT_REPRODUCIBLE.name, evidence=[text])
    if step.is_made and not step.is_received:
        found.module = step.module
    if difference is not None:
        found.evidence.append(str(difference))
        is_alarm = difference.path.module == step.module
        if not (is_gradient or (is_alarm and step.is_received)):
            found.module = difference.path.module  # it came before the alarm
    if step.kind == "gradient":
        if len(step.gradients) == 1:
            (found.tensor,) = step.gradients
            found.module = module_of_parameter(found.tensor)
            found.evidence.append(f"only the gradient of {found.tensor} is bad")
        are_all = step.gradients.keys() >= first.gradients.keys()
        if len(first.gradients) > 1 and are_all:  # as by clipping
            return Explanation(evidence=found.evidence, notes=[notes.ALL_BAD])
        if step.kept.had_gradients:
            return Explanation(notes=[notes.OLD])
        found.notes.append(NOT_REPLAYED)
    if search.changed:
        text = notes.FINITE_BUT.format(notes.effects_text(search.changed))
        return Explanation(notes=[text])
    models = search.step.models.values()
    devices = {p.device for model in models for p in parameters_of(model)}
    places = " and ".join(sorted(map(place_of, devices))) or "no device of a weight"
    found.notes.append(f"It ran on {places}.")
    return found


def _outside(search: Search) -> str:
    """Returns that what was run is finite, and that the loss was not run."""
    difference = search.difference
    unlike = f", and not what the step did: {difference}" if difference else ""
    return notes.LOSS_LEFT.format(unlike)


# Of a replay with a table: it is clean, or what is bad in it is meant.


def _masked(search: Search) -> Explanation | None:
    """The explanation where the alarm is of infs that code wrote as constants."""
    table = search.traced.table
    assert table is not None
    sources = table.masked_modules.get(search.step.module, ())
    found = explain_mask(sources, search.replayer.calls[-1])
    if found is not None and search.first.has_backward:
        found.evidence.append("run again, the step's gradients are finite")
    return found


def _is_constant(search: Search) -> bool:
    """True if the traced replay is bad where the first one was."""
    first, traced = search.first, search.traced
    return not traced.is_clean and first.is_forward == traced.is_forward


def _constant(search: Search) -> Explanation:
    phase = "backward" if search.traced.is_in_gradients else "forward"
    return Explanation(phase, notes=[notes.CONSTANTS])


def _differs(search: Search) -> Explanation:
    first = search.first
    if has_compiled() and not search.budget.allows(1):
        return Explanation(notes=[notes.SOME.format(notes.SPENT)])
    if has_compiled() and not search.replayer.run().is_clean:
        phase = "forward" if first.bad_outputs else "backward"
        text = (
            "compiled code gives it each time, and the same code run eagerly does not"
        )
        return Explanation(phase, ONLY_COMPILED.name, evidence=[text])
    if search.changed:
        text = notes.SOME.format(notes.effects_text(search.changed))
        return Explanation(notes=[text])
    asking = [
        f"{prefix}{name} ({class_name_of(type(module))})"
        for prefix, model in search.step.models.items()
        for name, module in named_modules(model)
        if asks_for_hooks(module) and not module.training
    ]
    if asking:
        return Explanation(notes=[notes.SOME.format(notes.fast_text(asking))])
    text = "replays of the same step differ: some of them are finite"
    return Explanation("forward", NOT_REPRODUCIBLE.name, evidence=[text])


# The tree.


BEFORE: tuple[Question, ...] = (
    Question(
        "Was a weight or the optimizer's state bad before, whatever the step does?",
        lambda search: search.step.kind in ("weight", "optimizer_state"),
        _weight_before,
    ),
    Question(
        "Are there other ranks, for which a replay alone would wait?",
        lambda search: search.replayer.ranks.is_alone and world_size() > 1,
        _note(notes.NOT_ALONE),
    ),
    Question(
        "Was no forward of the step kept?",
        lambda search: not search.replayer.calls,
        _nothing_kept,
    ),
    Question(
        "Was backward alone bad, and does an engine take its gradients as they come?",
        lambda search: search.step.kind in _GRADIENTS,
        _taken,
    ),
)
REPLAYED: tuple[Question, ...] = (
    Question(
        "Has the replay raised, or was it ended before an effect?",
        lambda search: search.first.error is not None,
        _ended,
    ),
    Question("Is it finite?", _is_finite, lambda search: search.ask(FINITE)),
)
FINITE: tuple[Question, ...] = (
    Question(
        "Did nobody watch, so that it may always have been finite?",
        lambda search: not search.step.kind,
        _unwatched,
    ),
    Question(
        "Are the gradients those of an earlier step? The replay began without any.",
        _is_left_over,
        _left_over,
    ),
    Question(
        "Was a weight bad, which is finite in the model?",
        lambda search: search.step.kind == "weight",
        _note(notes.OTHER_WEIGHT),
    ),
    Question(
        "Did the step run with other tensors than the models' own?",
        lambda search: any(call.has_stand_ins for call in search.replayer.calls),
        _note(notes.STOOD_IN),
    ),
    Question(
        "Was it a buffer, and was one bad before?",
        lambda search: search.step.kind == "buffer",
        lambda search: first_bad_weight(
            search.step.models,
            "buffer",
            is_alone=is_forward_alone(search.replayer.calls),
        ),
    ),
    Question(
        "Was a gradient bad, and was no backward run?",
        lambda s: s.step.kind in _GRADIENTS and not s.first.has_backward,
        _note(notes.NO_BACKWARD, "backward"),
    ),
    Question(
        "Was the gradient bad that the loss has given to the model's output?",
        lambda search: search.first.bad_held and not search.is_forward_finite,
        lambda search: Explanation(notes=[notes.GIVEN_BAD, _outside(search)]),
    ),
    Question(
        "Was it given to `record()`, and is it no loss? A replay does not look at it.",
        lambda search: search.step.is_given,
        _note(notes.NOT_RECORDED),
    ),
    Question(
        "Was the loss bad, which is computed outside of what was run?",
        lambda s: s.step.kind == "recorded" and not s.replayer.returns_loss,
        lambda search: Explanation("forward", notes=[_outside(search)]),
    ),
    Question(
        "Do ranks make the gradients together, which a replay leaves out?",
        _is_reduced,
        _note(NOT_REDUCED, "backward"),
    ),
    Question(
        "Are there hooks behind gradients, which a replay does not call?",
        lambda search: _of_gradient(search) and search.replayer.state.has_hooks,
        _note(notes.NOT_CALLED, "backward"),
    ),
    Question(
        "Did several backwards come to an output, of which one is replayed?",
        _has_several_backwards,
        lambda search: Explanation(notes=[_outside(search)]),
    ),
    Question(
        "May the replay be another step than the one that was bad?",
        lambda search: bool(_doubt(search)),
        _other_step,
    ),
    Question(
        "May parameters get gradients from the loss itself, which was not run?",
        lambda search: _of_gradient(search) and not search.replayer.returns_loss,
        lambda search: Explanation(notes=[_outside(search)]),
    ),
    Question("Is it bad in some of several replays?", lambda search: True, _again),
)
TRACED: tuple[Question, ...] = (
    Question(
        "Was it finite without a table, and did the guard see the infs of a mask?",
        lambda search: search.first.is_clean and search.is_seen_in_call,
        _masked,
    ),
    Question(
        "Was it finite without a table, whatever the guard saw?",
        lambda search: search.first.is_clean,
        lambda search: search.ask(FINITE),
    ),
    Question(
        "Has the program's own code raised, as in the step?",
        lambda search: search.traced.has_raised,
        _note(notes.RAISED_FINITE),
    ),
    Question(
        "Do all bad values come from constants?",
        _is_constant,
        _constant,
    ),
    Question(
        "Is it bad again without a table, or compiled?", lambda search: True, _differs
    ),
)


class StepSearch(Search):
    """A search with these questions."""

    asked_before, asked_first, asked_traced = BEFORE, REPLAYED, TRACED
