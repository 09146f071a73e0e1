"""The inputs of a step: what a training loop gives a model, held weakly."""

from __future__ import annotations

import cmath
import contextlib
import enum
import functools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from ... import _C
from ...scanner.modules import modules_in
from ...scanner.tensors import PLAIN, widened
from ...scanner.tree import (
    INDEX,
    OBJECTS_OF_STEP,
    Part,
    Path,
    Walk,
    at,
    layout,
    path_text,
)
from ...torch_internals.running import is_functional_call

_FEW = 4  # samples in a sentence; chosen
_HARMLESS = (
    *(str, bytes, int, float, complex, type(None), torch.layout, range, slice, type),
    *(enum.Enum, types.FunctionType, torch.Generator),
)
_NUMBERS = (float, complex)
_MAX_NUMBERS = 256  # values visited in the search for numbers that are not finite


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
        hidden += [
            path
            for path, of in walk.unknown_roots(_HARMLESS)
            if not issubclass(of, _HARMLESS) or _is_bound(args, kwargs, path, of)
        ]
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
        are_samples = is_batch_first(model) and share_first(
            held.tensor() for held in self.tensors.values()
        )
        return f"`{label}`{samples(self.find(label).unchanged(), are_samples)}"


def _is_bound(args: Any, kwargs: Any, path: Path, kind: type) -> bool:
    """True for a function that has variables or defaults which may hold tensors."""
    if kind is not types.FunctionType:
        return False
    first, rest = path[0], path[1:]
    function = at((args if first.style == INDEX else kwargs)[first.value], rest)
    own = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            own.append(cell.cell_contents)
    return any(layout(type(each)).may_hide for each in own)


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


# The batches that a trainer takes from its loader, held weakly.
#
# `training_step()` of a LightningModule is no forward: only the trainer knows its
# batch.


_MAX_BATCHES = 8  # the last ones; chosen, not measured


class LoopBatch:
    """One batch: its tensors by their places in it.

    Args:
        batch: The batch, in any nesting.
    """

    def __init__(self, batch: object) -> None:
        given = Given((batch,))
        self._is_whole = not given.unseen
        self._tensors = {
            f"batch{label.removeprefix('input[0]')}": held
            for label, held in given.tensors.items()
        }

    def place_of(self, tensor: torch.Tensor | None, is_batch_first: bool = True) -> str:
        """Finds the place of a tensor, or of its base, in the batch; "" if it has none.

        Incurs a CPU-GPU sync if it is there.

        Args:
            tensor: The tensor; None for none.
            is_batch_first: Whether no module has another dimension for the batch.
        """
        are_samples = is_batch_first and self._share_first()
        for is_same in (operator.is_, _shares_memory):
            for place, held in self._tensors.items():
                own = held.unchanged()
                if own is not None and is_same(own, tensor):
                    return f"`{place}`{samples(own, are_samples)}"
        return ""

    def bad_places(self, is_batch_first: bool = True) -> list[str] | None:
        """Lists the non-finite places of the batch; None if some cannot be checked.

        Incurs a CPU-GPU sync for each tensor on a device.

        Args:
            is_batch_first: Whether no module has another dimension for the batch.
        """
        places = []
        are_samples = is_batch_first and self._share_first()
        for place, held in self._tensors.items():
            tensor = held.unchanged()
            if tensor is None:
                return None
            if not is_plain(tensor):
                if tensor.is_floating_point() or tensor.is_complex():
                    return None
            elif not bool(finite_places(tensor).all()):
                places.append(f"`{place}`{samples(tensor, are_samples)}")
        return places if places or self._is_whole else None

    def _share_first(self) -> bool:
        return share_first(held.tensor() for held in self._tensors.values())


