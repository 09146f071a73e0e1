"""Optimizers of training engines: their loss scales, gradients, and skipped steps.

DeepSpeed, Megatron-core and others give the training loop an optimizer of their own,
which holds torch's and decides when to call it: it may skip a step, or call torch's
once for each group of parameters, which may be copies. Nothing here imports an engine:
an optimizer is told by its attributes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from ...scanner.modules import has_base
from ...scanner.tensors import is_number
from ...scanner.tree import Part, children, is_container, path_text, tensors

# Loss scales that are not torch's.

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
        least = [_number(_get(self._holder, name)) for name in _LEAST]
        known = [each for each in least if each is not None]
        return self._is_dynamic and self.get_scale() > (known[0] if known else 1.0)

    @property
    def _is_dynamic(self) -> bool:
        flags = (_get(self._holder, n) for n in ("dynamic", "dynamic_loss_scale"))
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
        holders = [_get(layer, name) for name in _HOLDERS]
        if any(hasattr(type(layer), name) or name in _vars(layer) for name in _FLAGS):
            holders.append(layer)  # last: what it holds knows more of its scale
        for holder in holders:
            if holder is None or isinstance(holder, GradScaler):
                continue
            if _scale_in(holder) is not None:
                yield holder
                break


def _scale_in(holder: Any) -> float | torch.Tensor | None:
    """The scale that an object has: a number, or a tensor of one, as it is kept."""
    found = (_get(holder, name) for name in _SCALES)
    return next((each for each in found if _is_number(each)), None)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return is_number(value)


def _is_on_host(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


# Gradients that are in no parameter's `grad` when the engine's step begins.


def engine_gradients(
    layers: Iterable[Any], names: dict[int, str]
) -> tuple[list[str], list[torch.Tensor]]:
    """Lists the gradients that an engine's optimizer keeps, with their names.

    Args:
        layers: The optimizer that the guard was given, and those inside of it.
        names: The names of the models' parameters, by identity.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for layer in layers:
        for attribute, parameters in _PARTITIONS.items():
            kept = _vars(layer).get(attribute)
            owners = [_vars(layer).get(each) for each in parameters]
            for path, tensor in () if kept is None else tensors(kept):
                keys = [part.value for part in path]
                stand = [_at(each, keys) for each in owners if each is not None]
                if stand and all(each is None for each in stand):
                    continue  # it fills a partition up, and is of no parameter
                name = next(filter(None, (names.get(id(p)) for p in stand)), None)
                if name is None:
                    name = attribute + "".join(f"[{key}]" for key in keys)
                found.setdefault(id(tensor), (name, tensor))
    return [name for name, _ in found.values()], [each for _, each in found.values()]


# By the attribute that keeps gradients, those that have their parameters: of ZeRO's
# stages 1 and 2, and 3; of BF16_Optimizer.
_PARTITIONS = {
    "averaged_gradients": ("params_in_partition", "fp16_groups"),
    "fp32_groups_gradients": ("bf16_groups",),
}


