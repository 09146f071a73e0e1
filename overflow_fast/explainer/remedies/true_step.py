"""The step in float64: what a remedy's loss and gradients are compared with.

A forward without a backward is good for its output alone: one that is finite and far
from what a wider dtype gives is as wrong as a nan, and harder to see. It is compared
with that of a run in float64, or in float32 where anything is half precision.

A mode casts what each torch call is given and returns to float64, and weights and the
batch are of it from the start, so that autograd's own operations are, too. Numbers are
drawn in the dtype that the program draws them in: the step has the same dropout masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.modules import tensors_of
from ...base.tensors import HALF
from ...base.text import dtype_name
from ...base.torch_ops import has, plain_name
from ...torch_internals.tensor_internals import pytree
from ..bounds import norm_of, tolerance
from ..calls import Call
from ..op_table import OpTable
from ..replayer import ReplayResult
from ..torch_calls import TorchCall, TorchCalls, tensors_among
from ..wider import CAST_METHODS, TO_FLOAT64, autocast_off, cast_all, run_wider
from .patches import InDtype, in_wider_memory

# What leaves a random share of its argument out, and is linear in it.
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")


@dataclass(frozen=True)
class InFloat64(InDtype):
    """The step in float64.

    Attributes:
        drawn: The dtypes that the program's calls draw numbers in, in order.
    """

    dtype: torch.dtype = torch.float64
    drawn: tuple[torch.dtype, ...] = ()

    @contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Patch`."""
        with in_wider_memory(models.values(), self.dtype), _Widening(self.drawn):
            yield


