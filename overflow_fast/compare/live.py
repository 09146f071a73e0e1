"""`compare_live()`: two models on one batch, side by side."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.devices import devices_of
from ..core.model_call import step_of
from ..core.tensors import loss_in
from ..recording.unseen import unseen
from ..replay.ambient import Ambient
from ..state.random import RandomStates
from ..state.snapshot import Snapshot
from ..tree import CALL_DEPTH, mapped
from . import said_first
from .comparison_result import Comparison
from .first_cause import Known, first_of
from .first_difference import First
from .first_op import first_difference, ops_within
from .judged_rows import difference_of
from .local_shadow import LocalShadow, apply_errors
from .lockstep import Lockstep
from .matching import Matched, mapped_name, match
from .run_reader import RankStep
from .surroundings import modes
from .tap import Tap
from .yardstick import judge_all

_HALF_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)
Loss = Callable[[nn.Module, Any], torch.Tensor]


class LiveRun:
    """One model's step in a lockstep.

    Args:
        model: The model.
        batch: What it is called with.
        loss: See `compare_live`.
        backward: Whether gradients are computed.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, backward: bool
    ) -> None:
        self.model, self._batch, self._backward = model, batch, backward
        self._function = step_of(model, loss)
        self.failures: list[str] = []
        self.error: BaseException | None = None

    def run(self, sink: Any) -> None:
        """Runs the step, and shows its tensors."""
        try:
            with Tap(self.model, sink, is_one_thread=True) as tap:
                self._run(tap)
            self.failures = tap.failures
        except BaseException as error:
            self.error = error

    def forward(self) -> None:
        """Runs the forward alone."""
        self._function(self._batch)

    def _run(self, tap: Tap) -> None:
        tap.show_state()
        with torch.set_grad_enabled(self._backward or torch.is_grad_enabled()):
            output = self._function(self._batch)
            if self._backward:
                tap.show_gradients(self._gradients(output))

    def _gradients(self, output: Any) -> dict[int, torch.Tensor]:
        loss = loss_in(output)
        if loss is None:
            raise ValueError(
                "backward=True needs a loss: give loss=, a function of the model and "
                "the batch that returns one"
            )
        own = [each for each in self.model.parameters() if each.requires_grad]
        found = torch.autograd.grad(loss, own, allow_unused=True) if own else ()
        pairs = zip(own, found, strict=True)
        return {id(p): gradient for p, gradient in pairs if gradient is not None}


_NO_SHADOW = (
    "No tensor had another dtype than its float32 shadow: nothing of the model is in "
    "half precision, and autocast applies to both."
)


def compare_models(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    reference_batch: Any,
    loss: Loss | None,
    backward: bool,
    names: Mapping[str, str],
    local: LocalShadow | None = None,
) -> Comparison:
    """Compares two models; see `overflow_fast.compare_live`."""
    if reference_batch is None:
        reference_batch = batch_for(reference, model, batch)
    sides = [
        LiveRun(model, batch, loss, backward),
        LiveRun(reference, reference_batch, loss, backward),
    ]
    steps = [RankStep(0, modes(side.model), []) for side in sides]
    devices = devices_of([model, reference])
    lockstep = Lockstep(names, devices, is_serial=bool(devices))
    result = Comparison(_name(model), _name(reference), [])
    with _undisturbed(model, reference):
        before = RandomStates(devices)
        with local or contextlib.nullcontext():
            _run_both(sides, lockstep, devices)
        drawn = before.drawn()
    for step, side in zip(steps, sides, strict=True):
        step.modes |= {"failures": side.failures, "drawn": drawn}
    result.said += said_first.of_step(0, *([step] for step in steps))
    has_tf32 = any(step.modes["tf32"] for step in steps)
    known = _conclude(result, lockstep, names, has_tf32)
    if local is not None:
        apply_errors(result.rows, local.errors)
        if all(row.dtypes[0] == row.dtypes[1] for row in result.rows):
            result.said.insert(0, _NO_SHADOW)
    result.first = first_of(result.rows, known)
    if result.first is not None and result.first.kind == "forward":
        result.first.op = _first_op(result.first, sides, names)
    return result


def _first_op(first: First, sides: list[LiveRun], names: Mapping[str, str]) -> str:
    """Runs the forward of both again, and looks at the operations of one module."""
    module, call = first.module, first.row.place.call
    found = []
    for side, name in zip(sides, (module, mapped_name(module, names)), strict=True):
        with _undisturbed(side.model), torch.no_grad():
            try:
                found.append(ops_within(side.model, name, call, side.forward))
            except Exception:
                return ""  # it is named without the operation
    return first_difference(*found)


def batch_for(reference: nn.Module, model: nn.Module, batch: Any) -> Any:
    """The batch on the reference's device, floats of the model's dtype in its dtype."""
    own, its = next(model.parameters(), None), next(reference.parameters(), None)
    if own is None or its is None:
        return batch

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype == own.dtype and own.dtype in _HALF_AND_FLOAT
        return tensor.to(its.device, its.dtype if is_cast else tensor.dtype)

    return mapped(batch, convert, CALL_DEPTH)


@contextlib.contextmanager
def _undisturbed(*models: nn.Module) -> Iterator[None]:
    """Guards do not see the runs, and everything is as before afterwards."""
    with unseen(models), Snapshot({f"{i}.": m for i, m in enumerate(models)}):
        yield


def _run_both(
    sides: list[LiveRun], lockstep: Lockstep, devices: list[torch.device]
) -> None:
    ambient = Ambient(sides[1].model, devices)
    is_inference, has_gradients = (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )
    threads = torch.get_num_threads()

    def run_reference() -> None:
        torch.set_num_threads(threads)  # is of each thread
        with (
            torch.inference_mode(is_inference),
            torch.set_grad_enabled(has_gradients),
            ambient.applied([]),
        ):
            sides[1].run(lockstep.sink(1))

    other = threading.Thread(target=lockstep.run, args=(1, run_reference), daemon=True)
    other.start()
    lockstep.run(0, lambda: sides[0].run(lockstep.sink(0)))
    other.join()
    for side in sides:
        if side.error is not None:
            raise side.error


def _conclude(
    result: Comparison, lockstep: Lockstep, names: Mapping[str, str], has_tf32: bool
) -> Known:
    """Pairs what is left by order and shape, and judges all rows."""
    rest = match(*lockstep.left, names)
    pairs = [*lockstep.pairs, *((pair, None) for pair in rest.pairs)]
    pairs.sort(key=lambda each: each[0].entry.order)
    for pair, measures in pairs:
        row = difference_of(pair, 0)
        if measures is not None and row.measures is not None:
            row.measures = measures
        result.rows.append(row)
    judge_all(result.rows, [pair for pair, _ in pairs], has_tf32)
    matched = Matched([], rest.only, rest.only_reference, rest.renamed)
    result.said += said_first.of_matches(0, matched)
    for row in result.rows:
        if row.why:
            result.said.append(f"{row.name} was not compared: {row.why}.")
    return Known(missing=matched.missing_modules(), lone_inputs=matched.lone_inputs())


def _name(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    kind = "" if parameter is None else f" ({str(parameter.dtype)[6:]})"
    return f"{type(model).__name__}{kind}"