class LoopBatches:
    """The last batches, by the forwards that belong to them."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[int, LoopBatch | None]] = {}

    def note(self, number: int, num_calls: int, batch: LoopBatch | None) -> None:
        """Notes the batch of the forwards from a number on.

        Args:
            number: The number of the next forward.
            num_calls: How many calls of modules were recorded by now.
            batch: The batch; None for none.
        """
        # Calls with this number may belong to the batch that was noted before.
        is_ambiguous = self._batches.get(number, (num_calls,))[0] != num_calls
        self._batches[number] = (-1, None) if is_ambiguous else (num_calls, batch)
        if len(self._batches) > _MAX_BATCHES:
            del self._batches[next(iter(self._batches))]

    def of(self, number: int) -> LoopBatch | None:
        """Returns the batch of a forward, or None if it is not known."""
        numbers = [each for each in self._batches if each <= number]
        return self._batches[max(numbers)][1] if numbers else None


def _shares_memory(own: object, other: object) -> bool:
    if not is_plain(own) or not is_plain(other) or own.dtype != other.dtype:
        return False
    begin = own.untyped_storage().data_ptr()
    return begin != 0 and begin == other.untyped_storage().data_ptr()


# The inputs of a model's outermost forwards, kept until their step is judged.


class ForwardCapture(Protocol):
    """Keeps the outermost forwards of a step, for a replay."""

    def begin(self, module: Any, args: Any, kwargs: Any, has_stand_ins: bool) -> None:
        """Keeps the inputs of a forward; see `ForwardInputs.have_stand_ins`."""

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Keeps its output, and the loss that is in it."""

    def leave(self) -> None:
        """Keeps a forward that an exception has left."""

    def clear(self) -> None:
        """Forgets the step."""


class _OfThread(threading.local):
    """The forward that runs in a thread."""

    given = Given()
    running: tuple[object, object] = None, None
    has_stand_ins = False


class ForwardInputs:
    """The inputs of the last forwards, by the numbers of their batches.

    Args:
        is_listed: Keep inputs weakly, for the search for where a bad one came from.
        is_held: Keep the inputs themselves, for the evidence.

    Attributes:
        given: Their tensors, held weakly.
        batches: The inputs themselves.
        have_stand_ins: The batches in which other tensors stood in for the model's own
            (`functional_call`).
        loop_batches: The batches that the trainer took from its loader.
        capture: Keeps whole forwards for a replay; None for none.
        caller: The code that calls the models, in words.
    """

    def __init__(self, is_listed: bool, is_held: bool) -> None:
        self._is_listed = is_listed
        self._is_held = is_held
        self._now = _OfThread()
        self.given: dict[int, Given] = {}
        self.batches: dict[int, tuple[object, object]] = {}
        self.have_stand_ins: set[int] = set()
        self.loop_batches = LoopBatches()
        self.capture: ForwardCapture | None = None
        self.caller = "the training loop"

    def begin(self, module: object, args: object, kwargs: object) -> None:
        """Notes what a forward is given, before it can write to it."""
        now = self._now
        now.has_stand_ins = is_functional_call()
        if self.capture is not None:
            self.capture.begin(module, args, kwargs or {}, now.has_stand_ins)
        if self._is_listed:
            now.given = Given(args, kwargs)
        if self._is_held:
            now.running = args, kwargs

    def end(
        self,
        number: int,
        args: object,
        kwargs: object,
        output: object,
        loss: torch.Tensor | None = None,
    ) -> None:
        """Keeps the inputs of a forward that has returned, as those of a batch."""
        _keep(self.given, number, self._now.given)
        if self._now.has_stand_ins:
            self.have_stand_ins.add(number)
        if self._is_held:
            _keep(self.batches, number, (args, kwargs))
            self._now.running = None, None
        if self.capture is not None:
            self.capture.end(output, loss)

    def leave(self, number: int) -> None:
        """Keeps the inputs of a forward that an exception has left."""
        now = self._now
        _keep(self.given, number, now.given)
        if now.has_stand_ins:
            self.have_stand_ins.add(number)
        if self._is_held:
            _keep(self.batches, number, now.running)
            now.running = None, None
        if self.capture is not None:
            self.capture.leave()

    def end_step(self, is_over: bool) -> None:
        """Forgets the forwards that are kept for a replay.

        Args:
            is_over: No bad frame of the step is left: forget the inputs as well.
        """
        if self.capture is not None:
            self.capture.clear()
        if is_over:
            self.batches.clear()
            self.have_stand_ins.clear()
            self.given.clear()


def _keep(kept: dict[int, Any], number: int, value: object) -> None:
    kept[number] = value
    if len(kept) > _MAX_BATCHES:
        oldest, *_ = tuple(kept)  # other threads may keep theirs meanwhile
        kept.pop(oldest, None)
