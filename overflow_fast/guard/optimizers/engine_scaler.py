"""Loss scales of training engines, which are not torch's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ...base.tensors import is_number
from .held_optimizers import attribute_of, vars_of

ENGINES_SCALER = "loss scaler"
_HOLDERS = ("loss_scaler", "grad_scaler", "scaler", "loss_scale_config")
_SCALES = ("cur_scale", "loss_scale", "scale", "_scale")
_FLAGS = ("overflow", "found_inf", "has_overflow", "found_overflow")
_LEAST = ("min_scale", "min_loss_scale")
_STATIC = ("Constant", "Static")


class EngineScaler:
    """A dynamic loss scale of an engine's, which skips steps while it is too large.

    Args:
        holder: The object that has the scale.
    """

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    @property
    def may_search(self) -> bool:
        """True unless it is known that it does not search. Does not incur a sync."""
        if not self._is_dynamic:
            return False
        scale = _scale_in(self._holder)
        return not _is_on_host(scale) or self.is_searching

    @property
    def is_searching(self) -> bool:
        """True while an overflow lowers the scale, and is none of the model's.

        Incurs a CPU-GPU sync where the scale lies on a GPU.
        """
        least = [_number(attribute_of(self._holder, name)) for name in _LEAST]
        known = [each for each in least if each is not None]
        return self._is_dynamic and self.get_scale() > (known[0] if known else 1.0)

    @property
    def _is_dynamic(self) -> bool:
        flags = (
            attribute_of(self._holder, n) for n in ("dynamic", "dynamic_loss_scale")
        )
        dynamic = next((each for each in flags if isinstance(each, bool)), None)
        if dynamic is None:
            return not any(n in type(self._holder).__name__ for n in _STATIC)
        return dynamic

    def get_scale(self) -> float:
        """The scale; 1 where there is none. Incurs a sync where it lies on a GPU."""
        return _number(_scale_in(self._holder)) or 1.0

    def get_backoff_factor(self) -> float:
        """The factor by which an overflow lowers it, as far as that is known."""
        return 0.5

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Multiplies a tensor by the scale. Does not incur a CPU-GPU sync."""
        scale = _scale_in(self._holder)
        return tensor if scale is None else tensor * scale


LossScaler = GradScaler | EngineScaler


def engine_scaler(layers: Iterable[Any]) -> EngineScaler | None:
    """The loss scaler of an optimizer that may search for its scale, or None.

    Does not incur a CPU-GPU sync.

    Args:
        layers: The optimizer that the guard was given, and those inside of it.
    """
    found = (EngineScaler(each) for each in _scale_holders(layers))
    return next((scaler for scaler in found if scaler.may_search), None)


def has_scale(layers: Iterable[Any]) -> bool:
    """True if an optimizer has a loss scale that the guard knows, of any kind.

    Args:
        layers: The optimizer that the guard was given, and those inside of it.
    """
    return next(_scale_holders(layers), None) is not None


def _scale_holders(layers: Iterable[Any]) -> Iterator[Any]:
    """Yields the objects that hold an engine's loss scale."""
    for layer in layers:
        holders = [attribute_of(layer, name) for name in _HOLDERS]
        if any(hasattr(type(layer), name) or name in vars_of(layer) for name in _FLAGS):
            holders.append(layer)  # last: what it holds knows more of its scale
        for holder in holders:
            if holder is None or isinstance(holder, GradScaler):
                continue
            if _scale_in(holder) is not None:
                yield holder
                break


def _scale_in(holder: Any) -> float | torch.Tensor | None:
    """The scale that an object has: a number, or a tensor of one, as it is kept."""
    found = (attribute_of(holder, name) for name in _SCALES)
    return next((each for each in found if _is_number(each)), None)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return is_number(value)


def _is_on_host(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None
