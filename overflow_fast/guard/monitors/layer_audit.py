"""Computes one layer of a step again, and compares the bits: silent data corruption."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.module_kinds import is_linear, is_normalization, is_of_torch
from ...base.modules import Handles, children_of, tensors_of
from ...base.tensors import place_of
from ...torch_internals.cached_casts import without_cached_casts
from ...torch_internals.compiler import has_compiled
from ...torch_internals.running import is_recorded
from ..kinds import whole
from ..options import option
from ..undo.tensors import is_same_bits
from .monitor import Guarded, Monitor

_log = logging.getLogger("overflow_fast")
_NUM_AGAIN = 2  # so that three results agree before another one is called wrong


@dataclass(frozen=True)
class LayerAudit(Monitor):
    """Silent data corruption: a layer that gives other bits when it is run again."""

    needs_magnitudes = False

    every: int = field(
        default=1000,
        metadata=option(
            "In one step of this many compute one layer again, a different one each "
            "time, and compare the bits.",
            whole(1),
            see="guides/production.md#what-hooks-cannot-see",
        ),
    )

    def start(self, guarded: Guarded) -> Monitor:
        return LayerAuditor(guarded, self.every)


class LayerAuditor(Monitor):
    """Computes one layer again in one step of so many, a different one each time.

    Layers without random numbers and without submodules: linear layers, convolutions,
    embeddings and normalizations of torch. Nothing runs again but the layer's own
    forward, without autograd. In steps in between no module has a hook. Not in compiled
    code. Incurs a CPU-GPU sync in the steps that are audited.

    Args:
        guarded: The training.
        every: One step in this many is audited.

    Attributes:
        num_audited: The number of layers that were computed again.
        num_different: The number of those whose bits differed.
    """

    def __init__(self, guarded: Guarded, every: int) -> None:
        self._guarded = guarded
        self._every = every
        self._handles = Handles()
        self._next = 0
        self._unsteady: set[str] = set()  # layers that are not audited any more
        self.num_audited = 0
        self.num_different = 0

    def begin_step(self, step: int) -> None:
        """Puts a hook on the layer that is audited, if the step is one of those."""
        self.stop()
        if step % self._every or has_compiled():
            return
        layers = [
            (watch, index, module)
            for watch in self._guarded.watches
            for index, module in watch.modules.present()
            if watch.modules.is_selected(index) and _is_auditable(module)
            if watch.name_at(index) not in self._unsteady
        ]
        if not layers:
            return
        watch, index, module = layers[self._next % len(layers)]
        self._next += 1
        name = watch.name_at(index)

        versions: list[int] = []

        def begin(layer: nn.Module, args: Any) -> None:
            with self._guarded.isolated():
                versions[:] = _versions(layer)

        def audit(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.stop()  # its first call alone
            with self._guarded.isolated():
                # A layer that writes to its weights, as an embedding with
                # `max_norm` does, gives other bits the second time.
                if versions == _versions(layer):
                    self._audit(step, name, layer, args, kwargs, output)

        self._handles += [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(audit, prepend=True, with_kwargs=True),
        ]

    def stop(self) -> None:
        """Removes the hooks."""
        self._handles.remove_all()

    def metrics(self) -> dict[str, float]:
        return {
            "layers_audited_total": self.num_audited,
            "layers_different_total": self.num_different,
        }

    def _audit(
        self,
        step: int,
        name: str,
        layer: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        if not isinstance(output, torch.Tensor) or is_recorded():
            return
        # Such a layer writes to nothing and draws nothing: what is left to keep apart
        # are autocast's copies of its weights, made here without autograd.
        with without_cached_casts(layer.parameters()), torch.no_grad():
            self.num_audited += 1
            first = layer.forward(*args, **kwargs)
            if is_same_bits(first, output):
                return
            again = [layer.forward(*args, **kwargs) for _ in range(_NUM_AGAIN)]
        self.num_different += 1
        num_changed = _num_different(first, output)
        if not all(is_same_bits(each, first) for each in again):
            self._unsteady.add(name)
            _log.warning(
                "Step %d: %s gives other bits each time it is computed from the same "
                "inputs: its kernels are not deterministic, or its device is faulty.\n"
                "It is not audited any more.",
                step,
                name,
            )
            return
        _log.warning(
            "Step %d: %s returned %d of %d values with other bits than %d computations "
            "from the same inputs, which agree: silent data corruption, or a race.\n"
            "Where: %s.",
            step,
            name,
            num_changed,
            output.numel(),
            1 + _NUM_AGAIN,
            place_of(output.device),
        )


def _versions(layer: nn.Module) -> list[int]:
    tensors = tensors_of(layer)
    return _C.versions_of([each for each in tensors if not each.is_inference()])


def _is_auditable(module: nn.Module) -> bool:
    if children_of(module) or not is_of_torch(module):
        return False
    is_running = getattr(module, "track_running_stats", False)
    is_known = is_linear(module) or is_normalization(module)
    return (is_known or isinstance(module, nn.Embedding)) and not is_running


def _num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return b.numel()
    own, other = (
        each.detach().contiguous().view(torch.uint8).reshape(each.numel(), -1)
        for each in (a, b)
    )
    return int((own != other).any(1).sum())
