"""Runs chosen modules in float32 while the rest stays in half precision."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..core.names import has_base, is_sharded, named_modules
from ..core.selection import Selection, check_patterns
from .float32 import FOLLOWS, RETURNS_HALF, STAYS, Float32Forward, Float32Weights


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
    `until` decides. Without it, outputs are cast back to the dtype of the inputs as
    soon as a module returns, and what is too large for float16 becomes inf there. With
    it, outputs stay in float32 until they reach a module that `until` names, such as a
    normalization: that one runs in float32 and returns half precision. Modules with
    half-precision weights that the values reach before that belong in `names`, too. It
    is simpler to name a module that ends with a normalization, without `until`.

    Args:
        model: The model.
        names: Qualified names of modules, or shell-style patterns of them, such as
            `["encoder.block.4.layer.1.DenseReluDense.wo"]` or `["*.wo"]`.
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
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
    kept |= set(sharing)
    return Fp32Handle([named[module] for module in named if module in kept], forwards)


def _choose(
    argument: str, patterns: Iterable[str], named: dict[nn.Module, str]
) -> set[nn.Module]:
    if isinstance(patterns, str):
        raise TypeError(f"{argument} must be a list of names, got the str {patterns!r}")
    patterns = list(patterns)
    check_patterns(argument, patterns, named.values())
    selection = Selection(patterns, ())
    return {module for module, name in named.items() if selection.takes(name)}


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
