"""The arguments of a forward without autograd, held so that it can be made again.

A token of a small model takes milliseconds. So nothing is rebuilt here: of each list
and dict below the arguments, such as those of a cache, the items are noted, and a copy
of the arguments as they were is made where a forward is run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.modules import buffers_of, modules_in
from ...base.tree import CALL_DEPTH, mapped, solid_base, tensors
from ...scanner.ops import are_nonfinite
from ..kept_calls.ambient import Ambient
from ..kept_calls.kept_call import KeptCall
from ..undo.attributes import KeptAttributes
from ..undo.kept_objects import ATOMS
from ..watching.inputs import is_plain

_MOST = 512  # containers below the arguments; chosen, not measured
_SMALL = 64  # elements: of a counter, such as a cache's length
_OF_IDS = (torch.int64, torch.int32)
_FULL = (1, 2, 8, 64, 512, 4096)
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


# What a model keeps from forward to forward: counters, flags, small buffers.


class ForwardStart:
    """A model's small state when a forward began, as a replay rewinds to it.

    It has the form of a `ModelRestorePoint`, of which a replay reads these.

    Args:
        attributes: The plain attributes of modules.
        pairs: Small tensors, with what was in them.
        versions: All buffers, with their versions.
    """

    is_taken = True
    buffers = ()

    def __init__(
        self,
        attributes: list[KeptAttributes],
        pairs: _Pairs,
        versions: tuple[list[torch.Tensor], list[int]] = ([], []),
    ) -> None:
        self.attributes = attributes
        self._pairs = pairs
        self._buffers, self._versions = versions

    def written_buffers(self) -> list[torch.Tensor]:
        """The buffers that were written to since."""
        now = _C.versions_of(self._buffers)
        triples = zip(self._buffers, self._versions, now, strict=True)
        return [buffer for buffer, before, after in triples if before != after]

    @property
    def starts(self) -> list[ForwardStart]:
        """This one, as the start of the models of a replay."""
        return [self]

    def written(self) -> _Pairs:
        """The small tensors, and what was in them."""
        return self._pairs

    def pairs(self) -> _Pairs:
        """See `written()`."""
        return self._pairs

    def held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor when the forward began; None if that is not known."""
        return next((value for own, value in self._pairs if own is tensor), None)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """False: no forward without autograd was seen to write to a weight."""
        return False

    def written_in_step(self, tensor: torch.Tensor) -> bool:
        """See `is_known()`."""
        return False


class SmallState:
    """Keeps the small state of one model before each of its forwards.

    All attributes are kept before forwards 1, 2, 8, 64, ...; those that were seen to
    change, before each. Small buffers are copied where they were written to.

    Args:
        model: The model, which the caller holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._num = 0
        self._all: list[torch.Tensor] = []
        self._changing: dict[int, nn.Module] = {}
        self._buffers: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._copies: list[torch.Tensor] = []

    def before(self, model: nn.Module) -> ForwardStart:
        """Keeps it as a forward begins."""
        self._num += 1
        is_full = self._num in _FULL
        if is_full:
            self._all = buffers_of(model)
            self._buffers = [each for each in self._all if each.numel() <= _SMALL]
            self._versions = []
        versions = _C.versions_of(self._buffers)
        if versions != self._versions:
            self._versions = versions
            self._copies = [each.detach().clone() for each in self._buffers]
        modules = modules_in(model) if is_full else list(self._changing.values())
        kept = list(map(KeptAttributes, filter(KeptAttributes.are_kept, modules)))
        pairs = list(zip(self._buffers, self._copies, strict=True))
        return ForwardStart(kept, pairs, (self._all, _C.versions_of(self._all)))

    def after(self, start: ForwardStart) -> None:
        """Notes which modules a forward has changed."""
        for kept in start.attributes:
            module = kept.module()
            if module is None or id(module) in self._changing:
                continue
            if kept.has_changed():
                self._changing[id(module)] = module
