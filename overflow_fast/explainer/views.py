"""Views of a step: what else is run again as the step, to explain what is left open.

The calls that were kept are the first view: see `explain.py`. Others have the program's
own lines in them, of the loss or behind backward, or the forwards alone of a function
that was ended before an effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from ..guard.explaining import USE_RUN
from ..guard.report.causes import NOT_REPRODUCIBLE, UNKNOWN
from ..guard.report.explanation import Explanation
from ..guard.report.findings import OWN_LINES
from ..torch_internals.compiler import has_compiled
from .bad_step import ALL_BAD, NOT_BEHIND, STOPPED, STOPPED_FUNCTION
from .calls import Call
from .own_lines import (
    GradientCode,
    LossCall,
    LossLine,
    advice,
    find_gradient_code,
    find_loss_line,
)
from .questions import TREE
from .replayer import Observer, StepPart
from .search import Case, Search


def explain_forwards(case: Case, calls: Sequence[Call], stopped: str) -> Explanation:
    """Explains the models' forwards alone, of a function that was ended.

    Args:
        case: The step.
        calls: The forwards.
        stopped: The effect before which the function was ended.
    """
    search = Search(case, calls, TREE)
    found = search.run()
    if not search.replayer.stopped:  # else its note names the effect in a forward
        found.notes = [each for each in found.notes if USE_RUN not in each]
        found.notes.insert(0, STOPPED_FUNCTION.format(stopped))
    return found


def explain_loss(
    case: Case, calls: Sequence[Call], found: Explanation, *, may_run: bool
) -> Explanation:
    """Explains a step with the program's lines of the loss, which lie outside of it.

    Args:
        case: The step.
        calls: Its forwards.
        found: The explanation without those lines.
        may_run: False if other ranks would not run the lines, too.

    Returns:
        The explanation with them; else what was found, with what to change.
    """
    try:
        line = find_loss_line()
    except Exception:
        line = None  # of source code that is not like Python's
    if line is None:
        return found
    num_before = len(case.replayers)
    with contextlib.suppress(Exception):
        own = _with_lines(case, calls, line) if may_run else None
        if own is not None:
            return own
    ended = (each.stopped for each in case.replayers[num_before:])
    found.notes += [STOPPED.format(each) for each in filter(None, ended)]
    text = advice(line, list(case.models.values()))
    for place, note in enumerate(found.notes):
        if USE_RUN in note:
            found.notes[place] = f"{note} {text}".rstrip()
            break
    return found


def _with_lines(
    case: Case, calls: Sequence[Call], line: LossLine
) -> Explanation | None:
    """The explanation of a replay of the lines, if that is seen to be the step."""
    incident = case.incident
    is_partial = incident.hidden_by or incident.num_dropped or incident.is_late
    has_stand_ins = any(call.has_stand_ins for call in calls)
    if is_partial or has_stand_ins or case.start is None or not case.models:
        return None
    loss_call = LossCall(line, case.models, calls)
    is_same = _is_same(case, calls, loss_call)
    if not is_same and loss_call.leave_out(loss_call.check.num_forwards):
        is_same = _is_same(case, calls, loss_call)
    if not is_same:
        return None
    found = Search(case, loss_call.calls, TREE).run()
    found = explain_behind(case, loss_call.calls, found)
    if found.cause == NOT_REPRODUCIBLE.name and not loss_call.is_only_loss:
        return None  # another loss may have been bad
    if len(loss_call.calls) > 1:  # others' gradients are as bad with any remedy
        found.remedies = [each for each in found.remedies if each.is_recommended]
    found.notes.append(OWN_LINES.format(loss_call.place))
    return None if found.cause == UNKNOWN.name else found


def _is_same(case: Case, calls: Sequence[Call], loss_call: LossCall) -> bool:
    """Replays the lines; True if that was the step."""
    replayer, check = case.replayer(loss_call.calls), loss_call.check
    observers: list[Observer] = [check]
    if case.replay_check is not None:
        observers.append(case.replay_check)
    with replayer:
        last = len(loss_call.calls) - 1 if has_compiled() else -1
        part = StepPart(traced=last)  # compiled code runs without hooks
        result = replayer.run(part, observers=observers)
        changed = replayer.state.changed_around()
    is_alike = check.is_given_alike and check.has_same_graph
    if result.error is not None or changed or not is_alike:
        return False
    if check.has_same_loss:
        return True
    is_other = case.replay_check is not None and case.replay_check.difference()
    return bool(is_other) and bool(calls)


def explain_behind(
    case: Case, calls: Sequence[Call], found: Explanation
) -> Explanation:
    """Explains gradients that the program's lines behind backward have written to.

    Args:
        case: The step.
        calls: Its calls.
        found: The explanation without those lines.

    Returns:
        The explanation with them, where they are it; else what was found.
    """
    if ALL_BAD not in found.notes:
        return found
    num_before = case.num_forwards
    with contextlib.suppress(Exception):
        code = find_gradient_code()
        own = None if code is None else _with_tail(case, calls, code)
        if own is not None:
            return own
    if case.num_forwards > num_before:
        found.notes[found.notes.index(ALL_BAD)] = NOT_BEHIND
    return found


def _with_tail(
    case: Case, calls: Sequence[Call], code: GradientCode
) -> Explanation | None:
    replayer = case.replayer(calls, tail=code)
    with replayer:
        result = replayer.run()
    is_same = set(result.bad_gradients) == set(case.incident.gradients)
    if result.error is not None or not is_same:
        return None
    # The step was compared with its replay before: that of these lines differs.
    search = Search(replace(case, replay_check=None), calls, TREE, tail=code)
    found = search.run()
    return found if found.phase == "optimizer" else None
