"""Shares the code of the callbacks of all trainers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from ..guard.guard import OverflowGuard
from ..guard.options import reusable


class GuardOwner:
    """Makes a guard for each training.

    Several ranks decide together, unless the policy is to warn or `process_group` is
    False. A copy or a pickle keeps the arguments, and has no guard until it is used in
    a training of its own.

    Args:
        learn: The number of clean steps, in each training, to learn from which values
            are non-finite by design; see `OverflowGuard.learn()`. None for none.
        arguments: Arguments of `OverflowGuard` but the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, switched off when that is over, or None
            before the first.

    Raises:
        TypeError, ValueError: If an argument cannot be used.
    """

    def __init__(self, *, learn: int | None = None, **arguments: Any) -> None:
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

    def remove_guard(self) -> None:
        """Removes the guard, after its last verdict."""
        if self.guard is not None:
            self.guard.remove()


def decided_by_all_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a guard's arguments, with the group of all ranks if none is given.

    A trainer's ranks train one model, which shows in no parameter while it is not
    wrapped yet, nor where the stages of a pipeline share none.
    """
    is_initialized = dist.is_available() and dist.is_initialized()
    if not is_initialized or arguments.get("process_group") is not None:
        return arguments
    acts = arguments.get("on_overflow") != "warn"
    return {**arguments, "process_group": dist.group.WORLD if acts else None}


def check_before_saving(guard: OverflowGuard) -> None:
    """Raises `NonFiniteError` if the guard is on and the state is not finite.

    Call it on every rank, before a file is written, or removed to make room. Incurs a
    CPU-GPU sync for each device.
    """
    has_model = any(watch.model is not None for watch in guard._loop.watches)
    if guard.enabled and has_model:
        guard.assert_finite_state(joint=True)


# Replaces methods of trainers until the guard is removed.


_NOTHING = object()


class StandIn:
    """Stands in for a method of an object, as the object's attribute, until removed.

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
        while isinstance(earlier, StandIn) and earlier._before is None:
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
