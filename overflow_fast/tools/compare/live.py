"""`compare_live()`: two models on one batch, or one and its float32 copy.

Each model's step is recorded in memory, one after the other from the same random
states; the two are compared as two recordings are.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.modules import step_of
from ...base.tensors import devices_of, model_loss_in
from ...base.text import dtype_name
from ...base.tree import CALL_DEPTH, mapped
from ...detector.observers import without_observers
from ...explainer.effects.rule import EffectRule, StoppedError
from ...explainer.snapshot import Snapshot
from ...explainer.wider import FLOATS
from ...guard.undo.random import RandomStates
from ...torch_internals.replaying import uncompiled_calls, without_cached_casts
from ..precision.again import LocalErrors
from ..precision.copies import check_model, to_float32
from .compare_runs import StepComparison
from .comparison import Comparison
from .first_difference import RootDifference
from .first_op import first_difference, ops_within
from .judged_rows import INTRODUCED, TensorDifference
from .matching import mapped_name
from .recording import StepRecorder, in_memory
from .recordings import RankStep, RecordedTensor

Loss = Callable[[nn.Module, Any], torch.Tensor]
_NO_SHADOW = (
    "No tensor had another dtype than its float32 shadow: nothing of the model is in "
    "half precision, and autocast applies to both."
)


def compare_models(
    models: Sequence[nn.Module],
    batches: Sequence[Any],
    loss: Loss | None,
    backward: bool,
    names: Mapping[str, str],
    local: LocalErrors | None = None,
) -> Comparison:
    """Compares two models; see `overflow_fast.compare_live`.

    Args:
        models: The model and its reference.
        batches: What each is called with.
        loss: See `compare_live`.
        backward: Whether gradients are computed.
        names: See `compare_live`.
        local: Measures the errors of the first one's layers, if the second is its copy,
            whose code may have no effects again then.
    """
    model, reference = models
    result, steps = Comparison(_name(model), _name(reference)), list[RankStep]()
    weights = [each for model in models for each in model.parameters()]
    with _undisturbed(*models), without_cached_casts(weights):
        for model, batch in zip(models, batches, strict=True):
            is_again = local is not None and bool(steps)
            measures = local if local is not None and not is_again else None
            with (
                RandomStates(devices_of(models)),
                measures or contextlib.nullcontext(),
                _as_copy() if is_again else contextlib.nullcontext(),
            ):
                steps.append(_recorded(model, batch, loss, backward))
    comparison = StepComparison(result, names)
    mine, its = steps
    comparison.add(0, [mine], [its], {} if local is None else local.errors)
    result.said += comparison.sentences()
    rows = result.rows
    if local is not None and all(len({*row.dtypes}) == 1 for row in rows):
        result.said.insert(0, _NO_SHADOW)
    result.said += _both_nonfinite(rows)
    for row in rows:
        row.mine.values = row.its.values = None  # the result holds no tensors
    if result.first is not None and result.first.kind == "forward":
        result.first.op = _first_op(result.first, models, batches, loss, names)
    return result


def _recorded(
    model: nn.Module, batch: Any, loss: Loss | None, backward: bool
) -> RankStep:
    """Runs a model's step, and keeps its tensors in memory."""

    def keep(row: RecordedTensor, values: torch.Tensor) -> None:
        row.values = values.clone()  # the program may write to it

    recorder = StepRecorder(model, 0, keep, is_one_thread=True)
    try:
        recorder.begin()
        with torch.set_grad_enabled(backward or torch.is_grad_enabled()):
            output = step_of(model, loss)(batch)
            if backward:
                recorder.show_gradients(_gradients(model, output))
        return in_memory(recorder)
    finally:
        recorder.stop()


def _gradients(model: nn.Module, output: Any) -> dict[int, torch.Tensor]:
    loss = model_loss_in(output)
    if loss is None:
        raise ValueError(
            "backward=True needs a loss: give loss=, a function of the model and the "
            "batch that returns one"
        )
    own = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(loss, own, allow_unused=True) if own else ()
    pairs = zip(own, found, strict=True)
    return {id(p): gradient for p, gradient in pairs if gradient is not None}


@contextlib.contextmanager
def _undisturbed(*models: nn.Module) -> Iterator[None]:
    """Guards do not see the runs, and everything is as before afterwards."""
    with (
        without_observers(models),
        Snapshot({f"{i}.": m for i, m in enumerate(models)}),
    ):
        yield


@contextlib.contextmanager
def _as_copy() -> Iterator[None]:
    """Stops code whose effects would be had twice."""
    try:
        with EffectRule().applied(math.inf):
            yield
    except StoppedError as error:
        raise ValueError(
            "model must have no effects but on itself, since a copy of it is run, too: "
            f"{error}"
        ) from error


def _first_op(
    first: RootDifference,
    models: Sequence[nn.Module],
    batches: Sequence[Any],
    loss: Loss | None,
    names: Mapping[str, str],
) -> str:
    """Runs the forward of both again, and looks at the operations of one module."""
    found, call = [], first.row.place.call
    of_each = first.module, mapped_name(first.module, names)
    for model, batch, name in zip(models, batches, of_each, strict=True):

        def forward(model: nn.Module = model, batch: Any = batch) -> None:
            step_of(model, loss)(batch)

        with _undisturbed(model), RandomStates(devices_of(models)), torch.no_grad():
            try:
                with uncompiled_calls(), EffectRule().applied(math.inf):
                    found.append(ops_within(model, name, call, forward))
            except Exception:
                return ""  # it is named without the operation
    return first_difference(*found)


def _both_nonfinite(rows: Sequence[TensorDifference]) -> list[str]:
    """Names the first tensor that holds nans, or else infs, in both, in a sentence."""
    for kind in ("nan", "inf"):
        for row in rows:
            mine, its = row.numbers(f"num_{kind}")
            if mine and its and row.verdict != INTRODUCED:
                return [
                    f"Both hold {kind}: first at {row.place}, {mine} against {its} "
                    "values. Those are not compared."
                ]
    return []


def batch_for(reference: nn.Module, model: nn.Module, batch: Any) -> Any:
    """The batch on the reference's device, floats of the model's dtype in its dtype."""
    own, its = next(model.parameters(), None), next(reference.parameters(), None)
    if own is None or its is None:
        return batch

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype == own.dtype and own.dtype in FLOATS
        return tensor.to(its.device, its.dtype if is_cast else tensor.dtype)

    return mapped(batch, convert, CALL_DEPTH)


def _name(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    kind = "" if parameter is None else f" ({dtype_name(parameter.dtype)})"
    return f"{type(model).__name__}{kind}"


def float32_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with half-precision weights and buffers in float32.

    Raises:
        ValueError: If the model is wrapped, sharded, quantized or not initialized.
    """
    check_model(model)
    with torch.no_grad():
        made = copy.deepcopy(model)
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data = to_float32(tensor.data)
            tensor.grad = None
    return made
