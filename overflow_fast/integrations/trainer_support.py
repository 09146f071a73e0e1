"""Shares the code of the callbacks of all trainers."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..guard.guard import OverflowGuard
from ..guard.kept_calls.held_function import argument_names
from ..guard.options import reusable
from ..guard.process import has_process_group
from ..guard.undo.kept_objects import KeptObjects
from ..guard.watching.evaluation import Evaluation
from ..scanner.modules import without_reduction
from ..scanner.tree import CALL_DEPTH, copied, copied_call

# Below a trainer, which may hold its data: what lies further away stays changed by a
# replay. To read so many takes 1.2 s.
_MOST_OBJECTS = 100_000


class GuardOwner:
    """Makes a guard for each training.

    Several ranks decide together, unless the policy is to warn or `process_group` is
    False. A copy or a pickle keeps the arguments, and has no guard until it is used in
    a training of its own.

    Args:
        learn: The number of clean steps, in each training, to learn from which values
            are non-finite by design; see `OverflowGuard.learn()`. None for none.
        evaluation: What is done about a bad value in an evaluation inside the training:
            "log" it with its batch and rows, and go on, or "alarm": what `on_overflow`
            says.
        arguments: Arguments of `OverflowGuard` but the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, switched off when that is over, or None
            before the first.

    Raises:
        TypeError, ValueError: If an argument cannot be used.
    """

    def __init__(
        self,
        *,
        learn: int | None = None,
        evaluation: Literal["log", "alarm"] = "log",
        **arguments: Any,
    ) -> None:
        if evaluation not in ("log", "alarm"):
            raise ValueError(f"evaluation must be 'log' or 'alarm', got {evaluation!r}")
        self._logs_evaluation = evaluation == "log"
        # The names of modules are not known yet.
        named = ("include", "exclude", "allow")
        arguments = reusable(arguments)  # each training has a guard of its own
        known = {name: arg for name, arg in arguments.items() if name not in named}
        trial = OverflowGuard(nn.Identity(), **known)
        trial.remove()
        if learn is not None:
            trial.learn(learn)
        self._learn = learn
        self._arguments = arguments
        self.guard: OverflowGuard | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guard": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardOwner:
        copied: GuardOwner = object.__new__(type(self))
        # Policies, groups and exporters are shared with the copy.
        memo |= {id(self): copied, id(self._arguments): self._arguments}
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def raises(self) -> bool:
        """True if the policy is to raise."""
        return bool(self._arguments.get("on_overflow", "raise") == "raise")

    def attach_guard(self, model: Any, optimizer: Any) -> OverflowGuard:
        """Attaches a guard for a training."""
        arguments = decided_by_all_ranks(self._arguments)
        self.guard = OverflowGuard(model, optimizer, **arguments)
        if self._learn is not None:
            self.guard.learn(self._learn)
        return self.guard

    def note_evaluation(self, batch: int | None, loader: int = 0) -> None:
        """Notes that a batch of an evaluation is run.

        Args:
            batch: Its index in the evaluation, from 0; None when that is over.
            loader: The index of the loader.
        """
        if self.guard is None or not self._logs_evaluation:
            return
        of_batch = None if batch is None else Evaluation(batch, loader)
        self.guard._parts.pipeline.evaluation = of_batch

    def remove_guard(self) -> None:
        """Removes the guard, after its last verdict."""
        if self.guard is not None:
            self.guard.remove()


def decided_by_all_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a guard's arguments, with the group of all ranks if none is given.

    A trainer's ranks train one model, which shows in no parameter while it is not
    wrapped yet, nor where the stages of a pipeline share none.
    """
    if not has_process_group() or arguments.get("process_group") is not None:
        return arguments
    acts = arguments.get("on_overflow") != "warn"
    return {**arguments, "process_group": dist.group.WORLD if acts else None}


def has_owner(callbacks: Iterable[object]) -> bool:
    """True if one of a Trainer's callbacks has a guard."""
    return any(isinstance(each, GuardOwner) for each in callbacks)


def check_before_saving(guard: OverflowGuard) -> None:
    """Raises `NonFiniteError` if the guard is on and the state is not finite.

    Call it on every rank, before a file is written, or removed to make room. Incurs a
    CPU-GPU sync for each device.
    """
    has_model = any(watch.model is not None for watch in guard._parts.watches)
    if guard.enabled and has_model:
        guard.assert_finite_state(joint=True)


# Replaces methods of trainers until the guard is removed.


_NOTHING = object()


class PatchedMethod:
    """Stands for a method of an object, as the object's attribute, until removed.

    A former attribute is put back, and one that other code has set since is left alone.
    Copies and pickles of the object have the former method.

    Args:
        owner: The object.
        name: The name of the method.
        before: Called with the arguments of each call. If it returns False, the method
            is not called, and the call returns None.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., object]) -> None:
        self.__wrapped__: Any = getattr(owner, name)
        self._owner = owner
        self._name = name
        self._before: Callable[..., object] | None = before
        self._earlier = vars(owner).get(name, _NOTHING)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None and self._before(*args, **kwargs) is False:
            return None
        return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        """Puts the former method back. Calling it again changes nothing."""
        self._before = None  # other code may have wrapped this object since
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        earlier = self._earlier
        while isinstance(earlier, PatchedMethod) and earlier._before is None:
            earlier = earlier._earlier
        if earlier is _NOTHING:
            del attributes[self._name]
        else:
            attributes[self._name] = earlier

    def __getattr__(self, name: str) -> Any:
        # Attributes of the method, such as its code or the calls of a mock.
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.__wrapped__,)


def _same(method: Any) -> Any:
    return method


class JudgedMethod(PatchedMethod):
    """Stands for a method of a trainer that runs steps: judges one that it raises in.

    Args:
        owner: The object whose method it is.
        name: The method.
        guard: Judges the step.
    """

    def __init__(self, owner: Any, name: str, guard: OverflowGuard) -> None:
        self._guard = guard
        super().__init__(owner, name, lambda *_, **__: True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            if self._before is not None:
                self._guard._parts.on_raised(error, ends=True)
            raise


# A method of a trainer that computes the loss, kept so that a replay can call it again.


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
        is_off = self._before is None or not torch.is_grad_enabled()
        if is_off or not self._is_kept(*args, **kwargs):
            return self.__wrapped__(*args, **kwargs)
        call = _Call(self, args, kwargs)
        # What the method takes out of its arguments is there for the next call.
        (own_args, own_kwargs), _ = copied_call(args, kwargs)
        names = argument_names(self.__wrapped__, len(args))
        given = dict(zip(names, own_args, strict=True))
        again = functools.partial(call, **given, **own_kwargs)
        return self._guard._parts.inputs.run(again, self._records_loss)

    @contextlib.contextmanager
    def unseen(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Switches logging off, and puts the owner's attributes back."""
        owner = self._owner
        kept = KeptObjects(opens=lambda value: value is owner)
        kept.add([("", owner)], _MOST_OBJECTS)
        try:
            for name in self._logs:
                vars(self._owner)[name] = _nothing
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
        self.__self__ = step._owner  # as of the method itself
        self.stands_for = step._owner  # which gives it the whole batch
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
