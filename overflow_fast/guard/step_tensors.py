"""What is scanned when a step is judged: gradients, weights, buffers, state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from .. import _C
from ..selection import Named
from .cadence import Level
from .watch import ModelWatch


class StepTensors:
    """The tensors of a step that stand in no module's call, one scan for each kind.

    Attributes:
        without_gradient: How many parameters had none at the last scan.
        found: The tensors of the last scan, by their phase's name and their own, until
            `forget()`.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._wanted = watches[0].wanted
        self._has_scanned_weights = False
        self.without_gradient = 0
        self.found: dict[tuple[str, str], torch.Tensor] = {}

    def begin_round(self) -> None:
        """Has weights and buffers scanned again: once for all optimizers of a step."""
        self._has_scanned_weights = False
        for watch in self._watches:
            watch.recorder.forget_parameters()

    def forget(self) -> None:
        """Lets go of the tensors."""
        self.found = {}

    def scan(self, optimizer: Optimizer | None, level: Level) -> None:
        """Scans what is wanted. Does not incur a CPU-GPU sync.

        Args:
            optimizer: Whose parameters' gradients and state to look at; None for the
                gradients of all parameters.
            level: How much to look at.
        """
        if level is Level.ALL and not self._has_scanned_weights:
            self._has_scanned_weights = True
            self._scan_models()
        if self._wanted.gradients:
            self._scan_gradients(optimizer)
        if level is Level.ALL and self._wanted.optimizer_state and optimizer:
            self._record(0, _C.Phase.OPTIMIZER_STATE, self._state(optimizer))

    def _record(self, index: int, phase: _C.Phase, named: Named) -> None:
        pairs = zip(*named, strict=True)
        self.found.update({(phase.name, name): tensor for name, tensor in pairs})
        self._watches[index].record(phase, named)

    def _scan_models(self) -> None:
        for i, watch in enumerate(self._watches):
            model = watch.model
            if model is None:
                continue
            if self._wanted.weights:
                self._record(i, _C.Phase.WEIGHTS, watch.tensors.parameters(model))
            if self._wanted.buffers:
                self._record(i, _C.Phase.BUFFERS, watch.tensors.buffers(model))

    def _scan_gradients(self, optimizer: Optimizer | None) -> None:
        owned = None if optimizer is None else {id(p) for p in _parameters(optimizer)}
        self.without_gradient = 0
        for i, watch in enumerate(self._watches):
            model = watch.model
            if model is not None:
                names, parameters = watch.tensors.parameters(model)
                pairs = [
                    (name, parameter)
                    for name, parameter in zip(names, parameters, strict=True)
                    if owned is None or id(parameter) in owned
                ]
                self._record(i, _C.Phase.GRADIENTS, self._gradients(pairs))
        if optimizer is not None:
            strangers = self._gradients(self._strangers(optimizer))
            self._record(0, _C.Phase.GRADIENTS, strangers)

    def _gradients(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        names: list[str] = []
        gradients: list[torch.Tensor] = []
        for name, parameter in named:
            if parameter.grad is not None:
                names.append(name)
                gradients.append(parameter.grad)
            elif parameter.requires_grad:
                self.without_gradient += 1
        return names, gradients

    def _strangers(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """An optimizer's parameters that are in no watched model."""
        known = {
            id(parameter)
            for watch in self._watches
            if (model := watch.model) is not None
            for parameter in model.parameters()
        }
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    yield f"param_groups[{i}]['params'][{j}]", parameter

    def _state(self, optimizer: Optimizer) -> Named:
        names_of: dict[int, str] = {}
        for watch in self._watches:
            if (model := watch.model) is not None:
                named = watch.tensors.parameters(model)
                names_of.update((id(p), n) for n, p in zip(*named, strict=True))
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for i, (parameter, state) in enumerate(optimizer.state.items()):
            name = names_of.get(id(parameter), f"state[{i}]")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    names.append(f"{name}.{key}")
                    tensors.append(value)
        return names, tensors


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
