"""Checks weights, buffers and the optimizer's state before they are saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from ..detector.selection import Selection, Wanted
from ..scanner.text import some
from .models import Models, named_models
from .optimizers.wrapped import innermost, optimizers_of
from .report.report import NonFiniteError, Report
from .verdict.attribution import attribute
from .verdict.bad_frames import BadFrame, collect
from .verdict.roles import kind_of
from .verdict.rules import Allow, Rules
from .watching.judged_tensors import JudgedTensors
from .watching.watch import ModelWatch

_STATE = Wanted(weights=True, buffers=True, optimizer_state=True)
_RECORDER = {"step_mode": True, "memo": False}
_log = logging.getLogger("overflow_fast")
_warned: set[str] = set()


def assert_finite_state(
    model: Models,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    allow: Allow | None = None,
) -> None:
    """Raises if a checkpoint of model and optimizer would hold a nan or an inf.

    Checks parameters, buffers and the optimizer's state; -inf alone in a buffer is no
    alarm (masks). Of sharded tensors, checks this rank's part. Logs which tensors could
    not be checked, once for each reason. Reads their memory once, and incurs one
    CPU-GPU sync for each device.

    Args:
        model: The model, or a list or dict of models.
        optimizer: The optimizer, or a list of them, or None.
        allow: Intended non-finite values; see `OverflowGuard`.

    Raises:
        NonFiniteError: If a value is not finite; the report names it.
        TypeError, ValueError: If an argument cannot be used.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> assert_finite_state(model)  # then: torch.save(model.state_dict(), path)
    """
    models, optimizers = named_models(model), optimizers_of(optimizer)
    report = state_report(models, optimizers, Rules(allow or {}))
    if report is not None:
        raise NonFiniteError(report)


def state_report(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    rules: Rules,
    step: int = 0,
) -> Report | None:
    """Returns the report of what is not finite, or None. Incurs the sync.

    Args:
        models: The models, by what their modules' names begin with.
        optimizers: The optimizers whose state is checked.
        rules: The values that are allowed.
        step: The step that the report names.
    """
    watches = [
        ModelWatch(
            *(each, prefix, _STATE, Selection(None, ()), 0, _RECORDER, lambda *_: None)
        )
        for prefix, each in models.items()
    ]
    tensors = JudgedTensors(watches)
    for watch in watches:
        rules.put_on(watch)
    tensors.scan(None)
    for optimizer in optimizers:
        tensors.scan(innermost(optimizer))
    frames = collect(watches)
    _warn_of_gaps(watches)
    if not frames:
        return None
    notes = [f"All non-finite tensors: {_names(frames)}.", "Do not save this state."]
    verdict = attribute(frames)
    return Report(step, "raise", verdict, notes=notes, is_of_state=True)


def _warn_of_gaps(watches: Sequence[ModelWatch]) -> None:
    """Logs the tensors that could not be checked, each reason once."""
    for watch in watches:
        for why, count in watch.recorder.coverage.reasons().items():
            if why not in _warned:
                _warned.add(why)
                _log.warning(
                    "%d tensors of the state were not checked: %s. Logged once.",
                    count,
                    why,
                )


def _names(frames: Sequence[BadFrame]) -> str:
    names = (
        f"{kind_of(entry.role).replace('_', ' ')} {entry.label.name}"
        for bad in frames
        for entry in bad.bad_entries
    )
    return some(names, 8)
