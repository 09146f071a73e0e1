"""The arguments of a forward without autograd, held so that it can be made again.

A token of a small model takes milliseconds. So nothing is rebuilt here: of each list
and dict below the arguments, such as those of a cache, the extension notes the items,
and a copy of the arguments as they were is made where a forward is run again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.tree import CALL_DEPTH, mapped, solid_base, tensors
from ...scanner.ops import are_nonfinite
from ..kept_calls.ambient import Ambient
from ..kept_calls.kept_call import KeptCall
from ..watching.inputs import is_plain
from .forward_start import ForwardStart, SmallState

_SMALL = 64  # elements: of a counter, such as a cache's length
_OF_IDS = (torch.int64, torch.int32)
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class HeldCall:
    """One outermost forward without autograd, as it was called.

    Does not incur a CPU-GPU sync.

    Args:
        module: The module that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        small: Keeps the small state that it begins with.

    Attributes:
        module, args, kwargs: The same, by reference.
        state: What else the forward begins with.
        has_autograd: Autograd is on.
        output: What it has returned.
        is_on_device: The model is on another device than the CPU.
        num_tokens: The number of tokens of a language model's call; 0 for any other.
        has_one_token: It is a language model's call with one token a row.
    """

    def __init__(
        self, module: nn.Module, args: Any, kwargs: Any, small: SmallState
    ) -> None:
        self.module, self.args, self.kwargs = module, tuple(args), dict(kwargs)
        self._small, self.state = small, small.before(module)
        self.is_on_device = bool(small.devices)
        self.ambient = Ambient(module, small.devices, self.state.random)
        self.has_autograd = torch.is_grad_enabled()
        self.output: Any = None
        values = (*self.args, *self.kwargs.values())
        found = _C.HeldValues(values, _SMALL)
        self._containers, self._items = found.containers, found.items
        self._tensors, self._versions = found.tensors, found.versions
        self.counters: _Pairs = [(each, each.clone()) for each in found.counters]
        rows, columns = self._size_of_ids()
        self.num_tokens, self.has_one_token = rows * columns, columns == 1

    def end(self, output: Any = None) -> None:
        """Notes what it has returned, and what it has changed in its module."""
        self.output = output
        self._small.after(self.state)

    @property
    def sizes(self) -> list[int]:
        """The lengths of the tensors that it is given, each once: numbers of rows."""
        given = tensors((self.args, self.kwargs))
        return list(dict.fromkeys(len(each) for _, each in given if each.dim()))

    def rows_of(self, num: int) -> list[torch.Tensor]:
        """The tensors that it is given with several rows for each of some names."""
        given = [t for t in self._given() if type(t) is torch.Tensor and t.dim()]
        return [t for t in given if num > 1 and len(t) > num and not len(t) % num]

    def _size_of_ids(self) -> tuple[int, int]:
        ids = self.kwargs.get("input_ids", self.args[0] if self.args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return 0, 0
        rows, columns = ids.shape
        return (rows, columns) if ids.dtype in _OF_IDS else (0, 0)

    def written(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields those that the call was not given, or that were written to since."""
        known = dict(zip(map(id, self._tensors), self._versions, strict=True))
        versions = _C.versions_of(list(tensors))
        for tensor, version in zip(tensors, versions, strict=True):
            if known.get(id(tensor)) != version or tensor.is_inference():
                yield tensor

    def left_bad(self) -> _Pairs:
        """Lists inputs and buffers that were written to and are non-finite now.

        Incurs a CPU-GPU sync for each tensor on a device that was written to.

        Returns:
            Each with a copy that has 0 for what is not finite. A cache of a fixed size
            begins with zeros, and what this forward or a later one has left there was
            not there when it began.
        """
        written = list(self.written(self._tensors[len(self._given()) :]))
        written += self.state.written_buffers()
        plain = [e for e in written if is_plain(e) and e.is_floating_point()]
        bad = itertools.compress(plain, are_nonfinite(plain))
        with torch.inference_mode(False), torch.no_grad():
            return [(each, each.nan_to_num(0.0, 0.0, 0.0)) for each in bad]

    def _given(self) -> list[torch.Tensor]:
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, torch.Tensor)]

    def again(self, zeroed: _Pairs) -> tuple[KeptCall, ForwardStart]:
        """The call with its arguments as they were, and what a replay rewinds to.

        Of the tensors that it has written to, such as a cache, the call has copies: the
        program goes on with its own.

        Args:
            zeroed: See `left_bad()`.
        """
        others = {id(tensor): other for tensor, other in zeroed}
        written = {id(each) for each in self.written(self._tensors)}
        with torch.inference_mode(False), torch.no_grad():  # a replay writes to them
            counters = [(value.clone(), value) for _, value in self.counters]
            for (tensor, _), (copy, _) in zip(self.counters, counters, strict=True):
                others[id(tensor)] = copy
            for tensor in self._tensors:
                if id(tensor) in written and id(tensor) not in others:
                    others[id(tensor)] = tensor.clone()
        call = self._kept(others)
        state, ids = self.state, set(map(id, self._tensors))
        buffers = [pair for pair in zeroed if id(pair[0]) not in ids]
        start = ForwardStart(state.attributes, [*state.pairs(), *counters, *buffers])
        if zeroed:  # that it saw other data is said of these
            return call, start
        seen = {id(each) for each in self._tensors if not each.is_inference()}
        own = {id(other) for key, other in others.items() if key in written & seen}
        call.take_as_written(own)
        return call, start

    def _kept(self, others: Mapping[int, torch.Tensor]) -> KeptCall:
        """The call with the arguments as they were, and with other tensors, by ids."""
        now = list(map(_items_of, self._containers))
        try:
            for container, items in zip(self._containers, self._items, strict=True):
                _fill(container, items)
            batch = mapped(
                (self.args, self.kwargs),
                lambda tensor: others.get(id(tensor), tensor),
                CALL_DEPTH,
                anew=True,
                has_empty=True,
            )
        finally:
            for container, items in zip(self._containers, now, strict=True):
                _fill(container, items)
        call = KeptCall(self.module, batch, self.ambient)
        call.has_backward, call.has_autograd = False, self.has_autograd
        return call


class CallHolder:
    """Holds forwards, and for each module the small state that they change."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[nn.Module, SmallState]
        self._states = weakref.WeakKeyDictionary()

    def hold(self, module: nn.Module, args: Any, kwargs: Any) -> HeldCall:
        """Holds a forward that begins."""
        small = self._states.get(module)
        if small is None:
            small = self._states[module] = SmallState()
        return HeldCall(module, args, kwargs, small)


def _items_of(container: Any) -> Any:
    return list(container) if isinstance(container, list) else dict(container)


def _fill(container: Any, items: Any) -> None:
    """Makes a list or dict hold other items, without its class's own methods."""
    base: Any = solid_base(type(container))
    base.clear(container)
    (base.extend if isinstance(container, list) else base.update)(container, items)
