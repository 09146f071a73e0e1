"""Keeps what is run again out of sight of whatever observes the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from .. import _C
from ..base.modules import modules_in
from ..torch_internals.replaying import (
    with_torch_function,
    without_function_modes,
    without_operator_modes,
    without_saving_hooks,
)
from .hooks import root_hooks


@contextlib.contextmanager
def without_observers(models: Iterable[nn.Module]) -> Iterator[None]:
    """Pauses guards and takes modes off, but the one that sets the default device.

    In this thread those of other models, too: what is run again may call these.
    Warnings are left alone: their filters are of all threads, and Python's own show a
    warning of the step no more.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_paused(models))
        stack.enter_context(_C.Unwatched())
        stack.enter_context(with_torch_function())
        stack.enter_context(without_function_modes())
        stack.enter_context(without_operator_modes())
        stack.enter_context(without_saving_hooks())
        yield


@contextlib.contextmanager
def _paused(models: Iterable[nn.Module]) -> Iterator[None]:
    """Pauses all guards and detectors that watch one of these models, in all threads.

    A forward may go on in threads that it starts.
    """
    hooks = [h for model in models for m in modules_in(model) for h in root_hooks(m)]
    owners = {id(hook.owner): hook.owner for hook in hooks}.values()
    recorders = [owner.recorder for owner in owners]
    were_paused = [recorder.is_paused for recorder in recorders]
    for recorder in recorders:
        recorder.is_paused = True
    try:
        yield
    finally:
        for recorder, was_paused in zip(recorders, were_paused, strict=True):
            recorder.is_paused = was_paused
