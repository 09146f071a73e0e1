"""Patches that are tried on a step, as data that every rank can make for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ...base.modules import tensors_of
from ...guard.process import has_process_group
from ...precision.keep_in_fp32 import keep_in_fp32
from ...torch_internals.compiled_calls import uncompiled_calls
from ..calls import Call, batch_size, part_of
from ..named_tensors import state_by_name
from ..replayer import Patch
from ..wider import CASTS, WiderAutocast, cast, cast_leaf

# Changes of precision and of weights that are undone bit for bit.


@contextmanager
def with_data(changes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Gives parameters and buffers other memory, and then their own again.

    The tensors themselves stay in place, so that hooks on them run, and code computes
    with the other values, too, that has them in a list or a closure.

    Args:
        changes: The parameters and buffers, each with what it is to hold.

    Raises:
        RuntimeError: If memory of another dtype would cut hooks off.
    """
    changes = list(changes)
    _require_unheld(each for each, new in changes if each.dtype != new.dtype)
    kept = [(tensor, tensor.data) for tensor, _ in changes]
    try:
        for tensor, new in changes:
            if not _holds(tensor, new):
                tensor.data = new
        yield
    finally:
        for tensor, data in kept:
            if not _holds(tensor, data):
                if tensor.is_leaf:
                    tensor.grad = None  # of the trial; those of the step are set aside
                tensor.data = data


def _holds(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return tensor.dtype == data.dtype and tensor.data_ptr() == data.data_ptr()


def in_wider_memory(
    models: Iterable[nn.Module], dtype: torch.dtype
) -> AbstractContextManager[None]:
    """Gives narrower parameters and buffers memory of a dtype; see `with_data()`."""
    tensors = [each for model in models for each in tensors_of(model)]
    return with_data((each, cast(each.data, CASTS[dtype])) for each in tensors)


def _require_unheld(tensors: Iterable[torch.Tensor]) -> None:
    # torch drops a parameter's accumulator when its dtype changes. A wrapper that
    # reduces gradients, such as DDP or Megatron's, has hooks on the one that was there.
    if has_process_group() and any(map(_is_held, tensors)):
        raise RuntimeError("other code may have hooks on the weights' gradients")


def _is_held(tensor: torch.Tensor) -> bool:
    """True if anything keeps a parameter's gradient accumulator: hooks, or a loss."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    mark = "overflow_fast"
    first: Any = get_gradient_edge(tensor).node
    first.metadata[mark] = True
    del first  # and with it the mark, unless the node is held
    again: Any = get_gradient_edge(tensor).node
    return bool(again.metadata.pop(mark, False))


_Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Float32Modules(Patch):
    """Modules run in float32, as `keep_in_fp32` does; their weights are cast back.

    Attributes:
        prefix: What the names of their model's modules begin with.
        names: Their names within the model.
        until: See `keep_in_fp32`; None for none.
    """

    prefix: str
    names: tuple[str, ...]
    until: tuple[str, ...] | None = None

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Patch`."""
        model = models[self.prefix]
        tensors = tensors_of(model)
        _require_unheld(tensors)
        own = [(tensor, tensor.data) for tensor in tensors]
        with with_data(own), keep_in_fp32(model, self.names, self.until):
            yield


@dataclass(frozen=True)
class InDtype(Patch):
    """Uses a wider dtype in weights, batches and autocast.

    Weights change for all threads; autocast in those alone that work for this one.

    Attributes:
        dtype: bfloat16 in place of float16, or float32 in place of both.
    """

    dtype: torch.dtype

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Patch`."""
        wider = in_wider_memory(models.values(), self.dtype)
        with wider, WiderAutocast(self.dtype):
            yield

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        casts = CASTS[self.dtype]
        return [call.with_batch(lambda each: cast_leaf(each, casts)) for call in calls]


@dataclass(frozen=True)
class ScaledWeights(Patch):
    """Weights are multiplied.

    Attributes:
        factors: By how much, by their names.
    """

    is_same_step = False
    factors: Mapping[str, float]

    @contextmanager
    def applied(self, models: _Models) -> Iterator[None]:
        """See `Patch`."""
        named = state_by_name(models)
        with with_data(
            (named[name], named[name].detach() * factor)
            for name, factor in self.factors.items()
        ):
            yield


@dataclass(frozen=True)
class OtherWeights(Patch):
    """Weights have other values.

    Attributes:
        values: The values, by the names of the weights.
    """

    is_same_step = False
    values: Mapping[str, torch.Tensor]

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Patch`."""
        named = state_by_name(models)
        return with_data(
            (own, self.values[name].to(own.device, own.dtype, copy=True))
            for name, own in named.items()
            if name in self.values
        )


@dataclass(frozen=True)
class OtherCall(Patch):
    """One call is run in place of those of the step.

    Attributes:
        call: The call.
    """

    call: Call

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return [self.call.with_own_batch()]


def _with_changed(
    calls: Sequence[Call], place: int, change: Callable[[Call], Call]
) -> list[Call]:
    return [change(call) if i == place else call for i, call in enumerate(calls)]


@dataclass(frozen=True)
class SomeSamples(Patch):
    """One call's batch has some of its samples alone.

    Attributes:
        place: The call's place.
        rows: The samples that it has.
    """

    is_same_step = False
    place: int
    rows: tuple[int, ...]

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return _with_changed(calls, self.place, lambda call: part_of(call, self.rows))


@dataclass(frozen=True)
class FiniteSamples(Patch):
    """Each call's batch has those of its samples alone that are finite in one tensor.

    Attributes:
        name: The tensor's name; a call without it stays as it is.
    """

    is_same_step = False
    name: str

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return [self._changed(call) for call in calls]

    def _changed(self, call: Call) -> Call:
        tensor, size = dict(call.leaves()).get(self.name), batch_size(call)
        if tensor is None or size is None or not tensor.dim():
            return call
        rows = finite_rows(tensor)
        return call if len(rows) == size else part_of(call, rows)


def finite_rows(tensor: torch.Tensor) -> list[int]:
    """The places in dimension 0 at which a tensor is finite."""
    is_finite = tensor.detach().isfinite().reshape(len(tensor), -1).all(1)
    return list[int](is_finite.nonzero().flatten().tolist())


@dataclass(frozen=True)
class ChangedTensor(Patch):
    """One tensor of one call's batch has other numbers.

    Attributes:
        place: The call's place.
        name: The tensor's name.
        low: The least number, in place of those below.
        high: The largest one; None for any.
        without: A number that becomes 0 instead; None to clamp.
    """

    is_same_step = False
    place: int
    name: str
    low: float | None = None
    high: float | None = None
    without: float | None = None

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return _with_changed(calls, self.place, self._changed)

    def _changed(self, call: Call) -> Call:
        own = dict(call.leaves())[self.name]
        if self.without is None:
            new = own.clamp(self.low, self.high)
        else:
            new = own.masked_fill(own == self.without, 0)
        return call.with_batch(lambda each: new if each is own else each)


@dataclass(frozen=True)
class Eagerly(Patch):
    """Compiled code runs eagerly: it may have been compiled without another patch."""

    def applied(self, models: _Models) -> AbstractContextManager[object]:
        """See `Patch`."""
        return uncompiled_calls()


@dataclass(frozen=True)
class FromLoss(Patch):
    """Backward begins at the losses that are returned, and nowhere else."""

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return [call.again(call.batch, {}) for call in calls]


@dataclass(frozen=True)
class Repeated(Patch):
    """The calls are run several times, each with the state that the last one has left.

    Attributes:
        num: How often.
    """

    num: int
    is_same_step = False

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        return [*calls] * self.num
