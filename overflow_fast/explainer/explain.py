"""From an alarm to its explanation: what can be said at once, else by a replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import _C
from ..base.given_steps import step_of
from ..base.tensors import devices_of
from ..base.text import error_line
from ..guard.explaining import USE_RUN
from ..guard.kept_calls.ambient import Ambient
from ..guard.options import BUDGET
from ..guard.process import world_size
from ..guard.report import notes
from ..guard.report.explanation import Explanation
from ..guard.report.findings import Artifact
from .bad_step import BadStep
from .calls import Call
from .effects.held_signals import as_raised
from .effects.rule import StoppedError
from .news import news_of
from .program_globals import changed_names, global_values
from .questions import StepSearch
from .replay_ranks import RankCoordinator

_log = logging.getLogger("overflow_fast")


def investigate(
    step: BadStep, ranks: RankCoordinator | None = None, artifact_bytes: int = 0
) -> Explanation:
    """Replays a step and says why it is not finite. Everything is put back afterwards.

    Args:
        step: The step.
        ranks: The ranks that replay it together, all of which call this; None for this
            one alone.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
    """
    begin = time.perf_counter()
    ranks = RankCoordinator() if ranks is None else ranks
    before = global_values()
    found, stopped = _searched(step, ranks)
    if found is not ranks.result:  # the rank that led looks at all views of its own
        has_forwards = ranks.is_alone and any(call.forwards for call in step.calls)
        stopped = stopped if has_forwards else ""
        if stopped:
            calls = [each for call in step.calls for each in call.forwards or [call]]
            step = replace(step, calls=calls)
        found = _by_other_views(step, found, stopped)
        found.news = _news(step, found)
        changed = changed_names(before, global_values())
        if changed and step.num_forwards:
            found.notes.append(notes.counted_text(changed))
    is_saved = artifact_bytes > 0 and bool(step.calls)
    own = _saved(step, artifact_bytes, found) if is_saved else []
    if found is not ranks.result:  # which has the numbers of the rank that led
        found.replays = step.num_forwards
        found.seconds = time.perf_counter() - begin
    result = ranks.finish(found)
    result.artifacts = own
    return result


def _news(step: BadStep, found: Explanation) -> str:
    """The news of the step; "" where they cannot be found out."""
    try:
        with _C.Hidden(), torch.no_grad():
            return news_of(step, found)
    except Exception as error:
        _log.debug("What is new in a bad step was not found out: %s", error)
        return ""


def _searched(step: BadStep, ranks: RankCoordinator) -> tuple[Explanation, str]:
    """Explains what was kept; returns by which effect it was ended, too, or ""."""
    found = Explanation()
    try:
        search = StepSearch(step, ranks)
        return search.run(), search.replayer.stopped
    except Exception as error:
        found.notes.append(ranks.note_end(error))
    return found, ""


def _by_other_views(step: BadStep, found: Explanation, stopped: str) -> Explanation:
    """Explains by further views of the step what the kept calls have left open.

    Args:
        step: The step.
        found: What was found by these.
        stopped: The effect before which a function was ended, whose forwards they are.
    """
    asks = not stopped and _asks_for_loss(found, step.calls)
    is_behind = not notes.BEHIND.keys().isdisjoint(found.notes)
    if not (stopped or asks or is_behind):
        return found
    from . import views  # with the program's own lines, which few steps need

    is_one = world_size() == 1
    if stopped:
        found = views.explain_forwards(step, stopped)
    elif asks and is_one:  # other ranks would not run the lines
        found = views.explain_loss(step, found)
    return views.explain_behind(step, found) if is_one else found


def _asks_for_loss(found: Explanation, calls: Sequence[Call]) -> bool:
    """True if the loss may tell more, and was not replayed."""
    if any(call.returns_loss for call in calls):
        return False
    is_unknown = any(USE_RUN in note for note in found.notes)
    return is_unknown or (found.phase == "backward" and bool(calls))


def _saved(step: BadStep, most: int, found: Explanation) -> list[Artifact]:
    """The files of the step, or a note on why there are none."""
    from .step_file import step_file  # for runs that keep evidence alone

    try:
        pairs = [] if step.kept.start is None else step.kept.start.pairs()
        return step_file(step.models, step.calls, pairs, most)
    except Exception as error:
        found.notes.append(notes.NOT_SAVED.format(error_line(error)))
        return []


# `explain()`: says why a model's step is not finite, without a guard.


def explain(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    budget: int = BUDGET,
) -> Explanation:
    """Runs a step of a model and says which operation makes it non-finite, and why.

    Runs forward and backward; gradients, buffers and random states are put back bit for
    bit, and nothing is stepped. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        model: The model.
        batch: What the model is called with: a tuple or list of arguments, a dict of
            keyword arguments, or the one argument.
        loss: Takes the batch, or the model and the batch, calls the model and returns
            what to call `backward()` on. None: the loss that the model returns.
        budget: How many forwards it may run to explain, and to try remedies.

    Returns:
        The explanation; its `is_finite` is True if the step is finite.

    Raises:
        TypeError: If the model or the loss cannot be used.
        Exception: What the model or the loss raises of this batch.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> found = explain(model, torch.zeros(1, 2), lambda x: model(x).sum().log())
        >>> found.phase
        'forward'
    """
    function = step_of(model, loss)
    call = Call(function, batch, Ambient(model, devices_of([model])))
    call.returns_loss = loss is not None
    call.has_backward = True if loss is not None else None
    if torch.is_inference_mode_enabled():  # its tensors are saved for no backward
        call.has_backward = False
    with as_raised():
        step = BadStep({"": model}, [call], budget=budget)
        found = investigate(step)
        if step.error is None or isinstance(step.error, StoppedError):
            return found
        raise step.error
