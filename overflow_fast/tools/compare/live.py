"""`compare_live()`: two models on one batch, such as one and its float32 copy.

Each model's step is recorded, one after the other from the same random states; the two
are compared as two recordings are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.given_steps import check_module, step_of
from ...base.losses import model_loss_in
from ...base.tensors import devices_of
from ...base.text import dtype_name
from ...base.tree import CALL_DEPTH, mapped
from ...detector.observers import without_observers
from ...explainer.effects.rule import EffectRule
from ...explainer.snapshot import Snapshot
from ...explainer.wider import FLOATS
from ...guard.undo.random import RandomStates
from ...torch_internals.cached_casts import without_cached_casts
from ...torch_internals.compiled_calls import uncompiled_calls
from .compare_runs import StepComparison, names_of
from .comparison import Comparison
from .first_difference import RootDifference
from .first_op import first_difference, ops_within
from .judged_rows import INTRODUCED, TensorDifference
from .matching import mapped_name
from .recorded import RankStep
from .step_recorder import StepRecorder

Loss = Callable[[nn.Module, Any], torch.Tensor]


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
    names = names_of(names)
    models, batches = (model, reference), (batch, its)
    result, steps = Comparison(_name(model), _name(reference)), list[RankStep]()
    weights = [each for model in models for each in model.parameters()]
    with _undisturbed(*models), without_cached_casts(weights):
        for model, batch in zip(models, batches, strict=True):
            with RandomStates(devices_of(models)):
                steps.append(_recorded(model, batch, loss, backward))
    comparison = StepComparison(result, names)
    comparison.add(0, *([each] for each in steps))
    result.said += comparison.sentences()
    result.said += _both_nonfinite(result.rows)
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
