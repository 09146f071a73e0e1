"""The arguments of a forward without autograd, held so that it can be made again.

A token of a small model takes milliseconds. So nothing is rebuilt here: of each list
and dict below the arguments, such as those of a cache, the items are noted, and a copy
of the arguments as they were is made where a forward is run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.tree import CALL_DEPTH, mapped, solid_base, tensors
from ...scanner.ops import scan
from ..kept_calls.ambient import Ambient
from ..kept_calls.kept_call import KeptCall
from ..undo.kept_objects import ATOMS
from ..watching.inputs import is_plain
from .forward_start import ForwardStart

_MOST = 512  # containers below the arguments; chosen, not measured
_SMALL = 64  # elements: of a counter, such as a cache's length
_OF_IDS = (torch.int64, torch.int32)
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_NOT_OPENED = (nn.Module, type, torch.Generator)


class Layout:
    """The lists and dicts below a call's arguments, found once for many calls.

    Args:
        values: The arguments.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.containers: list[Any] = []
        self.is_whole = True
        self._known = set[int]()
        self._tuples: list[Any] = []  # their ids are of them as long as this lives
        self._waiting = list(values)
        self._walk()

    def _walk(self) -> None:
        while self._waiting:
            value = self._waiting.pop()
            kind = type(value)
            if kind in ATOMS or isinstance(value, torch.Tensor):
                continue
            if id(value) in self._known:
                continue
            if len(self._known) >= _MOST:
                self.is_whole = False
                return
            self._known.add(id(value))
            self._tuples.append(value)
            if isinstance(value, dict):
                self.containers.append(value)
                self._waiting += value.values()
            elif isinstance(value, list):
                self.containers.append(value)
                self._waiting += value
            elif isinstance(value, tuple):
                self._waiting += value
            elif not isinstance(value, _NOT_OPENED) and not callable(value):
                self._waiting.append(getattr(value, "__dict__", None))

    def copies(self) -> list[Any] | None:
        """The contents of the containers now; None if they hold other containers."""
        found = []
        for container in self.containers:
            copy: Any = _items_of(container)
            found.append(copy)
            for value in copy if isinstance(copy, list) else copy.values():
                if type(value) is torch.Tensor or type(value) in ATOMS:
                    continue
                if id(value) not in self._known and not isinstance(value, torch.Tensor):
                    return None
        return found

    def is_of(self, values: Sequence[Any]) -> bool:
        """True if it was made of the same arguments, but for tensors and numbers."""
        return all(
            type(value) is torch.Tensor
            or type(value) in ATOMS
            or id(value) in self._known
            for value in values
        )


class HeldCall:
    """One outermost forward without autograd, as it was called.

    Does not incur a CPU-GPU sync.

    Args:
        module: The module that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        devices: Those of the model, besides the CPU.
        layout: The layout of the call before, or None.

    Attributes:
        module, args, kwargs: The same, by reference.
        layout: That of the arguments.
        has_autograd: Autograd is on.
        output: What it has returned.
        state: What else the forward began with.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        devices: Sequence[torch.device],
        layout: Layout | None,
    ) -> None:
        self.module, self.args, self.kwargs = module, tuple(args), dict(kwargs)
        values = (*self.args, *self.kwargs.values())
        copies = None
        if layout is not None and layout.is_of(values):
            copies = layout.copies()
        if layout is None or copies is None:
            layout = Layout(values)
            copies = layout.copies() or []
        self.layout = layout
        self._copies = copies
        self.ambient = Ambient(module, devices)
        self.has_autograd = torch.is_grad_enabled()
        self.output: Any = None
        self.state: ForwardStart | None = None
        self._tensors = self._given()
        for copy in copies:
            items = copy if isinstance(copy, list) else copy.values()
            self._tensors += [t for t in items if isinstance(t, torch.Tensor)]
        self._versions = _C.versions_of(self._tensors)
        self.counters: _Pairs = [
            (each, each.clone())
            for each in self._tensors
            if each.numel() <= _SMALL and type(each) is torch.Tensor and each.dim() < 2
        ]

    @property
    def sizes(self) -> list[int]:
        """The lengths of the tensors that it is given, each once: numbers of rows."""
        given = tensors((self.args, self.kwargs))
        return list(dict.fromkeys(len(each) for _, each in given if each.dim()))

    @property
    def size(self) -> int | None:
        """The number of rows: of the first tensor that is given; None without one."""
        given = (*self.args, *self.kwargs.values())
        sizes = (len(t) for t in given if isinstance(t, torch.Tensor) and t.dim())
        return next(sizes, None)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a language model's call; 0 for any other."""
        ids = self.kwargs.get("input_ids", self.args[0] if self.args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return 0
        return ids.numel() if ids.dtype in _OF_IDS else 0

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
        written += [] if self.state is None else self.state.written_buffers()
        plain = [e for e in written if is_plain(e) and e.is_floating_point()]
        stats = zip(plain, scan(plain), strict=True)
        bad = [each for each, stat in stats if stat.has_nan or stat.has_inf]
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
        state = ForwardStart([], []) if self.state is None else self.state
        ids = set(map(id, self._tensors))
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
        containers = self.layout.containers
        now = list(map(_items_of, containers))
        try:
            for container, items in zip(containers, self._copies, strict=True):
                _fill(container, items)
            batch = mapped(
                (self.args, self.kwargs),
                lambda tensor: others.get(id(tensor), tensor),
                CALL_DEPTH,
                anew=True,
                has_empty=True,
            )
        finally:
            for container, items in zip(containers, now, strict=True):
                _fill(container, items)
        call = KeptCall(self.module, batch, self.ambient)
        call.has_backward, call.has_autograd = False, self.has_autograd
        return call


def _items_of(container: Any) -> Any:
    return list(container) if isinstance(container, list) else dict(container)


def _fill(container: Any, items: Any) -> None:
    """Makes a list or dict hold other items, without its class's own methods."""
    base: Any = solid_base(type(container))
    base.clear(container)
    (base.extend if isinstance(container, list) else base.update)(container, items)
