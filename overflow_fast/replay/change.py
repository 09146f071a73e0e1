"""A change that is made while a step is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from .capture import KeptCall


class Change:
    """Changes nothing; subclasses do. It can be pickled, for other ranks to make it."""

    def applied(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Makes the change while it is entered; undoes it bit for bit.

        Args:
            models: The models, by what their modules' names begin with.
        """
        return nullcontext()

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """The calls to run in place of those of the step."""
        return list(calls)
