"""Runs chosen modules in float32 while the rest stays in half precision."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..base.given_steps import check_module
from ..base.modules import has_base, is_sharded, is_within, named_modules
from ..base.tensors import HALF
from ..base.tree import CALL_DEPTH
from ..detector.selection import Selection, check_patterns
from ..torch_internals.cached_casts import autocast_devices
from ..torch_internals.module_internals import (
    APPLY,
    REPLICATE,
    apply_to_tensors,
    replicate,
)
from ..torch_internals.tensor_internals import is_wrapper
from .loan import Loan, given_tensors

# A module's forward and weights in float32, and back.


# The dtype of float32 outputs in a model that is half precision itself.
RETURNS_HALF = "returns half"  # that of the module's weights, or of its inputs
FOLLOWS = "follows"  # that of the inputs
STAYS = "stays"


class Float32Forward:
    """A forward in float32, with autocast off, in place of a module's own.

    It is put on the instance, and has no state between calls: dynamo traces it, threads
    share it, and a copy of the module has a copy of it.

    Args:
        module: The module.
        output: `RETURNS_HALF`, `FOLLOWS` or `STAYS`.
        half: The half-precision dtype that the module returned, as far as known.

    Attributes:
        is_first: The module had its class's forward before, and has it after.
    """

    def __init__(
        self, module: nn.Module, output: str, half: torch.dtype | None
    ) -> None:
        self.module = module
        self._output = output
        self._half = half
        self._around: list[Float32Forward] = []
        self.is_active = True
        self.is_first = "forward" not in module.__dict__
        self.__wrapped__ = module.forward  # `inspect.signature` follows it
        module.__dict__["forward"] = self
        module.__dict__[REPLICATE] = functools.partial(_replicate, module)
        module.__dict__[APPLY] = functools.partial(_apply_but_half, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward in float32, or after `remove()` the original one."""
        if self.is_active:
            return self._run(*args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        """Restores the original forward; one put over this one stays.

        A cast is one of all the module's weights again.
        """
        self.is_active = False
        own = self.module.__dict__
        for over in _forwards_of(self.module):
            if over.__wrapped__ is self:
                over.__wrapped__, over.is_first = self.__wrapped__, self.is_first
        if own.get("forward") is self:
            own["forward"] = self.__wrapped__
            if self.is_first:
                del own["forward"]
        if not isinstance(own.get("forward"), Float32Forward):
            own.pop(REPLICATE, None)
            own.pop(APPLY, None)

    def bound_to(self, module: nn.Module) -> Float32Forward:
        """Returns a copy that runs another module, such as a replica of this one."""
        bound = copy.copy(self)
        bound.module = module
        forward = self.__wrapped__
        if isinstance(forward, Float32Forward):
            bound.__wrapped__ = forward.bound_to(module)
        elif isinstance(forward, types.MethodType) and forward.__self__ is self.module:
            bound.__wrapped__ = types.MethodType(forward.__func__, module)
        return bound

    def note_half(self, dtype: torch.dtype) -> None:
        """Takes in what the rest of the model is cast to."""
        self._half = dtype

    def add_around(self, outer: Float32Forward) -> None:
        """Notes that a module around this one runs in float32, too.

        What passes between the two stays in float32.
        """
        self._around.append(outer)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = given_tensors(args, kwargs)
        dtypes = [tensor.dtype for tensor in given]
        half = next((dtype for dtype in dtypes if dtype in HALF), None)
        loan = None
        if half is not None:
            loan = Loan((args, kwargs), _to_float32, CALL_DEPTH)
            args, kwargs = loan.value
        device = _autocast_device(self.module, given)
        if device is not None:
            with torch.autocast(device, enabled=False):
                output = self.__wrapped__(*args, **kwargs)
        else:
            output = self.__wrapped__(*args, **kwargs)
        if loan is not None:
            loan.give_back()
        if device is not None:
            return output
        has_float = any(dtype.is_floating_point for dtype in dtypes)
        dtype = self._dtype_after(half, has_float)
        return output if dtype is None else _from_float32(output, dtype)

    def _dtype_after(
        self, half: torch.dtype | None, has_float: bool
    ) -> torch.dtype | None:
        """Returns the dtype to cast float32 outputs to; None if they stay."""
        if self._output == STAYS:
            return None
        if any(outer.is_active for outer in self._around):
            return half  # of what is given from elsewhere than by those around it
        if self._output == RETURNS_HALF:
            return self._half or half
        return half if has_float else self._half


def _forwards_of(module: nn.Module) -> Iterator[Float32Forward]:
    """The forwards that were put on a module, the last one first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Float32Forward):
        yield forward
        forward = forward.__wrapped__


def _replicate(module: nn.Module) -> nn.Module:
    replica = replicate(module)
    del replica.__dict__[REPLICATE]
    forward = module.__dict__.get("forward")
    if isinstance(forward, Float32Forward):
        replica.__dict__["forward"] = forward.bound_to(replica)
    return replica


def _apply_but_half(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Applies a function to a module's tensors; float32 stays, where it casts to half.

    A running variance beyond 65504 is inf in float16 for good.
    """

    def but_half(tensor: Tensor) -> Tensor:
        made = function(tensor)
        if tensor.dtype != torch.float32 or made.dtype not in HALF:
            return made
        for forward in _forwards_of(module):
            forward.note_half(made.dtype)
        return tensor.to(made.device)

    apply_to_tensors(module, but_half, recurse)
    return module


def _autocast_device(module: nn.Module, given: Sequence[Tensor]) -> str | None:
    """Returns the type of the device of a call, if its autocast is on."""
    tensor = given[0] if given else next(module.parameters(), None)
    if tensor is None or not _has_autocast(tensor.device.type):
        return None
    device = tensor.device.type
    return device if torch.is_autocast_enabled(device) else None


# Asked here: in compiled code torch 2.11 breaks the graph for it. The decorator that
# makes it a constant would import torch._dynamo along with the package.
_HAS_AUTOCAST = dict.fromkeys(autocast_devices(), True)


def _has_autocast(device: str) -> bool:
    """True if a type of devices has an autocast."""
    known = _HAS_AUTOCAST.get(device)
    return torch.amp.is_autocast_available(device) if known is None else known


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _from_float32(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

    return Loan(value, cast).value


class Float32Weights:
    """The half-precision weights and buffers of modules, to be cast to float32.

    Args:
        model: The model; its first half-precision weight has its dtype.
        modules: The modules by their names, with all that is within them.
        fixed_by: The wrapper that relies on the weights' dtypes, such as "DDP", or "".
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], fixed_by: str
    ) -> None:
        self._models_dtype = _half_of(model)
        self._tensors = {
            id(tensor): tensor
            for prefix, module in modules.items()
            for name, tensor in _named_tensors(module, prefix)
            if _is_castable(name, tensor, fixed_by)
        }

    def are_of(self, module: nn.Module) -> bool:
        """True if a module itself owns one of them."""
        own = _named_tensors(module, recurse=False)
        return any(id(tensor) in self._tensors for _, tensor in own)

    def others_of(self, module: nn.Module) -> list[str]:
        """Lists a module's half-precision weights that are not among them."""
        return [
            name
            for name, tensor in _named_tensors(module)
            if tensor.dtype in HALF and id(tensor) not in self._tensors
        ]

    def half_of(self, module: nn.Module, or_models: bool = False) -> torch.dtype | None:
        """Returns the half-precision dtype of a module's weights, or of the model's."""
        return _half_of(module) or (self._models_dtype if or_models else None)

    def cast(self) -> None:
        """Casts them in place, and their gradients."""
        for tensor in self._tensors.values():
            grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                tensor.grad = None
            tensor.data = tensor.data.float()
            if grad is not None:
                tensor.grad = grad.float()


def _named_tensors(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(prefix, recurse)
    yield from module.named_buffers(prefix, recurse)


def _half_of(module: nn.Module) -> torch.dtype | None:
    dtypes = (tensor.dtype for _, tensor in _named_tensors(module))
    return next((dtype for dtype in dtypes if dtype in HALF), None)


def _is_castable(name: str, tensor: Tensor, fixed_by: str) -> bool:
    """True if a weight is half precision; raises if it cannot be cast."""
    if tensor.dtype not in HALF:
        return False
    if is_lazy(tensor):
        why = "is not initialized yet: run the model once first"
    elif fixed_by:
        why = f"belongs to {fixed_by} already: call keep_in_fp32 before that"
    elif is_wrapper(tensor):
        why = f"is a {type(tensor).__name__}, which cannot be cast in place"
    else:
        return True
    raise ValueError(f"names must hold modules whose weights can be cast; {name} {why}")


class Fp32Handle:
    """A handle that lets the modules of a `keep_in_fp32` run as before.

    Attributes:
        names: The qualified names of the modules that `names` chose, and of those that
            share a weight with them. They run in float32.
    """

    def __init__(self, names: list[str], forwards: list[Float32Forward]) -> None:
        self.names = names
        self._forwards = forwards

    def remove(self) -> None:
        """Puts the modules' forwards back; weights that were cast stay float32.

        `model.half()` or `model.to(torch.bfloat16)` casts them back.
        """
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()

    def __enter__(self) -> Fp32Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def keep_in_fp32(
    model: nn.Module, names: Iterable[str], until: Iterable[str] | None = None
) -> Fp32Handle:
    """Runs modules in float32: autocast is off in their forward.

    The half-precision inputs of the modules are cast to float32 at each call. Their
    half-precision weights and buffers are cast once, in place: call it before the
    optimizer is made and before DDP or FSDP wraps the model. A module elsewhere that
    shares such a weight runs in float32, too. The forward is replaced on the instance,
    which `torch.compile` traces without a graph break. Does not incur a CPU-GPU sync.

    Under autocast outputs stay in float32. In a model that is half precision itself,
    `until` decides, and `half()` or `to(torch.bfloat16)` leaves these modules' weights
    in float32: called before, it keeps what float16 has no number for, such as a
    running variance beyond 65504. Without `until`, outputs are cast back to the dtype
    of the inputs as soon as a module returns, and what is too large for float16 becomes
    inf there. With it, outputs stay in float32 until they reach a module that `until`
    names, such as a normalization: that one runs in float32 and returns half precision.
    Modules with half-precision weights that the values reach before that belong in
    `names`, too. It is simpler to name a module that ends with a normalization, without
    `until`.

    Args:
        model: The model.
        names: Qualified names of modules, or shell-style patterns of them, such as
            `["encoder.block.4.layer.1.DenseReluDense.wo"]` or `["*.wo"]`. That of a
            ModuleList or ModuleDict, which is never called, stands for what is in it.
        until: Names or patterns of the modules after which values are small enough for
            half precision again, such as `["*layer_norm"]`; `[]` if outputs are never
            cast back.

    Returns:
        A handle whose `remove()` puts the modules' forwards back.

    Raises:
        TypeError: If `model` is no module, or `names` or `until` is a single string.
        ValueError: If a name is that of no module, or if a weight cannot be cast: it
            is sharded, quantized or not initialized yet, or it is shared with a module
            that has other half-precision weights.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2)).bfloat16()
        >>> keep_in_fp32(model, ["0"]).names
        ['0']
    """
    check_module(model)
    named = {module: name for name, module in named_modules(model)}
    kept = _choose("names", names, named)
    ends = set() if until is None else _choose("until", until, named)
    outermost, outside = _split(model, kept | ends)
    by_name = {named[module]: module for module in outermost}
    weights = Float32Weights(model, by_name, _taken_by(model))
    sharing = [module for module in outside if weights.are_of(module)]
    _check_sharing(sharing, weights, named)
    forwards = [
        Float32Forward(
            module,
            RETURNS_HALF if until is None or module in ends else STAYS,
            weights.half_of(module, or_models=module in ends),
        )
        for module in outermost
    ]
    forwards += [
        Float32Forward(module, FOLLOWS, weights.half_of(module)) for module in sharing
    ]
    weights.cast()
    for outer in forwards:
        for module in outer.module.modules():
            if module is not outer.module:
                for inner in _forwards_of(module):  # of earlier calls
                    inner.add_around(outer)
    kept |= set(sharing)
    return Fp32Handle([named[module] for module in named if module in kept], forwards)


def shortened(kept: Sequence[str], names: Sequence[str]) -> list[str]:
    """Patterns for names that differ in numbers alone, where they choose no others.

    Args:
        kept: The names of the modules to choose.
        names: Those of all modules.
    """
    found: dict[str, None] = {}
    for name in kept:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        matched = [each for each in names if fnmatchcase(each, pattern)]
        are_chosen = all(
            n in kept or any(is_within(n, k) for k in kept) for n in matched
        )
        is_exact = sum(n in kept for n in matched) > 1 and are_chosen
        found[pattern if is_exact else name] = None
    return list(found)


def _choose(
    argument: str, patterns: Iterable[str], named: dict[nn.Module, str]
) -> set[nn.Module]:
    if isinstance(patterns, str):
        raise TypeError(f"{argument} must be a list of names, got the str {patterns!r}")
    patterns = list(patterns)
    check_patterns(argument, patterns, named.values())
    selection = Selection(patterns, ())
    chosen = [module for module, name in named.items() if selection.takes(name)]
    return {each for module in chosen for each in _called(module)}


def has_forward(module: nn.Module) -> bool:
    """True for a module that can be called, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself; of one without a forward, as a ModuleList, those within it."""
    if has_forward(module):
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _taken_by(model: nn.Module) -> str:
    """Returns the wrapper that relies on the weights' dtypes, which are fixed then."""
    if is_sharded(model):
        return "FSDP or DTensor"
    ddp = {"DistributedDataParallel"}
    return "DDP" if any(has_base(type(m), ddp) for m in model.modules()) else ""


def _split(
    model: nn.Module, chosen: set[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Lists the chosen modules that are within no other, and those within none."""
    outermost: dict[nn.Module, None] = {}
    outside: dict[nn.Module, None] = {}
    to_do = [model]
    while to_do:
        module = to_do.pop()
        if module in chosen:
            outermost[module] = None
        elif module not in outside:
            outside[module] = None
            to_do += module.children()
    return list(outermost), list(outside)


def _check_sharing(
    sharing: list[nn.Module], weights: Float32Weights, named: dict[nn.Module, str]
) -> None:
    for module in sharing:
        other = weights.others_of(module)
        if other:
            raise ValueError(
                f"{named[module] or 'the model'} shares a weight with a module of "
                f"names, and its {other[0]} is half precision; add it to names"
            )
