"""The tensors that are scanned when a step is judged: gradients, weights and more.

Modules' calls show the rest. In a step:

1. `begin_round()` makes weights and buffers due: they are scanned once for all
   optimizers that step one after the other.
2. `clippings` takes the norms that the program's clipping computes. Where a norm is
   finite, so are the gradients it is of, and reading them again is saved.
3. `scan()`, before an optimizer's step, records weights and buffers, then the gradients
   of its parameters, then its state. It waits for the device only to read a norm that
   clipping has computed.
4. `scan_update()`, behind an optimizer's step, scans what that has written.
5. `forget()` releases all tensors.

The state between these calls:

- `_scanned`: the names and tensors that were recorded, for `find()`.
- `_last_gradients`: what the gradient of each parameter held that was scanned last:
  with several optimizers only new ones are scanned.
- `_has_scanned_weights`: the weights of this round were scanned.
- `_num_rounds`: the number of rounds, since weights may be due in one of several only.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import _C
from ...base import tree
from ...base.modules import stepped_by
from ...detector.selection import Named
from ...torch_internals.tensor_internals import is_wrapper, local_tensor
from ..optimizers.engine_gradients import engine_gradients
from ..optimizers.held_optimizers import optimizers_in
from .clippings import Clippings
from .watch import ModelWatch

NORM = "grad_norm"  # what `record()` calls the norm of all gradients
_Listed = list[tuple[ModelWatch, nn.Module, Named]]


class JudgedTensors:
    """The tensors of a step that belong to no module's call, one scan for each kind.

    Args:
        watches: The watched models.
        weights_every: Scan weights that are not watched in one round of so many; None
            for never.

    Attributes:
        clippings: The norms of gradients that clipping has computed in the step.
        without_gradient: How many parameters had none at the last scan.
        num_gradients: How many gradients there were.
    """

    def __init__(
        self, watches: Sequence[ModelWatch], weights_every: int | None = None
    ) -> None:
        self._watches = watches
        self._wanted = watches[0].wanted
        self._has_scanned_weights = False
        self._scanned: list[tuple[_C.FrameKind, Named]] = []
        self._last_gradients: dict[int, _C.Contents] = {}
        self.clippings = Clippings()
        self.without_gradient = self.num_gradients = 0
        self._weights_every = weights_every
        self._num_rounds = 0

    def begin_round(self) -> None:
        """Makes the next scan include weights and buffers, once for all optimizers."""
        self._has_scanned_weights = False
        self._num_rounds += 1
        for watch in self._watches:
            watch.recorder.forget_parameters()

    def forget(self) -> None:
        """Releases the tensors."""
        self._scanned = []
        self.clippings.clear()

    def find(self, kind: _C.FrameKind, name: str) -> torch.Tensor | None:
        """Returns a tensor of the last scan, until `forget()`."""
        for scanned, (names, tensors) in self._scanned:
            if scanned == kind and name in names:
                return tensors[names.index(name)]
        return None

    def scan(
        self,
        optimizer: Optimizer | None,
        others: Sequence[Optimizer] = (),
        engine: Sequence[Any] = (),
    ) -> None:
        """Scans the wanted tensors. Incurs a CPU-GPU sync for a norm of clipping only.

        Args:
            optimizer: The optimizer whose parameters' gradients and state to scan;
                None for the gradients of all parameters.
            others: The optimizers that step next. Those of their parameters' gradients
                that are new since the last scan are scanned too.
            engine: The layers of an engine's optimizer. Where torch's within steps
                copies, all gradients are scanned, and those that the engine keeps.
        """
        listed = self._listed()
        if not self._has_scanned_weights:
            self._has_scanned_weights = True
            self._scan_models(listed)
        if self._wanted.gradients:
            self._scan_gradients(optimizer, listed, others, engine)
        if self._wanted.optimizer_state and optimizer:
            state = state_of(optimizer, self._names())
            self._record(self._watches[0], _C.FrameKind.OPTIMIZER_STATE, state)

    def scan_gradients(self) -> None:
        """Scans all gradients alone, if they are wanted. Incurs no CPU-GPU sync."""
        if self._wanted.gradients:
            self._scan_gradients(None, self._listed(), (), ())

    def are_gradients_zero(self) -> bool:
        """True if the last scan had gradients, and found no finite number but 0.

        Once its stats have arrived. Those that a norm of clipping stands for were not
        read. Does not incur a CPU-GPU sync.
        """
        is_zero = not any(each.recorder.largest_gradient for each in self._watches)
        return is_zero and self.num_gradients > 0

    def scan_update(
        self, optimizer: Optimizer, has_state: bool = True
    ) -> dict[str, torch.Tensor]:
        """Scans what an optimizer's step has written: its weights and its state.

        Does not incur a CPU-GPU sync.

        Args:
            optimizer: The optimizer.
            has_state: Scan its state, too.

        Returns:
            The weights, by name.
        """
        known = self._names()
        named = {
            known.get(id(p), f"param_groups[{i}]['params'][{j}]"): p
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
        watch = self._watches[0]
        watch.recorder.forget_parameters()  # they are others now
        weights = list(named), list(named.values())
        self._record(watch, _C.FrameKind.WEIGHTS, weights)
        if has_state:
            state = state_of(optimizer, self._names())
            self._record(watch, _C.FrameKind.OPTIMIZER_STATE, state)
        return named

    def _listed(self) -> _Listed:
        """Lists the parameters of each watched model that still exists."""
        return [
            (watch, model, watch.tensors.parameters(model))
            for watch in self._watches
            if (model := watch.model) is not None
        ]

    def _record(self, watch: ModelWatch, kind: _C.FrameKind, named: Named) -> None:
        self._scanned.append((kind, named))
        names, tensors = named
        if tensors:
            watch.recorder.record(kind, names, tensors)

    def _scan_models(self, listed: _Listed) -> None:
        every = self._weights_every
        is_sampled = every is not None and self._num_rounds % every == 0
        for watch, model, parameters in listed:
            if is_sampled or self._wanted.weights:
                self._record(watch, _C.FrameKind.WEIGHTS, parameters)
            if self._wanted.buffers:
                self._record(watch, _C.FrameKind.BUFFERS, watch.tensors.buffers(model))

    def _scan_gradients(
        self,
        optimizer: Optimizer | None,
        listed: _Listed,
        others: Sequence[Optimizer],
        engine: Sequence[Any],
    ) -> None:
        self.without_gradient = self.num_gradients = 0
        # Those that are left in the end are no parameters of selected modules.
        owned = {} if optimizer is None else {id(p): p for p in stepped_by(optimizer)}
        for other in others:
            owned.update((id(p), p) for p in stepped_by(other) if self._is_new(p))
        if others or self._last_gradients:
            self._note_gradients(owned.values())
        num_kept = 0
        if engine and not any(id(p) in owned for _, _, (_, own) in listed for p in own):
            num_kept = self._scan_kept(engine)
            optimizer = None  # it steps copies: all gradients are the engine's
        covered = self._covered(
            [p for _, _, (_, own) in listed for p in own]
            if optimizer is None
            else owned.values()
        )
        for watch, _, (names, parameters) in listed:
            if optimizer is not None:
                is_own = [owned.pop(id(p), None) is not None for p in parameters]
                names = list(itertools.compress(names, is_own))
                parameters = list(itertools.compress(parameters, is_own))
            named = self._gradients(names, parameters, covered)
            self._record(watch, _C.FrameKind.GRADIENTS, named)
        if optimizer is not None and owned:
            named = self._gradients(*self._foreign(optimizer, set(owned)), covered)
            self._record(self._watches[0], _C.FrameKind.GRADIENTS, named)
        if num_kept:  # here, or in the part of another rank
            self.without_gradient = 0

    def _covered(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Returns the identities of parameters whose gradients a norm stands for.

        Such norms are recorded: spikes are looked for in them then.

        Args:
            parameters: Those whose gradients are to be scanned.
        """
        if not self.clippings:  # most guards
            return set()
        wanted = {id(p) for p in parameters if _gradient_of(p) is not None}
        covered, norms = self.clippings.standing_for(wanted)
        for norm in norms:
            named = [NORM], [norm]
            self._record(self._watches[0], _C.FrameKind.RECORDED, named)
        return covered

    def _scan_kept(self, engine: Sequence[Any]) -> int:
        """Scans the gradients that an engine's optimizer keeps; returns how many."""
        named = engine_gradients(engine, self._names())
        self.num_gradients += len(named[0])
        self._record(self._watches[0], _C.FrameKind.GRADIENTS, named)
        return len(named[0])

    def pass_over(self, optimizer: Optimizer) -> None:
        """Takes the gradients of a step for scanned: its round has a verdict already.

        They may stay until the next backward of this optimizer's own loss, while
        another one steps.
        """
        self._note_gradients(stepped_by(optimizer))

    def _note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self._last_gradients.update(
            (id(each), _C.Contents(each.grad))
            for each in parameters
            if each.grad is not None
        )

    def _is_new(self, parameter: torch.Tensor) -> bool:
        """True if a gradient was made, or written to, since its last scan."""
        gradient = parameter.grad
        if gradient is None:
            return False
        last = self._last_gradients.get(id(parameter))
        return last is None or not last.are_in(gradient)

    def _gradients(
        self,
        names: list[str],
        parameters: Sequence[torch.Tensor],
        covered: Container[int],
    ) -> Named:
        """Lists gradients, but for those of the parameters of these identities."""
        # No tuples: enough of them would start a garbage collection in each step.
        gradients = list(map(_gradient_of, parameters))
        both = zip(parameters, gradients, strict=True)
        missing = [p.requires_grad for p, gradient in both if gradient is None]
        self.num_gradients += len(gradients) - len(missing)
        self.without_gradient += sum(missing)
        both = zip(parameters, gradients, strict=True)
        is_taken = [g is not None and id(p) not in covered for p, g in both]
        found = itertools.compress(gradients, is_taken)
        taken = [gradient for gradient in found if gradient is not None]
        return list(itertools.compress(names, is_taken)), taken

    def _foreign(self, optimizer: Optimizer, unlisted: set[int]) -> Named:
        """Lists an optimizer's parameters outside of the models, or new in one."""
        for watch in self._watches:
            watch.tensors.refresh()
        known = self._names()
        selected = self._names(all_modules=False)
        found = [
            (selected.get(id(p), f"param_groups[{i}]['params'][{j}]"), p)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
            if id(p) in unlisted and (id(p) in selected or id(p) not in known)
        ]
        return [name for name, _ in found], [parameter for _, parameter in found]

    def _names(self, all_modules: bool = True) -> dict[int, str]:
        """Returns the names of the models' parameters, by identity."""
        names: dict[int, str] = {}
        for watch in self._watches:
            model = watch.model
            if model is not None:
                named = watch.tensors.parameters(model, all_modules)
                names.update((id(p), name) for name, p in zip(*named, strict=True))
        return names


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns a parameter's gradient; Megatron's are in a buffer, as `main_grad`."""
    gradient = parameter.grad
    if gradient is not None:
        return gradient
    main = getattr(parameter, "main_grad", None)
    return main if isinstance(main, torch.Tensor) else None


def state_of(optimizer: Optimizer, known: dict[int, str]) -> Named:
    """Lists the tensors of an optimizer's state.

    Args:
        optimizer: The optimizer.
        known: The names of parameters, by identity.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, each in optimizers_in(optimizer):
        for name, state in _states(each, path, known):
            # Also the parts of a quantized moment, such as its scales.
            for at, value in tree.tensors(state):
                key = "".join(f".{tree.plain_key(part.value)}" for part in at)
                for part, tensor in _parts(value):
                    # A wrapper's state may be that of what it wraps.
                    found.setdefault(id(tensor), (f"{name}{key}{part}", tensor))
    return [name for name, _ in found.values()], [t for _, t in found.values()]


def _states(
    optimizer: Any, path: str, known: dict[int, str]
) -> Iterator[tuple[str, object]]:
    """Yields the states that an optimizer keeps, with the names of their parameters."""
    states = getattr(optimizer, "state", None)
    if isinstance(states, Mapping):
        for i, (parameter, state) in enumerate(states.items()):
            yield known.get(id(parameter), f"{path}state[{i}]"), state


def _parts(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a tensor is made of, with the suffixes of their names."""
    if not isinstance(value, torch.Tensor):
        return
    if not is_wrapper(value) or local_tensor(value) is not None:
        yield "", value
        return
    for key in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        for behind, part in _parts(getattr(value, key)):
            yield f".{key}{behind}", part
