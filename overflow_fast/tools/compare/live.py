"""`compare_live()`: two models on one batch, or one and its float32 copy.

Each model's step is recorded, one after the other from the same random states; the two
are compared as two recordings are.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.modules import check_module, step_of
from ...base.tensors import devices_of, model_loss_in
from ...base.text import dtype_name
from ...base.tree import CALL_DEPTH, mapped
from ...detector.observers import without_observers
from ...explainer.effects.rule import EffectRule, StoppedError
from ...explainer.snapshot import Snapshot
from ...explainer.wider import FLOATS
from ...guard.undo.random import RandomStates
from ...torch_internals.replaying import uncompiled_calls, without_cached_casts
from ..precision.copies import check_model, to_float32
from .compare_runs import StepComparison, names_of
from .comparison import Comparison
from .first_difference import RootDifference
from .first_op import first_difference, ops_within
from .judged_rows import INTRODUCED, TensorDifference
from .matching import mapped_name
from .recorded import RankStep
from .step_recorder import StepRecorder

Loss = Callable[[nn.Module, Any], torch.Tensor]
_NO_SHADOW = (
    "No tensor had another dtype than its float32 shadow: nothing of the model is in "
    "half precision, and autocast applies to both."
)


def compare_live(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    *,
    reference_batch: Any = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    backward: bool = False,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares two models on one batch, without files.

    They run one after the other from the same random states. Where a layer's forward
    differs, that forward is run again to find the operation. Random states, buffers and
    gradients are put back, and nothing is stepped. Incurs a few CPU-GPU syncs.

    Args:
        model: The model.
        reference: The model that it is compared with.
        batch: What the models are called with: a tuple or list of arguments, a dict of
            keyword arguments, or the one argument.
        reference_batch: The reference's batch; None: the same, on its device, and cast
            to the dtype of its weights where it has that of the model's.
        loss: Takes a model and the batch and returns the loss; None: the model is
            called, and the loss is in what it returns.
        backward: Also compare gradients.
        names: Regular expressions in module names of `model`, and their replacements.

    Returns:
        The comparison.

    Raises:
        ValueError: If `backward` is True and there is no loss.

    Example:
        >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> compare_live(a, b, torch.ones(1, 2)).first.kind
        'weights'
    """
    check_module(model)
    check_module(reference, "reference")
    its = _batch_for(reference, model, batch)
    if reference_batch is not None:
        its = reference_batch
    pair = (model, reference), (batch, its)
    return _compare_models(*pair, loss, backward, names_of(names))


def shadow(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    backward: bool = False,
) -> Comparison:
    """Compares a half-precision model with a float32 copy of itself.

    As `compare_live()`. The error that each layer alone makes of equal inputs is
    measured by `advise_precision()`.

    Args:
        model: The model, in half precision at least in part, without DDP or FSDP.
        batch: What it is called with, see `compare_live()`.
        loss: Takes a model and the batch and returns the loss; None: see there.
        backward: Also compare gradients.

    Returns:
        The comparison; the copy is the reference.

    Raises:
        ValueError: If the model is wrapped, sharded, quantized or not initialized.
    """
    check_module(model)
    copied = _float32_copy(model)
    pair = (model, copied), (batch, _batch_for(copied, model, batch))
    return _compare_models(*pair, loss, backward, {}, is_copy=True)


def _compare_models(
    models: Sequence[nn.Module],
    batches: Sequence[Any],
    loss: Loss | None,
    backward: bool,
    names: Mapping[str, str],
    is_copy: bool = False,
) -> Comparison:
    """Compares two models; see `compare_live()`.

    Args:
        models: The model and its reference.
        batches: What each is called with.
        loss: See `compare_live`.
        backward: Whether gradients are computed.
        names: See `compare_live`.
        is_copy: Whether the second is a copy of the first, whose code may have no
            effects again then.
    """
    model, reference = models
    result, steps = Comparison(_name(model), _name(reference)), list[RankStep]()
    weights = [each for model in models for each in model.parameters()]
    with _undisturbed(*models), without_cached_casts(weights):
        for model, batch in zip(models, batches, strict=True):
            is_again = is_copy and bool(steps)
            with (
                RandomStates(devices_of(models)),
                _as_copy() if is_again else contextlib.nullcontext(),
            ):
                steps.append(_recorded(model, batch, loss, backward))
    comparison = StepComparison(result, names)
    comparison.add(0, *([each] for each in steps))
    result.said += comparison.sentences()
    rows = result.rows
    if is_copy and all(len({*row.dtypes}) == 1 for row in rows):
        result.said.insert(0, _NO_SHADOW)
    result.said += _both_nonfinite(rows)
    if result.first is not None and result.first.kind == "forward":
        result.first.op = _first_op(result.first, models, batches, loss, names)
    return result


def _recorded(
    model: nn.Module, batch: Any, loss: Loss | None, backward: bool
) -> RankStep:
    """Runs a model's step, and records its tensors."""
    recorder = StepRecorder(model, 0)
    try:
        recorder.begin()
        with torch.set_grad_enabled(backward or torch.is_grad_enabled()):
            output = step_of(model, loss)(batch)
            if backward:
                recorder.record_gradients(_gradients(model, output))
        return recorder.end().share_numbers()
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


def _batch_for(reference: nn.Module, model: nn.Module, batch: Any) -> Any:
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


def _float32_copy(model: nn.Module) -> nn.Module:
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