def _at(values: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        try:
            values = values[key]
        except Exception:
            return None
    return values


# A step that is left out.


class OverflowFlag:
    """The flag that DeepSpeed's engine reads where one of torch's optimizers skips.

    The engine, which pauses its schedule then, asks the optimizer for `overflow`, and
    so does Accelerate's wrapper. DeepSpeed's own optimizers have that attribute.

    Args:
        optimizer: The optimizer that the engine steps.
        wrapper: What the training loop has: the same, or Accelerate's wrapper.
    """

    def __init__(self, optimizer: Any, wrapper: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._wrapper = weakref.ref(wrapper)
        self._was_asked = _vars(wrapper).get(_ASKS)

    def set(self, is_skipped: bool) -> None:
        """Sets the flag for one step."""
        _vars(self._optimizer())["overflow"] = is_skipped
        if self._was_asked is not None:
            _vars(self._wrapper())[_ASKS] = True

    def drop(self) -> None:
        """Removes the flag."""
        _vars(self._optimizer()).pop("overflow", None)
        if self._was_asked is not None:
            _vars(self._wrapper())[_ASKS] = self._was_asked


_ASKS = "__has_overflow__"


def overflow_flag(
    optimizer: Any, wrapper: Any, models: Iterable[Any]
) -> OverflowFlag | None:
    """Makes the flag of an optimizer that DeepSpeed's engine steps and that has none.

    Args:
        optimizer: The optimizer.
        wrapper: What the training loop has.
        models: The models as they train.
    """
    has_flag = _get(optimizer, "overflow") is not None
    is_stepped = any(has_base(type(each), {"DeepSpeedEngine"}) for each in models)
    if has_flag or not is_stepped or not hasattr(optimizer, "__dict__"):
        return None
    return OverflowFlag(optimizer, wrapper)


def leave_out(optimizer: Any, step: Any, last: Any) -> Any:
    """Leaves out an engine's step; returns what the step returns where it is skipped.

    DeepSpeed's optimizers hold gradients that only a step of theirs lets go of: they
    skip it themselves, told that there was an overflow, and their scale stays.

    Args:
        optimizer: The optimizer whose step it is.
        step: Its `step`, without arguments.
        last: What its last step has returned, or None.
    """
    if callable(_get(optimizer, "clear_hp_grads")):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif isinstance(_vars(optimizer).get("averaged_gradients"), dict):
        with _overflown(optimizer):
            step()
    if isinstance(_get(optimizer, "overflow"), bool):
        with contextlib.suppress(AttributeError):
            optimizer.overflow = True
    return _skipped_result(optimizer, last)


@contextlib.contextmanager
def _overflown(optimizer: Any) -> Iterator[None]:
    """Makes one of DeepSpeed's ZeRO optimizers find an overflow, and keep its scale."""

    def note(*args: Any, **kwargs: Any) -> bool:
        optimizer.overflow = True
        return True

    forced = {
        "check_grad_overflow": True,
        "check_overflow": note,
        "_update_scale": lambda *args: None,
    }
    if hasattr(optimizer, "_overflow_check_and_loss_scale_update"):
        forced["_overflow_check_and_loss_scale_update"] = note
    own = vars(optimizer)
    before = {name: own[name] for name in forced if name in own}
    own.update(forced)
    try:
        yield
    finally:
        for name in forced:
            own.pop(name, None)
        own.update(before)


def _skipped_result(optimizer: Any, last: Any) -> Any:
    """Finds the result of a skipped step.

    An optimizer's class says it by `skipped_step_result`. Megatron's is known. Any
    other step returns what its last one did, without its values: False for a bool, else
    None.
    """
    known = getattr(type(optimizer), "skipped_step_result", _UNKNOWN)
    if known is not _UNKNOWN:
        return known
    if has_base(type(optimizer), {"MegatronOptimizer"}):
        return False, None, None
    if type(last) is tuple:
        return tuple(map(_without_value, last))
    return _without_value(last)


_UNKNOWN = object()


def shape_of(result: Any) -> Any:
    """A step's result without its values, for `leave_out()`: it holds no tensor."""
    if type(result) is tuple:
        return tuple(map(_without_value, result))
    return _without_value(result)


def _without_value(value: Any) -> Any:
    return False if isinstance(value, bool) else None


def _get(holder: Any, name: str) -> Any:
    """Returns an attribute, or None where there is none or its property raises."""
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def _vars(holder: Any) -> dict[str, Any]:
    return getattr(holder, "__dict__", {})


# The optimizers that an optimizer, or a wrapper of one, holds.

# Wrappers may have them as properties.
_NAMES = ("optimizer", "optim", "inner")


def optimizers_in(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields an optimizer and all that it holds, each once, the outermost first.

    Args:
        optimizer: An optimizer, or an object that has one as an attribute or in an
            attribute that is a list, a tuple or a dict. Others are searched in
            the same way if they are optimizers, or have `step` and `param_groups`.

    Yields:
        The path of attributes that leads to the optimizer, such as `optim.` or
        `chained[0].`, "" for the outermost, and the optimizer.
    """
    seen = {id(optimizer)}
    waiting = [("", optimizer)]
    while waiting:
        path, each = waiting.pop(0)
        yield path, each
        for name, part, value in _attributes(each):
            if id(value) not in seen and is_optimizer(value):
                seen.add(id(value))
                item = "" if part is None else path_text((part,))
                waiting.append((f"{path}{name}{item}.", value))


def _attributes(holder: Any) -> Iterator[tuple[str, Part | None, Any]]:
    """Yields attributes and the items of those that are lists, tuples or dicts.

    A key's text is not made here: the keys of a state are tensors.
    """
    if isinstance(holder, Module):  # an engine that is also the model's wrapper
        held = dict(vars(holder))
    else:
        held = {part.value: value for part, value in children(holder) or ()}
    for name in _NAMES:
        held.setdefault(name, _get(holder, name))
    for name, value in held.items():
        yield name, None, value
        if is_container(value):
            for part, item in children(value) or ():
                yield name, part, item


def is_optimizer(value: Any) -> bool:
    """True if an object is an optimizer, or has `step` and `param_groups`."""
    if isinstance(value, Optimizer):
        return True
    has_step = callable(getattr(type(value), "step", None))
    return has_step and _get(value, "param_groups") is not None
