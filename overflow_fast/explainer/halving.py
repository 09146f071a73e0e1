"""The search for one of many by halves: samples, modules, operations, elements."""

from __future__ import annotations

from collections.abc import Iterator


class Halving:
    """Narrows down where in a range the one is that is sought.

    Each half that is yielded is answered by `note()` before the next one.

    Args:
        num: The length of the range.

    Attributes:
        left: Where it may be.
    """

    def __init__(self, num: int) -> None:
        self.left = range(num)

    def __iter__(self) -> Iterator[range]:
        while len(self.left) > 1:
            yield self._half

    def note(self, is_within: bool) -> None:
        """Notes whether it is in the half that was yielded; else it is in the rest."""
        num = len(self._half)
        self.left = self.left[:num] if is_within else self.left[num:]

    @property
    def _half(self) -> range:
        return self.left[: len(self.left) // 2]

    @property
    def place(self) -> int:
        """The place where it is, once nothing else is left."""
        return self.left[0]
