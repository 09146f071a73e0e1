"""The small state of a model between forwards: counters, flags, small buffers."""

from __future__ import annotations

import torch
from torch import nn

from ... import _C
from ...base.modules import buffers_of, modules_in
from ...base.tensors import devices_of
from ..undo.attributes import KeptAttributes
from ..undo.random import RandomStates

_SMALL = 64  # elements of a buffer: a larger one is not copied before each forward
_FULL = (1, 2, 8, 64, 512, 4096)
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class ForwardStart:
    """A model's small state when a forward began, as a replay rewinds to it.

    It has the form of a `ModelRestorePoint`, of which a replay reads these.

    Args:
        attributes: The plain attributes of modules.
        pairs: Small tensors, with what was in them.
        versions: All buffers, with their versions.
        random: Random states as they were, or those of an earlier forward, where
            forwards draw no random numbers; None for those of now.
    """

    is_taken = True
    buffers = around = ()

    def __init__(
        self,
        attributes: list[KeptAttributes],
        pairs: _Pairs,
        versions: tuple[list[torch.Tensor], list[int]] = ([], []),
        random: RandomStates | None = None,
    ) -> None:
        self.random = random
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

    All attributes and random states are kept before forwards 1, 2, 8, 64, ...; those
    that were seen to change, before each. Small buffers are copied where they were
    written to.

    Attributes:
        devices: Those of the model, besides the CPU.
    """

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._num = self._num_small = 0
        self._draws = False  # random numbers: in one of those forwards, or in training
        self._random: RandomStates | None = None
        self._all: list[torch.Tensor] = []
        self._changing: dict[int, nn.Module] = {}
        self._versions: list[int] = []  # of the small ones, which come first
        self._pairs: _Pairs = []

    def before(self, model: nn.Module) -> ForwardStart:
        """Keeps it as a forward begins."""
        self._num += 1
        is_full = self._num in _FULL
        if is_full:
            self.devices = [d for d in devices_of([model]) if d.type != "cpu"]
            self._all = sorted(buffers_of(model), key=torch.Tensor.numel)
            self._num_small = sum(each.numel() <= _SMALL for each in self._all)
            self._versions = []
        if is_full or self._draws or model.training:
            self._random = RandomStates(self.devices)
        versions = _C.versions_of(self._all)
        small = versions[: self._num_small]
        if small != self._versions:
            self._versions = small
            own = self._all[: self._num_small]
            self._pairs = [(each, each.detach().clone()) for each in own]
        modules = modules_in(model) if is_full else list(self._changing.values())
        kept = list(map(KeptAttributes, filter(KeptAttributes.are_kept, modules)))
        versions_of = self._all, versions
        return ForwardStart(kept, self._pairs, versions_of, self._random)

    def after(self, start: ForwardStart) -> None:
        """Notes which modules a forward has changed, and if it has drawn numbers."""
        if start.random is not None and not self._draws and self._num in _FULL:
            self._draws = bool(start.random.drawn())
        for kept in start.attributes:
            module = kept.module()
            if module is None or id(module) in self._changing:
                continue
            if kept.has_changed():
                self._changing[id(module)] = module
