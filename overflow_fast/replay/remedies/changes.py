"""Changes that are tried on a step, as data that every rank can make for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ...core.eagerly import run_eagerly
from ..change import Change
from ..kept_call import KeptCall
from ..parts import part_of
from ..places import names_of
from .line_edit import CodePlace, edited_code
from .module_changes import in_bfloat16, in_float32, with_weights

_Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class LineChange(Change):
    """The replay runs the code of an edited file.

    Attributes:
        places: Which code of the file.
        text: The edited file; see `edited_code`.
    """

    places: tuple[CodePlace, ...]
    text: str

    @property
    def file(self) -> str:
        """The file."""
        return self.places[0].file

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        return edited_code(self.places, self.text)


@dataclass(frozen=True)
class Changes(Change):
    """Several changes at once.

    Attributes:
        parts: The changes; of each file one at most.
    """

    parts: tuple[Change, ...]

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Change`."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.applied(models))
            yield

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        for part in self.parts:
            calls = part.calls(calls)
        return list(calls)


@dataclass(frozen=True)
class Float32Modules(Change):
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
class Bfloat16(Change):
    """Uses bfloat16 in place of float16, in weights, batches and autocast."""

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        return in_bfloat16(models.values())

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        return [call.with_batch(_as_bfloat16) for call in calls]


@dataclass(frozen=True)
class ScaledWeights(Change):
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
class OtherWeights(Change):
    """Weights have other values.

    Attributes:
        values: The values, by the names of the weights.
    """

    values: Mapping[str, torch.Tensor]

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        named = {name: tensor for _, name, tensor in names_of(models)}
        return with_weights(named, self.values)


@dataclass(frozen=True)
class SomeSamples(Change):
    """A call's batch has some of its samples alone.

    Attributes:
        place: The call's place.
        rows: The samples that it has.
    """

    place: int
    rows: tuple[int, ...]

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        return [
            part_of(call, self.rows) if place == self.place else call
            for place, call in enumerate(calls)
        ]


@dataclass(frozen=True)
class ScaledGradients(Change):
    """Backward begins with other gradients.

    Attributes:
        factor: By how much they are multiplied.
    """

    factor: float

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        return [
            call.with_held({p: held * self.factor for p, held in call.held.items()})
            for call in calls
        ]


@dataclass(frozen=True)
class Eagerly(Change):
    """Compiled code runs eagerly: it may have been compiled without a change.

    Attributes:
        change: The change, which is made too.
    """

    change: Change

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Change`."""
        with run_eagerly(), self.change.applied(models):
            yield

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        return self.change.calls(calls)


@dataclass(frozen=True)
class FromLoss(Change):
    """Backward begins at the losses that are returned, and nowhere else.

    Attributes:
        change: Another change, which is made too; None for none.
    """

    change: Change | None = None

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Change`."""
        return (self.change or Change()).applied(models)

    def calls(self, calls: Sequence[KeptCall]) -> list[KeptCall]:
        """See `Change`."""
        changed = (self.change or Change()).calls(calls)
        return [call.with_held({}) for call in changed]


def _as_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float16:
        return tensor
    copy = tensor.detach().bfloat16()
    return copy.requires_grad_() if tensor.requires_grad else copy