class _Widening(TorchCalls):
    """Runs torch calls in float64 while it is entered.

    Args:
        drawn: See `InFloat64`.
    """

    def __init__(self, drawn: Sequence[torch.dtype]) -> None:
        super().__init__()
        self._drawn = iter(drawn)

    def on_call(self, own: str, func: Any, args: Any, kwargs: Any) -> Any:
        """See `TorchCalls`; records none."""
        name = plain_name(own.rstrip("_") if not own.endswith("__") else own)
        if own in ("__get__", "__set__") or has(name, "tells"):
            return func(*args, **kwargs)
        if has(name, "random"):
            with autocast_off((args, kwargs)):
                result = self._random(name, own, func, args, kwargs)
            return cast_all(result, TO_FLOAT64)
        if own in CAST_METHODS.values():
            func = torch.Tensor.double
        if own != "__setitem__" and (not own.endswith("_") or own.endswith("__")):
            result = run_wider(func, args, kwargs, TO_FLOAT64)
            return cast_all(result, TO_FLOAT64)
        return run_wider(func, args[1:], kwargs, TO_FLOAT64, *args[:1])

    def _random(self, name: str, own: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that draws numbers, in the dtype that the program draws them in."""
        dtype = next(self._drawn)
        if not tensors_among((args, kwargs)):
            has_dtype = kwargs.get("dtype") is not None  # it may be that of a tensor
            return func(*args, **kwargs | ({"dtype": dtype} if has_dtype else {}))

        def narrowed(each: Any) -> Any:
            is_float = isinstance(each, torch.Tensor) and each.is_floating_point()
            return each.to(dtype) if is_float else each

        if name in _DROPOUTS:
            ones = torch.ones_like(args[0], dtype=dtype)
            return args[0] * func(ones, *args[1:], **kwargs)
        less, named = pytree.tree_map(narrowed, (args, kwargs))
        result = func(*less, **named)
        return args[0].copy_(result) if own.endswith("_") else result


def in_float64(table: OpTable) -> InFloat64 | None:
    """The patch for a step; None where float64 would draw other numbers.

    Args:
        table: Its operations and torch calls.
    """
    drawing = {op.torch_call for op in table.ops if has(op.base, "random")}
    own = [call for call in table.torch_calls if has(call.name, "random")]
    if not drawing <= set(own):  # within a larger call, or none of the program's
        return None
    return InFloat64(drawn=tuple(map(_drawn_in, own)))


def _drawn_in(call: TorchCall) -> torch.dtype:
    """The dtype that a call draws numbers in; without tensors that of its result."""
    is_given = call.inputs or not call.results
    return call.dtype if is_given else call.results[0].dtype


# What a remedy comes to beside it.


# Of the loss, by the norm of the weights: smaller gradients are what terms that cancel
# leave. Too large takes a flat loss for one that has no slope in float64 either.
_CANCELLED = 1e-4
# Times the tolerance, for each of their sums is rounded. Too small says of remedies
# that they miss gradients which they have.
_OF_GRADIENTS = 5.0


@dataclass(frozen=True)
class Truth:
    """The loss and the gradients of a step in float64.

    Attributes:
        losses: The losses, one of each micro-batch.
        gradients: The gradients of the parameters, by their names.
        near: The relative difference that rounding explains.
        least: The norm below which gradients are what terms that cancel leave, by the
            loss and the norm of the weights.
        has_slopes: Whether the gradients are right, too: not where numbers that are
            equal in the step meet, as of a kink each side has its own.
    """

    losses: Sequence[float]
    gradients: Mapping[str, torch.Tensor]
    near: float
    least: float = 0.0
    has_slopes: bool = True

    @classmethod
    def of(
        cls,
        result: ReplayResult,
        losses: Sequence[float],
        calls: Sequence[TorchCall],
        weights: Iterable[torch.Tensor],
        has_slopes: bool,
    ) -> Truth | None:
        """Makes the truth of a replay in float64; None where that is not finite."""
        if result.error is not None or not result.is_clean or not losses:
            return None
        size = norm_of(weights)
        dtypes = {v.dtype for call in calls for v in (*call.inputs, *call.results)}
        least = _CANCELLED * abs(mean_of(losses)) / size if size else 0.0
        return cls(losses, result.gradients, tolerance(dtypes), least, has_slopes)

    @property
    def loss(self) -> float:
        """The loss; the mean of those of micro-batches."""
        return mean_of(self.losses)

    @property
    def is_flat(self) -> bool:
        """True if the gradients are 0 but for rounding."""
        return norm_of(self.gradients.values()) <= self.least

    def fits(self, dtype: torch.dtype) -> bool:
        """True if a dtype holds the loss and the gradients."""
        largest = torch.finfo(dtype).max
        sizes = [float(e.abs().max()) for e in self.gradients.values() if e.numel()]
        return max(abs(self.loss), *sizes) < largest

    def compared(
        self,
        loss: float | None,
        result: ReplayResult,
        usual: float | None,
        own: Sequence[float] = (),
    ) -> dict[str, Any]:
        """The fields of a remedy that say how far it misses the truth.

        Args:
            loss: The loss with it.
            result: The replay with it, of the step or its first micro-batches.
            usual: The median loss of the steps before; None if there is none. Far below
                it, a loss is what terms that cancel leave.
            own: The losses of the step without the remedy, where they are finite.
        """
        if loss is None:
            return {}
        dtype, num = result.losses[0].dtype, len(result.losses)
        true = mean_of(self.losses[:num])
        if abs(true) > torch.finfo(dtype).max:  # which no remedy comes to
            return {"true_loss": true, "misses": "loss"}
        # A loss far below the usual one is what terms that cancel leave.
        least = self.near * (1.0 if usual is None else usual)
        if len(own) == num:  # of a loss no remedy keeps more than the step itself
            least = max(least, abs(mean_of(own) - true) / self.near)
        error = abs(loss - true) / (max(abs(true), least) or 1.0)
        moved = None
        if num == len(self.losses) and self.has_slopes:
            moved = distance(result.gradients, self.gradients, self.least)
        misses = error > self.near
        are_off = moved is not None and moved > _OF_GRADIENTS * self.near
        if not misses and are_off and self.fits(dtype):
            return {"true_loss": true, "error": moved, "misses": "gradients"}
        what = "loss" if misses else ""
        return {"true_loss": true, "error": error, "misses": what}


def mean_of(losses: Sequence[float]) -> float:
    """The mean of losses."""
    return sum(losses) / len(losses)


def distance(
    changed: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    least: float = 0.0,
) -> float | None:
    """The norm of the difference of gradients, relative to that of the second ones.

    Args:
        changed: The first ones.
        plain: The second ones.
        least: A norm to take in place of one that is smaller.
    """
    if changed.keys() != plain.keys():
        return None
    error = norm_of(changed[k].double() - plain[k].double() for k in plain)
    norm = max(norm_of(plain.values()), least)
    return error / norm if norm > 0 and math.isfinite(error) else None


def is_half(calls: Iterable[Call], models: Iterable[nn.Module]) -> bool:
    """True if anything of a step is half precision: weights, batches or autocast."""
    calls = list(calls)
    return (
        any(t.dtype in HALF for model in models for t in tensors_of(model))
        or any(t.dtype in HALF for call in calls for _, t in call.leaves())
        or any(is_on for call in calls for _, is_on, _ in call.ambient.autocast)
    )


def compared_output(
    own: Sequence[torch.Tensor],
    true: Sequence[torch.Tensor],
    wide: torch.dtype,
    dtypes: Iterable[torch.dtype],
) -> dict[str, Any]:
    """The fields of a remedy that say how far the output of a forward is off.

    That is the largest relative L2 difference of a tensor, and inf for another shape,
    such as that of other boxes that are kept.

    Args:
        own: The tensors of the output with it.
        true: Those of the run in a wider dtype; none where that is not known.
        wide: That dtype.
        dtypes: Those that the remedy itself runs in.
    """
    off = None
    if len(own) == len(true):
        pairs = list(zip(own, true, strict=True))
        is_alike = all(one.shape == other.shape for one, other in pairs)
        found = [_output_distance(*each) for each in pairs] if is_alike else [math.inf]
        off = None if any(map(math.isnan, found)) else max(found, default=None)
    is_far = off is not None and off > tolerance(dtypes)
    misses = "output" * is_far
    return {"error": off, "misses": misses, "compared_with": dtype_name(wide)}


def _output_distance(own: torch.Tensor, true: torch.Tensor) -> float:
    own, true = own.double(), true.double()
    # What a mask leaves at -inf, in both, is no difference.
    is_same = own == true
    error = torch.where(is_same, 0.0, own - true).norm()
    norm = torch.where(is_same & true.isinf(), 0.0, true).norm()
    return float(error / norm) if float(norm) > 0 else float(error)
