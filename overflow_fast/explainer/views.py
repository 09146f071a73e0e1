"""Views of a step: what else is run again as the step, to explain what is left open.

The calls that were kept are the first view: see `explain.py`. Others have the program's
own lines in them, of the loss or behind backward, or the forwards alone of a function
that was ended before an effect.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ..guard.explaining import USE_RUN
from ..guard.report import notes
from ..guard.report.causes import NOT_REPRODUCIBLE, UNKNOWN
from ..guard.report.explanation import Explanation
from ..guard.report.findings import OWN_LINES
from ..torch_internals.compiler import has_compiled
from .bad_step import BadStep
from .gradient_lines import GradientCode, find_gradient_code
from .loss_call import LossCall
from .loss_line import LossLine, find_loss_line
from .questions import StepSearch
from .replayer import Observer, StepPart


def explain_forwards(step: BadStep, stopped: str) -> Explanation:
    """Explains the models' forwards alone, of a function that was ended.

    Args:
        step: The step, whose calls are the forwards.
        stopped: The effect before which the function was ended.
    """
    search = StepSearch(step)
    found = search.run()
    if not search.replayer.stopped:  # else its note names the effect in a forward
        found.notes = [each for each in found.notes if USE_RUN not in each]
        found.notes.insert(0, notes.STOPPED_FUNCTION.format(stopped))
    return found


def explain_loss(step: BadStep, found: Explanation) -> Explanation:
    """Explains a step with the program's lines of the loss, which lie outside of it.

    Args:
        step: The step, whose calls are its forwards.
        found: The explanation without those lines.

    Returns:
        The explanation with them; else what was found.
    """
    num_before = len(step.replayers)
    with contextlib.suppress(Exception):  # such as of source code unlike Python's
        line = find_loss_line()
        own = None if line is None else _with_lines(step, line)
        if own is not None:
            if own.cause == UNKNOWN.name and own.tensor:
                own.notes.insert(1, notes.WITHIN_RUN)
            return own
    ended = (each.stopped for each in step.replayers[num_before:])
    found.notes += [notes.STOPPED.format(each) for each in filter(None, ended)]
    return found


def _with_lines(step: BadStep, line: LossLine) -> Explanation | None:
    """The explanation of a replay of the lines, if that is seen to be the step."""
    is_partial = step.kept.hidden_by or step.kept.num_dropped or step.is_late
    has_stand_ins = any(call.has_stand_ins for call in step.calls)
    if is_partial or has_stand_ins or step.kept.start is None or not step.models:
        return None
    loss_call = LossCall(line, step.models, step.calls)
    is_same = _is_same(step, loss_call)
    if not is_same and loss_call.leave_out(loss_call.check.num_forwards):
        is_same = _is_same(step, loss_call)
    if not is_same and loss_call.rewind():
        is_same = _is_same(step, loss_call)
    if not is_same:
        return None
    view = replace(step, calls=loss_call.calls)
    found = explain_behind(view, StepSearch(view).run())
    if found.cause == NOT_REPRODUCIBLE.name and not loss_call.is_only_loss:
        return None  # another loss may have been bad
    if len(loss_call.calls) > 1:  # others' gradients are as bad with any remedy
        found.remedies = [each for each in found.remedies if each.is_recommended]
    found.notes.append(OWN_LINES.format(loss_call.place))
    return found


def _is_same(step: BadStep, loss_call: LossCall) -> bool:
    """Replays the lines; True if that was the step."""
    replayer = replace(step, calls=loss_call.calls).replayer()
    check, own = loss_call.check, step.replay_check
    observers: list[Observer] = [check, *([] if own is None else [own])]
    with replayer:
        last = len(loss_call.calls) - 1 if has_compiled() else -1
        part = StepPart(traced=last)  # compiled code runs without hooks
        if not loss_call.is_held:  # its gradients are compared
            part = StepPart(is_whole=True)
        result = replayer.run(part, observers=observers)
        changed = replayer.state.changed_around()
    is_alike = check.is_given_alike and check.has_same_graph
    is_changed = bool(changed) and not check.has_same_loss  # more than a counter is
    if result.error is not None or is_changed or not is_alike:
        return False
    if not loss_call.is_held:
        return own is not None and own.has_same_gradients()
    is_other = own is not None and own.difference()
    return check.has_same_loss or (bool(is_other) and bool(step.calls))


def explain_behind(step: BadStep, found: Explanation) -> Explanation:
    """Explains gradients that the program's lines behind backward have written to.

    Args:
        step: The step.
        found: The explanation without those lines.

    Returns:
        The explanation with them, where they are it; else what was found.
    """
    if notes.BEHIND.keys().isdisjoint(found.notes):
        return found
    num_before = step.num_forwards
    with contextlib.suppress(Exception):
        code = find_gradient_code()
        own = None if code is None else _with_tail(step, code)
        if own is not None:
            return own
    if step.num_forwards > num_before:
        found.notes = [notes.BEHIND.get(each, each) for each in found.notes]
    return found


def _with_tail(step: BadStep, code: GradientCode) -> Explanation | None:
    replayer = step.replayer(tail=code)
    with replayer:
        result = replayer.run()
    is_same = set(result.bad_gradients) == set(step.gradients)
    if result.error is not None or not is_same:
        return None
    # The step was compared with its replay before: that of these lines differs.
    search = StepSearch(replace(step, replay_check=None), tail=code)
    found = search.run()
    return found if found.phase == "optimizer" else None
