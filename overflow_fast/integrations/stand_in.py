"""Replaces methods of trainers until the guard is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
