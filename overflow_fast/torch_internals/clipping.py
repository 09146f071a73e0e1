"""The norms of gradients that `torch.nn.utils.clip_grad_norm_` computes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from .needed import Needing
from .registry import internal, listed


class ClippingListener(Protocol):
    """Receives the norms that gradients are clipped by."""

    def on_clipped(
        self, parameters: Sequence[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Called behind the clipping, which keeps finite gradients finite.

        Args:
            parameters: The parameters whose gradients were clipped.
            norm: The norm of all of them, which is finite only if they all were.
        """


_replaced: dict[str, tuple[Any, Any]] = {}  # ours and what was there, by name
_found = threading.local()  # `norm`: the last one that clip_grad_norm_ has computed


@internal(
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "the norm that clipping computes, whatever name the program calls it by",
    "The tripwire scans gradients behind clip_grad_norm_",
)
def listen(listener: ClippingListener) -> None:
    """Calls a listener at every `clip_grad_norm_` from now on. Holds it weakly.

    There is no hook for it: while there are listeners, the two functions that it calls
    are replaced where it looks them up. Compiled code is left alone.
    """
    wrappers = {
        "_get_total_norm": _noting_norm,
        "_clip_grads_with_norm_": _with_listeners,
    }
    found = {name: getattr(clip_grad, name) for name in wrappers}
    _listeners.add(listener)
    for name, function in found.items():
        if name not in _replaced or _replaced[name][0] is not function:
            _replaced[name] = wrappers[name](function), function
            setattr(clip_grad, name, _replaced[name][0])


def stop_listening(listener: ClippingListener) -> None:
    """Calls a listener no more; after the last one, puts the functions back.

    Where other code has wrapped one since, it stays, and only calls what it wraps.
    """
    _listeners.discard(listener)


def _put_back(may_wait: bool) -> None:
    for name, (ours, function) in _replaced.items():
        if getattr(clip_grad, name) is ours:
            setattr(clip_grad, name, function)
    _replaced.clear()


_listeners = Needing(_put_back)


@listed(
    "torch.nn.utils.clip_grad._get_total_norm",
    "the order of that norm: not every one shows a nan",
    "The tripwire scans gradients behind clip_grad_norm_",
)
def _noting_norm(get_norm: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_norm)
    def get_and_note(*args: Any, **kwargs: Any) -> Any:
        norm = get_norm(*args, **kwargs)
        if not torch.compiler.is_compiling():
            order = kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0)
            # Of order 0 a nan counts as 1, and below it an inf as 0.
            _found.norm = norm if float(order) > 0 else None
        return norm

    return get_and_note


def _with_listeners(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clip_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = clip(*args, **kwargs)
        if not torch.compiler.is_compiling():
            norm, _found.norm = getattr(_found, "norm", None), None
            if norm is not None and len(args) > 2 and args[2] is norm:
                _tell(*args[:3])
        return result

    return clip_and_tell


def _tell(parameters: Any, max_norm: Any, norm: torch.Tensor) -> None:
    # Another factor may make a finite gradient nan or inf.
    if isinstance(parameters, Sequence) and float(max_norm) >= 0:
        for listener in list(_listeners):
            listener.on_clipped(parameters, norm)
