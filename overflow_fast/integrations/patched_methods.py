"""Replaces methods of trainers until the guard is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..guard.guard import OverflowGuard

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

    Attributes:
        owner: The object.
        earlier: What stood in the object's own attribute before, or a mark for nothing.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., object]) -> None:
        self.__wrapped__: Any = getattr(owner, name)
        self.owner = owner
        self._name = name
        self._before: Callable[..., object] | None = before
        self.earlier = vars(owner).get(name, _NOTHING)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None and self._before(*args, **kwargs) is False:
            return None
        return self.__wrapped__(*args, **kwargs)

    @property
    def is_removed(self) -> bool:
        """True once it only passes calls on, where other code has wrapped it."""
        return self._before is None

    def remove(self) -> None:
        """Puts the former method back. Calling it again changes nothing."""
        self._before = None  # other code may have wrapped this object since
        attributes = vars(self.owner)
        if attributes.get(self._name) is not self:
            return
        earlier = self.earlier
        while isinstance(earlier, PatchedMethod) and earlier.is_removed:
            earlier = earlier.earlier
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
            if not self.is_removed:
                self._guard.on_raised(error)
            raise
