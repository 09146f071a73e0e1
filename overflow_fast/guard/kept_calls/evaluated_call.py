"""The last forward without autograd of a training, held until it is judged.

It is judged by itself as it ends, where no step keeps it: an observation's normalizer,
a teacher, a validation.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn

from ...torch_internals.running import is_recorded
from ..requests.forward_start import SmallState
from ..requests.held_call import HeldCall


class _OfThread(threading.local):
    call: HeldCall | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:  # a copied guard's
        return _OfThread, ()


class EvaluatedCall:
    """Holds what the last forward without autograd was called with; by thread."""

    def __init__(self) -> None:
        self._now = _OfThread()
        self._states: weakref.WeakKeyDictionary[nn.Module, SmallState]
        self._states = weakref.WeakKeyDictionary()

    def begin(
        self, model: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool
    ) -> None:
        """Holds the arguments; nothing where a step keeps them, or they are unseen."""
        self._now.call = None
        is_known = args is not None and not (has_stand_ins or is_recorded())
        if torch.is_grad_enabled() or not is_known:
            return
        state = self._states.get(model)
        if state is None:
            state = self._states[model] = SmallState()
        start = state.before(model)
        self._now.call = HeldCall(model, args, kwargs, start, state.devices)

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Notes what the forward has changed in its model."""
        call = self._now.call
        if call is not None:
            self._states[call.module].after(call.state)

    def leave(self) -> None:
        """Lets go of one that an exception has left: it is judged with its step."""
        self.take()

    def clear(self) -> None:
        """Lets go of it."""
        self.take()

    def take(self) -> HeldCall | None:
        """Returns it, and lets go of it; None if none is held."""
        call, self._now.call = self._now.call, None
        return call
