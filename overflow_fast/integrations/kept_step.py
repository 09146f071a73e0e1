"""A method of a trainer that computes the loss, kept so that a replay can call it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base.shared_models import without_reduction
from ..base.tree import CALL_DEPTH, copied, copied_call
from ..guard.guard import OverflowGuard
from ..guard.kept_calls.held_function import argument_names
from ..guard.undo.kept_objects import KeptObjects
from .patched_methods import PatchedMethod

# Below a trainer, which may hold its data: what lies further away stays changed by a
# replay. To read so many takes 1.2 s.
_MOST_OBJECTS = 100_000


class KeptStep(PatchedMethod):
    """Stands for the method of a trainer that computes the loss.

    A replay calls it as the trainer did, with logging off, and puts the attributes of
    its owner back. What it does to other objects is not undone.

    Args:
        owner: The object whose method it is.
        name: The method.
        guard: Keeps its calls.
        logs: The names of the owner's methods that log.
        is_kept: Called with the arguments; whether that call may be made again.
        records_loss: Whether what it returns is the step's loss, to be recorded.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        guard: OverflowGuard,
        logs: Sequence[str],
        is_kept: Callable[..., bool],
        records_loss: bool,
    ) -> None:
        self._guard = guard
        self._logs = logs
        self._is_kept = is_kept
        self._records_loss = records_loss
        super().__init__(owner, name, lambda *_, **__: True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_off = self.is_removed or not torch.is_grad_enabled()
        if is_off or not self._is_kept(*args, **kwargs):
            return self.__wrapped__(*args, **kwargs)
        call = _Call(self, args, kwargs)
        # What the method takes out of its arguments is there for the next call.
        (own_args, own_kwargs), _ = copied_call(args, kwargs)
        names = argument_names(self.__wrapped__, len(args))
        given = dict(zip(names, own_args, strict=True))
        again = functools.partial(call, **given, **own_kwargs)
        return self._guard.run(again, records_loss=self._records_loss)

    @contextlib.contextmanager
    def unseen(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Switches logging off, and puts the owner's attributes back."""
        owner = self.owner
        kept = KeptObjects(opens=lambda value: value is owner)
        kept.add([("", owner)], _MOST_OBJECTS)
        try:
            for name in self._logs:
                vars(self.owner)[name] = _nothing
            with without_reduction(models):
                yield
        finally:
            kept.restore()


class _Call:
    """A call of the method: first with the trainer's own arguments, then with copies.

    Args:
        step: What stands for the method.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    def __init__(self, step: KeptStep, args: Any, kwargs: Any) -> None:
        self._step = step
        self.__self__ = step.owner  # as of the method itself
        self.stands_for = step.owner  # which gives it the whole batch
        self._own: Any = args, kwargs
        self._num_args = len(args)

    def __call__(self, /, **given: Any) -> Any:
        own, self._own = self._own, None
        method = self._step.__wrapped__
        if own is not None:
            return method(*own[0], **own[1])
        models = [each for each in given.values() if isinstance(each, nn.Module)]
        values = list(copied(given, CALL_DEPTH).items())
        args = [value for _, value in values[: self._num_args]]
        with self._step.unseen(models):
            return method(*args, **dict(values[self._num_args :]))


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing."""
