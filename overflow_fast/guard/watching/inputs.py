"""The inputs of a step: what a training loop gives a model, held weakly."""

from __future__ import annotations

import cmath
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch

from ... import _C
from ...base.modules import modules_in
from ...base.tensors import PLAIN, widened
from ...base.tree import INDEX, OBJECTS_OF_STEP, Part, Path, Walk, path_text

_FEW = 4  # samples in a sentence; chosen
_HARMLESS = (
    *(str, bytes, int, float, complex, type(None), torch.layout, range, slice, type),
    *(enum.Enum, types.FunctionType, torch.Generator),
)
_NUMBERS = (float, complex)
# Values visited in the search for numbers that are not finite: such a number behind
# them is not named among what may have made the first bad value.
_MAX_NUMBERS = 256


class WeakTensor(NamedTuple):
    """A tensor, held weakly, and its number of in-place writes at that time."""

    tensor: Callable[[], torch.Tensor | None]
    version: int | None

    def unchanged(self) -> torch.Tensor | None:
        """Returns the tensor; None if it is gone or may have been written to since."""
        tensor = self.tensor()
        if tensor is None or self.version is None:
            return None
        return tensor if _C.version_of(tensor) == self.version else None


def hold(tensor: torch.Tensor) -> WeakTensor:
    """Holds a tensor weakly, as it is now."""
    return WeakTensor(weakref.ref(tensor), _C.version_of(tensor))


class Given:
    """The inputs of a call: their tensors, held weakly, and what was not searched.

    Args:
        args: The positional inputs; None if they are not known.
        kwargs: The keyword inputs.

    Attributes:
        unseen: The labels of inputs that hold arrays, non-finite numbers, what may
            hold tensors and was not opened, or objects in which there was none: their
            code may make them.
    """

    def __init__(self, args: Any = None, kwargs: Any = None) -> None:
        args, kwargs = args or (), kwargs or {}
        self._held: list[tuple[Path, WeakTensor]] = []
        self.unseen: list[str] = []
        if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
            self._held.append(((Part(INDEX, 0),), hold(args[0])))  # most calls
            return
        walk = Walk((torch.Tensor, *numpy_types()), objects=OBJECTS_OF_STEP)
        walk.visit_call(args, kwargs)
        has_numbers = any(issubclass(each, _NUMBERS) for each in walk.leaves)
        hidden = _nonfinite_numbers(args, kwargs) if has_numbers else []
        hidden += [path for path, _ in walk.opaque]
        hidden += walk.unknown_roots(_HARMLESS)
        for path, found in walk.found:
            if isinstance(found, torch.Tensor):
                self._held.append((path, hold(found)))
            else:
                hidden.append(path)
        self.unseen = [f"input{path_text(p)}" for p in {p[:1]: p for p in hidden}]

    @functools.cached_property
    def tensors(self) -> dict[str, WeakTensor]:
        """The tensors by their labels, such as `input[0]['x']`."""
        return {f"input{path_text(path)}": held for path, held in self._held}

    def find(self, label: str) -> WeakTensor:
        """Returns the tensor of an input's label; one that is gone if there is none."""
        return self.tensors.get(label, WeakTensor(lambda: None, None))

    def place_of(self, label: str, model: torch.nn.Module | None) -> str:
        """Writes the place of an input and of what is non-finite in it.

        Incurs a CPU-GPU sync.

        Args:
            label: The input's label.
            model: The model that was given it.
        """
        own = self.find(label).unchanged()
        return f"`{label}`{samples(own, self.are_samples(model))}"

    def are_samples(self, model: torch.nn.Module | None) -> bool:
        """True if dimension 0 of the tensors is the batch, as far as that shows.

        Args:
            model: The model that was given them; None if it is not known.
        """
        return is_batch_first(model) and share_first(
            held.tensor() for held in self.tensors.values()
        )


def numpy_types() -> tuple[type, ...]:
    """NumPy's arrays and scalars; none where the program has not imported it."""
    numpy: Any = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray, numpy.generic)


def _nonfinite_numbers(args: Any, kwargs: Any) -> list[Path]:
    walk = Walk(_NUMBERS, most=_MAX_NUMBERS)
    walk.visit_call(args, kwargs)
    return [path for path, number in walk.found if not cmath.isfinite(number)]


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
    """True if tensors agree in dimension 0, and one has further dimensions.

    Args:
        tensors: Those of a batch; None for one that is gone.
    """
    shapes = [t.shape for t in tensors if t is not None and t.dim()]
    return len({shape[0] for shape in shapes}) == 1 and max(map(len, shapes)) > 1


def is_batch_first(model: torch.nn.Module | None) -> bool:
    """True if no module declares another dimension for the batch."""
    modules = [] if model is None else modules_in(model)
    return all(getattr(each, "batch_first", True) is not False for each in modules)


def is_mask(tensor: torch.Tensor | None) -> bool | None:
    """True if a tensor with -inf is a mask, 0 elsewhere; None if unknown."""
    if not is_plain(tensor):
        return None
    values = widened(tensor)
    return not bool((values[values.isfinite()] != 0).any())


def finite_places(tensor: torch.Tensor) -> torch.Tensor:
    """True where a value is finite: bool of the tensor's shape."""
    return widened(tensor).isfinite()


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """True if an object is a tensor whose elements can be read."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.is_floating_point()
    )
