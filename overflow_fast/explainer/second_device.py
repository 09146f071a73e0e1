"""Computes a module's call again on the CPU: the device that ran it may be faulty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _C
from ..detector.observers import without_observers
from ..detector.selection import full_name
from ..guard.kept_calls.ambient import autocast_of
from ..scanner.modules import (
    Handles,
    modules_in,
    named_modules,
    parameters_of,
    tensors_of,
)
from ..scanner.tensors import is_readable, place_of
from ..scanner.tree import CALL_DEPTH, mapped, tensors_in
from ..torch_internals.module_internals import is_dropout
from ..torch_internals.replaying import autocast_devices, without_cached_casts
from .copies import on_copies, to_dtype
from .replayer import Observer
from .tensor_kinds import floats_in

OTHER = torch.device("cpu")
_MAX_BYTES = 2**30  # of weights that are copied there, in float64
_TIMES = 32.0  # so much more than the other device's error is no rounding
_TF32_EPS = 2.0**-10  # its mantissa has 10 bits


@dataclass
class TracedModule:
    """A module whose call is traced, with what it takes to call it again, by reference.

    Attributes:
        module: The module.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        autocast: The devices that autocast is on for, with the dtypes.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: list[tuple[str, torch.dtype]] = field(default_factory=list)
    _given: list[torch.Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @classmethod
    def begun(
        cls, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TracedModule:
        """Notes a call that begins now, in the state of this moment."""
        autocast = [
            (device, dtype)
            for device, is_on, dtype in autocast_of(autocast_devices())
            if is_on
        ]
        given = tensors_in((args, kwargs), CALL_DEPTH)
        versions = _C.versions_of(given)
        return cls(module, name, args, kwargs, autocast, given, versions)

    @property
    def is_as_it_was(self) -> bool:
        """True if nobody has written to its arguments since it began."""
        return _C.versions_of(self._given) == self._versions


@dataclass
class FirstCall(Observer):
    """Keeps the first call of a module, and what it returned.

    Attributes:
        name: The module's name, with the model's prefix.
        call: The call, or None.
        output: What it returned.
    """

    name: str
    call: TracedModule | None = None
    output: Any = None

    @contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Observer`."""
        handles = Handles(
            module.register_forward_hook(self._keep, prepend=True, with_kwargs=True)
            for prefix, model in models.items()
            for name, module in named_modules(model)
            if full_name(prefix, name) == self.name
        )
        with handles:
            yield

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.call is None:
            self.call = TracedModule.begun(module, self.name, args, kwargs)
            self.output = output


@dataclass(frozen=True)
class DeviceErrors:
    """The errors of two devices, against float64 on the second.

    Attributes:
        name: The module's name.
        device: The device that is judged.
        error: The largest error of its values, relative to their largest magnitude.
        usual: The same of the other device, or of rounding if that is more.
    """

    name: str
    device: torch.device
    error: float
    usual: float

    @property
    def is_suspect(self) -> bool:
        """True if the device is off by more than rounding."""
        return not self.error <= _TIMES * self.usual

    def __str__(self) -> str:
        """The errors in a sentence."""
        if not self.is_suspect:
            return f"{self.name} on the {OTHER.type.upper()} gives the same now"
        return (
            f"{self.name} is off by {self.error:.1g} of its largest value, where "
            f"{self.usual:.1g} is usual: {place_of(self.device)} is suspect"
        )


def is_elsewhere(models: Mapping[str, nn.Module]) -> bool:
    """True if weights are on another device than the one that is asked."""
    parameters = (p for model in models.values() for p in parameters_of(model))
    return any(parameter.device.type != OTHER.type for parameter in parameters)


def compare_devices(call: TracedModule, output: Any) -> DeviceErrors | None:
    """Computes a module's call again, on its own device and on another.

    Incurs a CPU-GPU sync.

    Args:
        call: The call, with its weights as they were.
        output: What it returned.

    Returns:
        The errors; None if the module cannot run elsewhere, or takes random numbers.
    """
    own = floats_in(output)
    if not own or not call.is_as_it_was or not _can_run_alone(call.module):
        return None
    device, dtype = own[0].device, own[0].dtype
    try:
        weights = call.module.parameters()
        with (
            without_observers([call.module]),
            without_cached_casts(weights),
            torch.no_grad(),
        ):
            again = [_run(call, device, num_drawn=number) for number in (0, 1)]
            same, exact = _run(call, OTHER), _run(call, OTHER, torch.float64)
    except Exception:  # a dtype or device that its code asks for
        return None
    usual = max(_error(same, exact), _eps_of(dtype, device))
    if _error(again[0], again[1]) > _TIMES * usual:
        return None  # random numbers of its own, or kernels that race
    error = max(_error(own, exact), _error(again[0], exact))
    return DeviceErrors(call.name or "the model", device, error, usual)


def _run(
    call: TracedModule,
    device: torch.device,
    width: torch.dtype | None = None,
    num_drawn: int = 0,
) -> list[torch.Tensor]:
    """Runs the module on copies, after so many random numbers were drawn."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().to(device, copy=True)
        return plain if width is None else to_dtype(plain, width)

    args, kwargs = mapped((call.args, call.kwargs), convert, CALL_DEPTH)
    with ExitStack() as stack:
        stack.enter_context(on_copies(call.module, convert))
        for _, dtype in call.autocast[:1] if width is None else []:
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
        torch.rand(num_drawn, device=device)
        return floats_in(call.module.forward(*args, **kwargs))


def _can_run_alone(module: nn.Module) -> bool:
    tensors = list(tensors_of(module))
    if not all(map(is_readable, tensors)):
        return False
    if any(is_dropout(each) and each.training for each in modules_in(module)):
        return False
    return sum(8 * tensor.numel() for tensor in tensors) <= _MAX_BYTES


def _error(values: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest magnitude; inf for a nan."""
    most = 0.0
    for one, other in zip(values, exact, strict=True):
        a, b = (each.detach().to(OTHER, torch.float64) for each in (one, other))
        scale = float(b.abs().max())
        error = float((a - b).abs().max()) / scale if scale else float(a.abs().max())
        most = max(most, error) if error == error else float("inf")
    return most


def _eps_of(dtype: torch.dtype, device: torch.device) -> float:
    is_tf32 = device.type == "cuda" and dtype == torch.float32
    return max(torch.finfo(dtype).eps, _TF32_EPS * is_tf32)
