"""Everything that a run of a model may change, put back bit for bit."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..torch_internals.module_internals import own_buffers, own_parameters
from ..torch_internals.replay_internals import gradient_hooks, set_version
from ..torch_internals.tensor_internals import version_of
from ..torch_internals.wrappers import local_tensor
from .memory import is_whole
from .names import named_modules
from .tensors import has_memory
from .wrapped import reshard

_MAX_BYTES = 2**28  # of larger tensors that no optimizer steps there is no copy
_CONTAINERS = (list, dict, set, OrderedDict)


def devices_of(models: Iterable[nn.Module]) -> list[torch.device]:
    """The devices besides the CPU that hold parameters or buffers."""
    tensors = (t for model in models for t in _tensors(model))
    found = {tensor.device for tensor in tensors}
    return sorted((d for d in found if d.type not in ("cpu", "meta")), key=str)


def random_states(devices: Iterable[torch.device]) -> list[tuple[Any, torch.Tensor]]:
    """The states of torch's random number generators. Does not incur a CPU-GPU sync."""
    states: list[tuple[Any, torch.Tensor]] = [(None, torch.get_rng_state())]
    for device in devices:
        states.append((device, torch.get_device_module(device).get_rng_state(device)))
    return states


def has_drawn(states: Iterable[tuple[Any, torch.Tensor]]) -> bool:
    """Tells whether random numbers were drawn since the states were taken."""
    kept = list(states)
    now = random_states(device for device, _ in kept if device is not None)
    return not all(torch.equal(a[1], b[1]) for a, b in zip(kept, now, strict=True))


def set_random_states(states: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Puts the states of torch's random number generators back."""
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


class KeptState:
    """The state of models and random number generators; put back on exit.

    Gradients are set aside by reference, and hooks on them that step an optimizer in
    backward with them: they are not called meanwhile.

    Args:
        models: The models.
        start: Buffers and what was in them when the step began.
        on_copies: Whether other tensors take the place of parameters and buffers
            meanwhile: then these are not copied.

    Attributes:
        lost: What could not be kept, in sentences.
        has_hooks: Whether hooks behind gradients are set aside.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        start: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
        on_copies: bool = False,
    ) -> None:
        self._models = list(models.values())
        self._start = list(start)
        self._on_copies = on_copies
        self._undo: list[Callable[[], None]] = []
        self.lost: list[str] = []
        self.has_hooks = False

    def __enter__(self) -> KeptState:
        if not self._undo:
            try:
                self.keep()
            except BaseException:
                self.put_back()
                raise
        return self

    def keep(self) -> None:
        """Keeps everything; what it has changed at an error, `put_back()` puts back."""
        self._undo.append(lambda: reshard(self._models))
        self._keep_random()
        for model in self._models:
            for name, module in named_modules(model):
                self._undo.append(keep_attributes(module))
                self._keep_tensors(name, module)
            for parameter in model.parameters():
                self._set_gradient_aside(parameter)
        self.begin()

    def begin(self) -> None:
        """Makes buffers what they were when the step began, and drops gradients."""
        with torch.no_grad():
            for tensor, value in self._start:
                _write(tensor, value)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Sets the gradients to None."""
        for model in self._models:
            for parameter in model.parameters():
                parameter.grad = None

    def __exit__(self, *exception: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Makes everything what it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _keep_random(self) -> None:
        states, own = random_states(devices_of(self._models)), random.getstate()
        self._undo += [lambda: set_random_states(states), lambda: random.setstate(own)]
        numpys: Any = sys.modules.get("numpy.random")  # if the program uses it
        if numpys is not None:
            state = numpys.get_state()
            self._undo.append(lambda: numpys.set_state(state))

    def _keep_tensors(self, name: str, module: nn.Module) -> None:
        """Copies buffers, attributes that are tensors, and frozen parameters."""
        tensors: dict[str, torch.Tensor | None] = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        if not self._on_copies:
            tensors |= dict(own_buffers(module)) | {
                key: each
                for key, each in own_parameters(module).items()
                if each is not None and not each.requires_grad
            }
        for key, tensor in tensors.items():
            if tensor is None or tensor.is_meta or nn.parameter.is_lazy(tensor):
                continue
            if tensor.nbytes > _MAX_BYTES:
                if key in own_parameters(module):
                    continue  # frozen weights, which a forward leaves alone
                self.lost.append(f"{name}.{key} is too large to be put back.")
                continue
            self._undo.append(_rewriter(tensor))

    def _set_gradient_aside(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        hooks = gradient_hooks(parameter)
        saved = dict(hooks)
        self.has_hooks |= bool(hooks)
        hooks.clear()
        is_plain = gradient is not None and local_tensor(gradient) is None
        if gradient is not None and is_plain and not is_whole(gradient):
            self._undo.append(_rewriter(gradient))  # DDP may reduce others in there

        def undo() -> None:
            parameter.grad = gradient
            if saved:
                hooks.update(saved)

        self._undo.append(undo)


def keep_attributes(owner: Any) -> Callable[[], None]:
    """Keeps an object's attributes, and what lists, dicts and sets of its hold.

    Returns:
        What puts them back.
    """
    own = vars(owner)
    saved = dict(own)
    contents = {
        key: value.copy() for key, value in saved.items() if type(value) in _CONTAINERS
    }

    def undo() -> None:
        for key in [key for key in own if key not in saved]:
            del own[key]
        for key, value in saved.items():
            if own.get(key, own) is not value:
                own[key] = value
            if key in contents and not _is_same(value, contents[key]):
                _refill(value, contents[key])

    return undo


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _rewriter(tensor: torch.Tensor) -> Callable[[], None]:
    """Copies a tensor; returns what makes it that again, for autograd too."""
    value, own = tensor.detach().clone(), tensor.data
    version = None if tensor.is_inference() else version_of(tensor)

    def undo() -> None:
        is_plain = local_tensor(tensor) is None and has_memory(own)
        if is_plain and tensor.data_ptr() != own.data_ptr():  # code has exchanged it
            tensor.data = own
        _write(tensor, value)
        if version is not None and version_of(tensor) != version:
            set_version(tensor, version)

    return undo


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.data.copy_(value)  # autograd, which may have saved it, sees no change


def _is_same(value: Any, before: Any) -> bool:
    """Tells whether a container holds the same objects as before."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=True)
        return all(k is j and v is w for (k, v), (j, w) in pairs)
    if isinstance(value, set):
        return {id(each) for each in value} == {id(each) for each in before}
    return all(a is b for a, b in zip(value, before, strict=True))


def _refill(value: Any, before: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(before)
    else:
        value.update(before)
