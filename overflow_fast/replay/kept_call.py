"""One call of a step, with what it takes to make it again."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..core.tensors import loss_in
from ..torch_internals.compiler import uncompiled
from ..torch_internals.tensor_internals import pytree, version_of
from .kinds import is_float, tensors_in
from .restore import random_states, set_random_states
from .wrapped import set_shares_buffers

_MAX_HELD_BYTES = 2**26


class Ambient:
    """Random states, autocast and training mode at one moment.

    Does not incur a CPU-GPU sync.

    Args:
        model: The model whose training mode counts.
        devices: The devices besides the CPU that it is on.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self._random = random_states(devices)
        self._pythons = random.getstate()
        self._training = model.training
        types = ("cpu", *dict.fromkeys(device.type for device in devices))
        self._autocast = [
            (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
            for type in types
        ]
        self._caches = torch.is_autocast_cache_enabled()
        # DDP: whether the forward takes the first rank's buffers.
        self._shares_buffers = getattr(model, "require_forward_param_sync", None)

    @contextmanager
    def applied(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Sets all of it; autocast is as it was afterwards, the rest is not."""
        set_random_states(self._random)
        random.setstate(self._pythons)
        for model in models:
            if model.training != self._training:
                model.train(self._training)
            if self._shares_buffers is not None:
                set_shares_buffers(model, self._shares_buffers)
        with ExitStack() as stack:
            for type, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                    )
                )
            yield


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
        self._versions = [(t, _version(t)) for t in tensors_in(batch)]

    @property
    def caller(self) -> int:
        """Which model it is of; 0 for a function that calls them."""
        return 0

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch with their keys."""
        return list(named_leaves(self.batch))

    def is_overwritten(self) -> bool:
        """Whether the batch was written to since."""
        return any(_version(tensor) != before for tensor, before in self._versions)

    def hold_gradients(self, output: Any) -> None:
        """Has the gradients of what was returned held, by reference.

        Of a loss if there is one, else of all tensors up to a size.
        """
        loss = loss_in(output)
        self.returns_loss = loss is not None
        tensors = list(tensors_in(output))
        asked = [
            (place, tensor)
            for place, tensor in enumerate(tensors)
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
    """A kept call of a model, with its positional and its keyword arguments."""

    @property
    def caller(self) -> int:
        """Which model it is of."""
        function: Any = self.function
        return id(function.args[0])

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors among the arguments, by the names of the parameters."""
        function: Any = self.function
        args, kwargs = self.batch
        try:
            forward = uncompiled(function.args[0]).forward
            names = list(inspect.signature(forward).parameters)
        except (TypeError, ValueError):
            names = []
        names += [f"input[{i}]" for i in range(len(names), len(args))]
        return list(named_leaves({**dict(zip(names, args, strict=False)), **kwargs}))


def _hold(held: dict[int, torch.Tensor], place: int, gradient: torch.Tensor) -> None:
    held[place] = gradient


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def call_model(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = pytree.tree_map(_as_leaf, batch)
    return model(*args, **kwargs)


def _as_leaf(value: Any) -> Any:
    """A tensor that another model made, without the graph of how it was made."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_()


def loss_and_gradients(call: KeptCall, output: Any) -> list[tuple[Any, Any]]:
    """What backward is called on, with the gradients it begins with.

    Args:
        call: The kept call.
        output: What it returned now.
    """
    tensors = list(tensors_in(output))
    if call.held:
        places = [place for place in call.held if place < len(tensors)]
        return [(tensors[place], call.held[place]) for place in places]
    loss = loss_in(output)
    loss = tensors[0] if loss is None and call.returns_loss and tensors else loss
    if loss is None or not loss.requires_grad or not is_float(loss):
        return []
    return [(loss, torch.ones_like(loss))]


def named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a batch with their keys."""
    if isinstance(batch, torch.Tensor):
        yield name or "batch", batch
    elif isinstance(batch, Mapping):
        for key, each in batch.items():
            yield from named_leaves(each, str(key))
    elif isinstance(batch, (list, tuple)):
        for i, each in enumerate(batch):
            yield from named_leaves(each, f"{name or 'batch'}[{i}]")
