"""The self-test: plants faults in a model and checks that the guard finds them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..base.given_steps import call_with
from ..base.losses import model_loss_in
from ..base.modules import Handles
from ..base.text import aligned, printable
from ..base.tree import NotRebuilt, mapped, tensors_in
from ..detector.hooks import move_hook_to_front
from ..detector.selection import Selection, check_patterns
from ..explainer.effects.rule import EffectRule, StoppedError
from ..explainer.snapshot import Snapshot
from ..guard.verdict.attribution import attribute
from ..guard.verdict.bad_frames import collect
from ..guard.verdict.verdict import Verdict
from ..guard.watching.judged_tensors import JudgedTensors
from ..guard.watching.watch import ModelWatch, models_of
from ..torch_internals.compiled_calls import uncompiled_calls
from ..torch_internals.module_internals import forward_hooks

# The results of planted faults, as a table.


FAULTS = {"nan": math.nan, "inf": math.inf}
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class FaultResult:
    """The result of one planted fault.

    Attributes:
        layer: The qualified name of the module in whose output it was planted.
        class_name: The module's class.
        direction: "forward", in the output, or "backward", in its gradient.
        value: "nan" or "inf".
        is_planted: True if the layer was called, and backward reached it.
        is_caught: True if the guard raised an alarm.
        found_at: The place in the guard's report, or "".
        is_attributed: True if that is the layer.
    """

    layer: str
    class_name: str
    direction: str
    value: str
    is_planted: bool
    is_caught: bool
    found_at: str
    is_attributed: bool

    @property
    def text(self) -> str:
        """The result in a word or two."""
        if not self.is_planted:
            return "not reached"
        if not self.is_caught:
            return "MISSED"
        return "caught" if self.is_attributed else f"caught, BLAMED ON {self.found_at}"


@dataclass(frozen=True)
class SelfTestResult:
    """The results of all faults. `str()` of it is a table.

    Attributes:
        clean: The findings without a fault, in words; "" if there are none. If there
            are, no fault is planted.
        faults: The planted faults.
        not_chosen: How many layers were not tried.
        not_watched: The kinds of tensors that `watch` leaves out.
    """

    clean: str
    faults: list[FaultResult]
    not_chosen: int
    not_watched: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """True if the clean run was clean and each planted fault caught and attributed.

        False if nothing was planted at all.
        """
        planted = [fault for fault in self.faults if fault.is_planted]
        return (
            not self.clean
            and bool(planted)
            and all(fault.is_attributed for fault in planted)
        )

    def __str__(self) -> str:
        """Writes a line for each layer."""
        if self.clean:
            return (
                f"Nothing was planted: {self.clean} is not finite without a fault. "
                "Give a finite batch, or allow intended values (`allow=`)."
            )
        kinds = [(direction, value) for direction in DIRECTIONS for value in FAULTS]
        rows = [["layer", *(f"{direction} {value}" for direction, value in kinds)]]
        for at in range(0, len(self.faults), len(kinds)):
            of_layer = self.faults[at : at + len(kinds)]
            name = printable(f"{of_layer[0].layer} ({of_layer[0].class_name})")
            rows.append([name, *(fault.text for fault in of_layer)])
        lines = aligned(rows)
        planted = sum(fault.is_planted for fault in self.faults)
        caught = sum(fault.is_attributed for fault in self.faults)
        lines.append(
            f"{caught} of {planted} planted faults were caught and attributed; without "
            "a fault the guard raises no alarm."
        )
        if self.not_watched and caught < planted:
            kinds_missed = ", ".join(
                name.replace("_", " ") for name in self.not_watched
            )
            lines.append(f"Not checked (not in `watch`): {kinds_missed}.")
        if self.not_chosen:
            lines.append(f"{self.not_chosen} other layers were not tried (layers=).")
        return "\n".join(lines)


# Faults that are planted in a model, and the restoration of all they changed.


class Fault:
    """A bad value in a module's first output, or in the gradient of it, once.

    Args:
        module: The module.
        value: The value to plant.
        is_backward: Plant it in the gradient.

    Attributes:
        is_planted: True once it is planted.
    """

    def __init__(self, module: nn.Module, value: float, is_backward: bool) -> None:
        self._module = module
        self._value = value
        self._is_backward = is_backward
        self.is_planted = False

    def __enter__(self) -> Fault:
        self._handle = self._module.register_forward_hook(self._on_forward)
        move_hook_to_front(forward_hooks(self._module), self._handle.id)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.is_planted:
            return None
        first = first_float(output)
        if first is None:
            return None
        try:
            return mapped(output, lambda t: self._made(t) if t is first else t)
        except NotRebuilt:
            self.is_planted = False
            return None

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that the module returns instead of its own."""
        if not self._is_backward:
            return self._spoiled(tensor)
        # The output may be that of a module within, and is to be this one's own.
        copy = tensor.clone()
        if tensor.requires_grad:
            copy.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
        return copy

    def _on_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.is_planted else self._spoiled(gradient)

    def _spoiled(self, tensor: torch.Tensor) -> torch.Tensor:
        self.is_planted = True
        spoiled = tensor.clone()
        spoiled[(0,) * spoiled.dim()] = self._value
        return spoiled


