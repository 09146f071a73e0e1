"""One call of a step, with what it takes to make it again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.tensors import has_memory, loss_in
from ..torch_internals.compiler import uncompiled
from ..torch_internals.tensor_internals import version_of
from ..tree import CALL_DEPTH, Path, mapped, path_text, tensors, tensors_in
from .ambient import Ambient as Ambient
from .functions import Captured
from .kinds import is_float

_MAX_HELD_BYTES = 2**26
_NUM_SAMPLED = 64  # values of a tensor that is compared with itself later


class KeptCall:
    """One call that can be made again: of the model, or of a function that calls it.

    Attributes:
        function: Takes the batch, and returns what the call returned.
        batch: What it is called with, in any nesting.
        ambient: What was set when it began.
        held: The gradients of what it returned, by their places among its tensors.
        not_held: How many bytes of gradients were too many to be held; 0 for none.
        returns_loss: Whether backward is called on what it returned.
        is_part_of_compiled: Whether it ran in code that was compiled together with
            others', and runs eagerly when it is called alone.
        has_stand_ins: Whether other tensors stood in for the model's own weights, and
            do not when it is called again.
    """

    def __init__(
        self, function: Callable[[Any], Any], batch: Any, ambient: Ambient
    ) -> None:
        self.function = function
        self.batch = batch
        self.ambient = ambient
        self.held: dict[int, torch.Tensor] = {}
        self.not_held = 0
        self.returns_loss = False
        self.is_part_of_compiled = False
        self.has_stand_ins = False
        self._is_overwritten: bool | None = None
        found = tensors_in(batch, CALL_DEPTH)
        self._versions = [(t, _version(t), _sample(t)) for t in found]

    @property
    def awaits_backward(self) -> bool:
        """Tells whether no gradient has come to what it returned so far."""
        return not self.held and not self.not_held

    @property
    def caller(self) -> int:
        """Which model it is of; 0 for a function that calls them."""
        return 0

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch with their places, such as `batch['x']`."""
        return [
            (f"{name}{path_text(path)}", tensor) for name, path, tensor in self.places()
        ]

    def places(self) -> Iterator[tuple[str, Path, torch.Tensor]]:
        """Yields the variable, the path in it and the tensor, for the whole batch."""
        for name, value in self.variables().items():
            for path, tensor in tensors(value):
                yield name, path, tensor

    def variables(self) -> dict[str, Any]:
        """The values that make up the batch, by the names that code has for them."""
        is_captured = isinstance(self.function, Captured)
        return self.batch if is_captured else {"batch": self.batch}

    def around(self) -> dict[str, Any]:
        """The variables besides the batch that its function reads, by their names."""
        function = self.function
        return function.around if isinstance(function, Captured) else {}

    def note_overwritten(self) -> None:
        """Keeps the answer of `is_overwritten()`: a replay may write, too."""
        self._is_overwritten = self.is_overwritten()

    def with_own_batch(self) -> KeptCall:
        """The same call with a copy of its batch, for code that writes to it."""
        return self.with_batch(_as_copy)

    def with_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KeptCall:
        """The same call with another tensor in place of each of its batch's."""
        batch = mapped(self.batch, change, CALL_DEPTH)
        copy = type(self)(self.function, batch, self.ambient)
        copy.returns_loss, copy.held = self.returns_loss, self.held
        return copy

    def with_held(self, held: dict[int, torch.Tensor]) -> KeptCall:
        """The same call, whose output gets other gradients."""
        copy = type(self)(self.function, self.batch, self.ambient)
        copy.returns_loss, copy.held = self.returns_loss, held
        return copy

    def is_overwritten(self) -> bool:
        """Tells whether the batch was written to since.

        Writes that torch does not count, as through NumPy, are seen on the CPU alone,
        if they change one of a few values.
        """
        if self._is_overwritten is not None:
            return self._is_overwritten
        return any(
            _version(tensor) != before or not _is_equal(_sample(tensor), sample)
            for tensor, before, sample in self._versions
        )

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor of the batch was written to since, by torch."""
        before = [version for each, version, _ in self._versions if each is tensor]
        return any(_version(tensor) != version for version in before)

    def hold_gradients(self, output: Any) -> None:
        """Holds the gradients of the output, by reference, once they are there.

        Of a loss if there is one, else of all tensors up to a size.
        """
        loss = loss_in(output)
        self.returns_loss = loss is not None
        asked = [
            (place, tensor)
            for place, tensor in enumerate(tensors_in(output))
            if (loss is None or tensor is loss) and tensor.grad_fn is not None
        ]
        size = sum(tensor.nbytes for _, tensor in asked)
        if size > _MAX_HELD_BYTES:
            self.not_held = size
            return
        for place, tensor in asked:
            hook = functools.partial(_hold, self.held, place)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


class ModelCall(KeptCall):
    """A kept call of a model, with its positional and its keyword arguments.

    Attributes:
        follows_others: Whether the loop had outputs of other forwards by then, whose
            backward had not come: it may have computed the arguments from them.
    """

    follows_others = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: tuple[tuple[Any, ...], dict[str, Any]],
        ambient: Ambient,
    ) -> ModelCall:
        """Makes the call of a model with its arguments."""
        return cls(functools.partial(call_model, model), batch, ambient)

    @property
    def caller(self) -> int:
        """Which model it is of."""
        function: Any = self.function
        return id(function.args[0])

    def variables(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        return self.around()

    def around(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        function: Any = self.function
        args, kwargs = self.batch
        names = parameter_names(uncompiled(function.args[0]).forward)
        names += [f"input[{i}]" for i in range(len(names), len(args))]
        return {**dict(zip(names, args, strict=False)), **kwargs}


def _as_copy(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not has_memory(tensor):
        return tensor
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and is_float(tensor) else copy


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none if it does not tell."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _hold(held: dict[int, torch.Tensor], place: int, gradient: torch.Tensor) -> None:
    held[place] = gradient


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """A few values of a tensor on the CPU, evenly spaced; None elsewhere."""
    is_plain = type(tensor) is torch.Tensor and has_memory(tensor)
    if not is_plain or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    values = tensor.detach().view(-1)
    return values[:: max(1, len(values) // _NUM_SAMPLED)].clone()


def _is_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Tells whether two samples have the same bits."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def call_model(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = mapped(batch, _as_leaf, CALL_DEPTH, anew=True)
    return model(*args, **kwargs)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that another model made, without the graph of how it was made."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def loss_and_gradients(call: KeptCall, output: Any) -> list[tuple[Any, Any]]:
    """The tensors that backward begins at, with their gradients.

    Args:
        call: The kept call.
        output: What it returned now.
    """
    tensors = tensors_in(output)
    if call.held:
        places = [place for place in call.held if place < len(tensors)]
        return [(tensors[place], call.held[place]) for place in places]
    loss = loss_in(output)
    loss = tensors[0] if loss is None and call.returns_loss and tensors else loss
    if loss is None or not loss.requires_grad or not is_float(loss):
        return []
    return [(loss, torch.ones_like(loss))]
