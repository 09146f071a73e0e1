"""What is tried: changes of a replay, as data that every rank can make for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..places import names_of
from .line_edit import CodePlace, edited_code
from .module_changes import in_bfloat16, in_float32, with_weights

_Models = Mapping[str, nn.Module]


class Change(Protocol):
    """A change that is made while a step is replayed. It can be pickled."""

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """Makes the change while it is entered; undoes it bit for bit.

        Args:
            models: The models, by what their modules' names begin with.
        """


@dataclass(frozen=True)
class LineChange:
    """Functions run the code of an edited file.

    Attributes:
        place: Which code.
        text: The edited file.
    """

    place: CodePlace
    text: str

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        return edited_code(self.place, self.text)


@dataclass(frozen=True)
class Float32Modules:
    """Modules run in float32.

    Attributes:
        names: Their names within the one model.
        until: See `keep_in_fp32`; None for none.
    """

    names: tuple[str, ...]
    until: tuple[str, ...] | None = None

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        (model,) = models.values()
        return in_float32(model, self.names, self.until)


@dataclass(frozen=True)
class Bfloat16:
    """What is float16, by weights or by autocast, is bfloat16."""

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        return in_bfloat16(models.values())


@dataclass(frozen=True)
class ScaledWeights:
    """Weights are multiplied.

    Attributes:
        factors: By how much, by their names.
    """

    factors: Mapping[str, float]

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Change`."""
        named = {name: tensor for _, name, tensor in names_of(models)}
        scaled = {
            name: named[name].detach() * factor for name, factor in self.factors.items()
        }
        with with_weights(named, scaled):
            yield


@dataclass(frozen=True)
class OtherWeights:
    """Weights have other values.

    Attributes:
        values: The values, by the names of the weights.
    """

    values: Mapping[str, torch.Tensor]

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        named = {name: tensor for _, name, tensor in names_of(models)}
        return with_weights(named, self.values)