def first_float(output: Any) -> torch.Tensor | None:
    """Finds the first floating-point tensor of an output that is not empty."""
    found = tensors_in(output)
    return next((t for t in found if t.is_floating_point() and t.numel()), None)


@contextlib.contextmanager
def everything_kept(models: Sequence[nn.Module]) -> Iterator[Snapshot]:
    """Restores weights, gradients, buffers, attributes and random states.

    Hooks behind gradients, as of an optimizer that steps there, are not called.

    Raises:
        RuntimeError: If something could not be put back.
    """
    with Snapshot({f"{i}.": m for i, m in enumerate(models)}) as state:
        yield state
    if state.problems:
        raise RuntimeError("\n".join(state.problems))


Loss = Callable[[Any], torch.Tensor]
_Layer = tuple[ModelWatch, int]
_SEEN_BY = ("activations", "grad_outputs")


class SelfTest:
    """A test of watches of its own on a model with planted faults.

    Args:
        watches: The watches; detached before and after.
        batch: The arguments of the model: a tuple or list, a dict of keyword arguments,
            or the one argument.
        loss: Calls the model with the batch and returns the tensor for backward; None:
            the loss that the model returns, or the sum of all it returns.
        layers: Patterns of the names of the layers to try.
        most: How many layers to try at most, spread over the model.
        gather: Gathers an object of each rank that shares the model.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        batch: Any,
        loss: Loss | None,
        layers: Sequence[str] | None,
        most: int,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._watches = watches
        self._batch = batch
        self._loss = loss or self._call
        self._rule = EffectRule()
        self._most = most
        self._layers = layers
        self._gather = gather
        names = [name for watch in watches for name in watch.modules.all_names()]
        check_patterns("layers", layers or (), names)

    def run(self) -> SelfTestResult:
        """Plants each fault once, and restores everything."""
        called: dict[_Layer, bool] = {}
        with self._attached():
            with self._noting(called):
                clean = self._judge_run()
            found, chosen = self._agreed(clean, self._choose(list(called)))
            faults = [
                self._try(watch, index, direction, value)
                for watch, index in chosen
                for direction in DIRECTIONS
                for value in FAULTS
            ]
        wanted = self._watches[0].wanted
        not_watched = [name for name in _SEEN_BY if not getattr(wanted, name)]
        not_chosen = len(called) - len(chosen)
        return SelfTestResult(found, faults, not_chosen, not_watched)

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        for watch in self._watches:
            watch.attach()
        try:
            yield
        finally:
            for watch in self._watches:
                watch.detach()

    def _models(self) -> list[nn.Module]:
        return list(models_of(self._watches).values())

    # The layers.

    def _agreed(self, clean: Verdict, chosen: list[_Layer]) -> tuple[str, list[_Layer]]:
        """Decides for all ranks: nothing if one has found something, else the same."""
        numbered = [(self._watches.index(watch), index) for watch, index in chosen]
        of_ranks = self._gather((clean, numbered))
        dirty = [verdict for verdict, _ in of_ranks if not verdict.is_clean]
        # A bad gradient that DDP has reduced is bad on every rank.
        worst = min(dirty, key=_is_of_gradient, default=None)
        if worst is not None:
            return _where(worst), []
        _, same = of_ranks[0]
        return "", [(self._watches[which], index) for which, index in same]

    @contextlib.contextmanager
    def _noting(self, called: dict[_Layer, bool]) -> Iterator[None]:
        """Notes the layers whose outputs a fault can be planted in."""

        def note(watch: ModelWatch, index: int, output: Any) -> None:
            if first_float(output) is not None:
                called[watch, index] = True

        handles = Handles()
        for watch in self._watches:
            for index in range(len(watch.modules.names)):
                module = watch.module_at(index)
                if module is not None and watch.modules.is_selected(index):
                    handles.append(
                        module.register_forward_hook(
                            lambda module, args, output, watch=watch, index=index: note(
                                watch, index, output
                            )
                        )
                    )
        with handles:
            yield

    def _choose(self, called: list[_Layer]) -> list[_Layer]:
        """Chooses the requested layers, or some from the first called to the last."""
        called.sort(key=lambda each: (self._watches.index(each[0]), each[1]))
        if self._layers is not None:
            called = [each for each in called if self._is_asked_for(*each)]
        if len(called) <= self._most:
            return called
        step = (len(called) - 1) / max(1, self._most - 1)
        return [called[round(i * step)] for i in range(self._most)]

    def _is_asked_for(self, watch: ModelWatch, index: int) -> bool:
        asked = Selection(self._layers, ())
        return asked.takes(watch.name_at(index))

    # One run.

    def _try(
        self, watch: ModelWatch, index: int, direction: str, value: str
    ) -> FaultResult:
        module = watch.module_at(index)
        assert module is not None
        fault = Fault(module, FAULTS[value], direction == "backward")
        with fault:
            verdict = self._judge_run()
        kind = "grad_output" if direction == "backward" else "output"
        first = verdict.first
        name = watch.name_at(index)
        is_there = first is not None and (first.fqn, first.kind) == (name, kind)
        # On devices a layer's failed kernel looks like a write to its input.
        is_named = (name or "the model") in verdict.origin.candidates
        is_made = is_named and bool(verdict.origin.stale_inputs)
        is_made |= verdict.origin.how == "made" or direction == "backward"
        return FaultResult(
            name or "the model",
            type(module).__name__,
            direction,
            value,
            fault.is_planted,
            first is not None,
            "" if first is None else _where(verdict),
            fault.is_planted and is_there and is_made,
        )

    def _judge_run(self) -> Verdict:
        """Runs forward and backward once, and returns what the watches found."""
        tensors = JudgedTensors(self._watches)
        tensors.begin_round()
        with everything_kept(self._models()) as state:
            try:
                with (
                    torch.enable_grad(),
                    uncompiled_calls(),
                    self._rule.applied(math.inf, state.set_aside),
                ):
                    loss = _checked(self._loss(self._batch))
                    if loss.requires_grad:
                        loss.backward()  # type: ignore[no-untyped-call]
                tensors.scan(None)
                return attribute(collect(self._watches), self._watches)
            except StoppedError as error:
                raise RuntimeError(
                    "model and loss must have no effects but on themselves, since they "
                    f"are run several times: {error}"
                ) from None
            finally:
                collect(self._watches)
                tensors.forget()
                for watch in self._watches:
                    watch.end_judgement(is_lagged=False)

    def _call(self, batch: Any) -> torch.Tensor:
        output = call_with(self._models()[0], batch)
        loss = model_loss_in(output)
        if loss is not None:
            return loss
        floats = [each for each in tensors_in(output) if each.is_floating_point()]
        if not floats:
            raise ValueError(
                "loss must be given: a function that takes the batch, calls the model "
                f"and returns a loss; the model returns {type(output).__name__}"
            )
        return torch.stack([each.float().sum() for each in floats]).sum()


def _is_of_gradient(verdict: Verdict) -> bool:
    return verdict.first is not None and verdict.first.kind == "gradient"


def _checked(loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            "loss must return a tensor that backward() can be called on, got "
            f"{type(loss).__name__}"
        )
    return loss


def _where(verdict: Verdict) -> str:
    first = verdict.first
    assert first is not None
    place = first.path.of_module()
    if not first.class_name:
        place = f"{first.kind.replace('_', ' ')} {first.fqn}"
    how = verdict.origin.how
    return place if how == "made" else f"{place} ({how})"
