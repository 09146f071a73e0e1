"""The calls of a step, made so that they can be made again, whole or in part."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..base.losses import loss_in, model_loss_in
from ..base.modules import named_modules
from ..base.tensors import has_memory
from ..base.tree import CALL_DEPTH, NotRebuilt, Path, mapped, tensors, tensors_in
from ..guard.kept_calls.function_marks import marks_of
from ..guard.kept_calls.held_function import HeldFunction, argument_names
from ..guard.kept_calls.kept_call import KeptCall
from ..torch_internals.compiler import uncompiled
from .leaves import name_in_code
from .tensor_kinds import is_float


def names_of_inputs(model: nn.Module, count: int) -> list[str]:
    """The names that a model's forward has for its first positional arguments.

    A wrapper such as DDP or an engine passes on what it is given, under no names of its
    own: they are those of the model within.
    """
    around = [uncompiled(each) for name, each in named_modules(model) if not name]
    named = [argument_names(each.forward, count) for each in around]
    return min(named, key=lambda names: sum("[" in name for name in names))


class Call(KeptCall):
    """One call that can be made again: of the model, or of a function that calls it.

    Attributes:
        function: Takes the batch, and returns what the call returned.
        kept: The call as the guard kept it, which it was made of; or None.
        seconds: How long its step took, at most.
    """

    kept: KeptCall | None = None
    seconds = math.inf

    @property
    def is_of_one_forward(self) -> bool:
        """True if it is of one forward alone, and not of a function of several."""
        return isinstance(self, ModelCall) or len(self.forwards) == 1

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch with their places, such as `batch['x']`."""
        held = self.variables()
        return [
            (name_in_code(name, held[name], path), tensor)
            for name, path, tensor in self.places()
        ]

    def places(self) -> Iterator[tuple[str, Path, torch.Tensor]]:
        """Yields the variable, the path in it and the tensor, for the whole batch."""
        for name, value in self.variables().items():
            for path, tensor in tensors(value):
                yield name, path, tensor

    def variables(self) -> dict[str, Any]:
        """The values that make up the batch, by the names that code has for them."""
        is_captured = isinstance(self.function, HeldFunction)
        return self.batch if is_captured else {"batch": self.batch}

    def around(self) -> dict[str, Any]:
        """The variables besides the batch that its function reads, by their names."""
        function = self.function
        return function.around if isinstance(function, HeldFunction) else {}

    def note_overwritten(self) -> None:
        """Keeps the answer of `is_overwritten()`: a replay may write, too."""
        self.was_overwritten = self.is_overwritten()
        if self.kept is not None:
            self.kept.was_overwritten = self.was_overwritten

    def with_own_batch(self) -> Call:
        """The same call with a copy of its batch, for code that writes to it."""
        return self.with_batch(_as_copy)

    def with_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call with another tensor in place of each of its batch's."""
        return self.again(mapped(self.batch, change, CALL_DEPTH), self.held)

    def again(self, batch: Any, held: dict[int, torch.Tensor]) -> Call:
        """The same call, with another batch and other gradients of its output."""
        copy = type(self)(self.function, batch, self.ambient)
        copy.returns_loss, copy.held, copy.raised = self.returns_loss, held, self.raised
        copy.has_backward, copy.has_autograd = self.has_backward, self.has_autograd
        return copy

    def computed_outside(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch whose graph, of code outside of it, is not run."""
        found = self.leaves()
        return [(name, each) for name, each in found if each.grad_fn is not None]

    def without_graph(self) -> Call:
        """The same call, whose backward ends at what was computed outside of it."""
        return self.with_batch(_as_leaf) if self.computed_outside() else self


class ModelCall(Call):
    """A call of a model, with its positional and its keyword arguments."""

    def variables(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        return self.around()

    def around(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        function: Any = self.function
        args, kwargs = self.batch
        names = names_of_inputs(function.args[0], len(args))
        return {**dict(zip(names, args, strict=True)), **kwargs}


def name_outside(calls: Iterable[Call]) -> str:
    """The first tensor that a function was given with a graph of outside, or ""."""
    functions = [each for each in calls if not isinstance(each, ModelCall)]
    found = (each.computed_outside() for each in functions if each.returns_loss)
    return next((names[0][0] for names in found if names), "")


def _as_copy(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not has_memory(tensor):
        return tensor
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and is_float(tensor) else copy


def call_model(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = mapped(batch, _as_leaf, CALL_DEPTH, anew=True, has_empty=True)
    return model(*args, **kwargs)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that another model made, without the graph of how it was made."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def loss_of_call(call: Call, output: Any) -> Any:
    """The loss in what a call returned: a function's, or a model's; see `loss_in`."""
    return loss_in(output) if call.returns_loss else model_loss_in(output)


def is_forward_alone(calls: Iterable[Call | None]) -> bool:
    """True if no backward follows any of several calls, and no step: one is known."""
    known = [call for call in calls if call is not None]
    return bool(known) and all(call.has_backward is False for call in known)


def loss_and_gradients(call: Call, output: Any) -> list[tuple[Any, Any]]:
    """The tensors that backward begins at, with their gradients.

    Args:
        call: The kept call.
        output: What it returned now.
    """
    if call.has_backward is False:
        return []
    tensors = tensors_in(output)
    if call.held:
        places = [place for place in call.held if place < len(tensors)]
        return [(tensors[place], call.held[place]) for place in places]
    loss = loss_of_call(call, output)
    loss = tensors[0] if loss is None and call.returns_loss and tensors else loss
    if loss is None or not loss.requires_grad or not is_float(loss):
        return []
    return [(loss, torch.ones_like(loss))]


def made_again(kept: KeptCall) -> Call:
    """Makes a call that a guard has kept one that can be made again."""
    callee = kept.callee
    is_of_model = isinstance(callee, nn.Module)
    call = object.__new__(ModelCall if is_of_model else Call)
    vars(call).update(vars(kept))
    call.kept = kept
    call.forwards = list(map(made_again, kept.forwards))
    if kept.began is not None:
        call.seconds = perf_counter() - kept.began
    call.function = functools.partial(call_model, callee) if is_of_model else callee
    return call


def with_clean_batch(call: Call, clean: KeptCall | None) -> Call | None:
    """The same call with the batch of the last clean step; None if that is not known.

    It is not where the batch was written to since, or where the call reads anything
    besides it that may be of the batch, too, and is not what it was.

    Args:
        call: The call of a bad step.
        clean: See `CallKeeper.clean`.
    """
    if clean is None or call.kept is None or not call.returns_loss:
        return None
    now, then = marks_of(call.kept.callee), clean.function
    if len(now) != len(then) or not all(map(_is_same_mark, now, then)):
        return None
    return None if clean.is_overwritten() else call.again(clean.batch, call.held)


def _is_same_mark(now: Any, then: Any) -> bool:
    if isinstance(now, weakref.ref):  # which compares what it refers to
        return now is then
    return type(now) is type(then) and bool(now == then)


# Parts of a batch, along dimension 0.


def batch_size(call: Call) -> int | None:
    """The size of dimension 0 that its tensors share; None if it cannot be cut."""
    tensors = [tensor for _, tensor in call.leaves() if tensor.dim()]
    plain = [each for each in tensors if type(each) is torch.Tensor]
    if not all(map(has_memory, plain)):
        return None
    sizes = {len(tensor) for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 and not why_whole(call) else None


def why_whole(call: Call) -> str:
    """Returns why no part of a batch can be made, as a clause, or ""."""
    try:
        mapped(call.batch, torch.Tensor.detach, CALL_DEPTH)
    except NotRebuilt as error:
        return str(error)
    return ""


def part_of(call: Call, rows: Sequence[int]) -> Call:
    """The same call with some of the samples of its batch."""
    size = batch_size(call) or 0
    cut = functools.partial(_cut, rows=list(rows), size=size)
    held = {
        place: held[list(rows)] if held.dim() and len(held) == size else held
        for place, held in call.held.items()
    }
    return call.again(mapped(call.batch, cut, CALL_DEPTH), held)


def _cut(tensor: torch.Tensor, rows: list[int], size: int) -> torch.Tensor:
    if not tensor.dim() or len(tensor) != size:
        return tensor
    part = tensor.detach()[rows]
    wants = tensor.requires_grad and is_float(tensor)
    return part.requires_grad_() if wants else part
