"""The inputs that a training loop gives a model: held weakly, searched late."""

from __future__ import annotations

import cmath
import dataclasses
import enum
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from .. import _C
from ..torch_internals.tensor_internals import version_of

_MAX_DEPTH = 4
_FEW = 4
_MAX_ITEMS = 64
_HARMLESS = (
    *(str, bytes, int, type(None), torch.dtype, torch.device, torch.layout, range),
    *(slice, type, enum.Enum, types.FunctionType, torch.Generator),
)
_UNSEEN = object()


class Held(NamedTuple):
    """A tensor, held weakly, and its number of in-place writes at that time."""

    tensor: Callable[[], torch.Tensor | None]
    version: int | None

    def unchanged(self) -> torch.Tensor | None:
        """Returns the tensor; None if it is gone or may have been written to since."""
        tensor = self.tensor()
        if tensor is None or self.version is None or version_of(tensor) != self.version:
            return None
        return tensor


# The positional and the keyword inputs of a call, as `weakly()` holds them.
Given = tuple[Any, Any]


def hold(tensor: torch.Tensor) -> Held:
    """Holds a tensor weakly, as it is now."""
    version = None if tensor.is_inference() else version_of(tensor)
    return Held(weakref.ref(tensor), version)


def weakly(value: object, depth: int = 0) -> Any:
    """Returns the tensors of a nesting as `Held`, in dicts and lists like it.

    Other objects that may hold values are marked: they are not searched.
    """
    if isinstance(value, torch.Tensor):
        return hold(value)
    if isinstance(value, _HARMLESS) or _is_finite_number(value):
        return None
    if depth == _MAX_DEPTH:
        return _UNSEEN
    # The types' own methods: those of subclasses may do anything.
    if isinstance(value, dict):
        return {key: weakly(each, depth + 1) for key, each in dict.items(value)}
    if isinstance(value, (list, tuple)):
        few = itertools.islice(value, _MAX_ITEMS)
        return [weakly(each, depth + 1) for each in few]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {n: weakly(getattr(value, n, None), depth + 1) for n in names}
    return _UNSEEN


def _is_finite_number(value: object) -> bool:
    """Returns whether a value is a finite number of Python."""
    return isinstance(value, (float, complex)) and cmath.isfinite(value)


def unseen(given: Given) -> list[str]:
    """Lists the inputs of a call that were not searched: objects, arrays, nan."""
    args, kwargs = given
    labels = {f"input[{i}]": each for i, each in enumerate(args or [])}
    labels |= {f"input.{key}": each for key, each in (kwargs or {}).items()}
    return [label for label, each in labels.items() if _holds_unseen(each)]


def _holds_unseen(held: object) -> bool:
    if isinstance(held, dict):
        return any(map(_holds_unseen, held.values()))
    if isinstance(held, list):
        return any(map(_holds_unseen, held))
    return held is _UNSEEN


def find(given: Given, label: _C.Label) -> Held:
    """Returns the tensor of an input's label.

    Args:
        given: The inputs of the call.
        label: The label.
    """
    args, kwargs = given
    is_by_name = bool(label.parts) and label.parts[0].style != _C.LabelStyle.INDEX
    found: Any = kwargs if is_by_name else args
    for part in label.parts:
        try:
            found = found[part.value]
        except (KeyError, IndexError, TypeError):
            break
    return found if isinstance(found, Held) else Held(lambda: None, None)


def samples(tensor: torch.Tensor | None, are_samples: bool) -> str:
    """Names the entries of a tensor's first dimension that are non-finite, unless all.

    Incurs a CPU-GPU sync.

    Args:
        tensor: The tensor; None for none.
        are_samples: False if the first dimension is known not to be the batch.
    """
    if not is_plain(tensor) or tensor.dim() == 0 or len(tensor) < 2:
        return ""
    bad = ~finite_places(tensor)
    places = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    found = places.nonzero().flatten().tolist()
    if not found or len(found) == len(tensor):
        return ""
    shown = ", ".join(map(str, found[:_FEW])) + " ..." * (len(found) > _FEW)
    if are_samples:
        return f", sample{'s' * (len(found) > 1)} {shown} of {len(tensor)} (from 0)"
    word = "indices" if len(found) > 1 else "index"
    return f", {word} {shown} of {len(tensor)} in dimension 0 (from 0)"


def share_first(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether tensors agree in dimension 0, and one has further dimensions.

    Args:
        tensors: Those of a batch; None for one that is gone.
    """
    shapes = [t.shape for t in tensors if t is not None and t.dim()]
    return len({shape[0] for shape in shapes}) == 1 and max(map(len, shapes)) > 1


def is_batch_first(model: torch.nn.Module | None) -> bool:
    """Returns whether no module declares another dimension for the batch."""
    modules = [] if model is None else model.modules()
    return all(getattr(each, "batch_first", True) is not False for each in modules)


def tensors_in(held: object) -> Iterator[torch.Tensor | None]:
    """Yields the tensors in a result of `weakly()`; None for those that are gone."""
    if isinstance(held, Held):
        yield held.tensor()
    elif isinstance(held, (dict, list, tuple)):
        for each in held.values() if isinstance(held, dict) else held:
            yield from tensors_in(each)


def is_mask(tensor: torch.Tensor | None) -> bool | None:
    """Returns whether a tensor with -inf is a mask, 0 elsewhere; None if unknown."""
    if not is_plain(tensor):
        return None
    values = _wide(tensor)
    return not bool((values[values.isfinite()] != 0).any())


def finite_places(tensor: torch.Tensor) -> torch.Tensor:
    """Tells of each value whether it is finite: bool of the tensor's shape."""
    return _wide(tensor).isfinite()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that has all operations: float8 has few."""
    values = tensor.detach()
    is_float8 = values.is_floating_point() and values.itemsize == 1
    return values.float() if is_float8 else values


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Returns whether an object is a tensor whose elements can be read."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.is_floating_point()
    )
