"""`advise_precision()`: which modules can run in which dtype, verified by runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.given_steps import step_of
from ...base.modules import named_modules
from ...base.tensors import HALF, check_number
from ...base.text import dtype_name
from ...precision.keep_in_fp32 import shortened
from .batch_runs import BatchRuns, RunResult
from .copies import check_model
from .layer_judge import Thresholds, judge_layers
from .layers import Layer, LayerProbe
from .precision_advice import PrecisionAdvice, PrecisionCheck, is_kept
from .verifier import Verifier


def advise_precision(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    headroom_bits: float = 1.0,
    max_error: float = 8.0,
    max_underflow: float = 0.05,
    max_loss_difference: float = 0.01,
    max_gradient_difference: float = 0.1,
    max_rounds: int = 4,
) -> PrecisionAdvice:
    """Finds which modules can run in float16 and bfloat16, and which must not.

    Runs the model in float32, forward and backward, and looks at each layer: a module
    without submodules, or with parameters of its own. It compares magnitudes with the
    range of each dtype, and computes each call again with inputs and weights cast to
    float16 and bfloat16. It judges the relative L2 error against the error that
    rounding explains, sqrt(0.18 n) u, with u half of the dtype's epsilon and n the
    roundings of inputs, weights and output (Widrow and Kollar, Quantization Noise,
    2008, chapter 12).

    Then it runs the whole model under autocast to float16 and bfloat16, with
    `keep_in_fp32` on the layers that must stay. A list that fails is widened: by the
    modules that made non-finite values or gradients, by those that made a kept one's
    float16 input, where that or its gradient overflows, or by the layers with the
    largest errors. Where gradients overflow otherwise, the loss scale is lowered. Code
    between modules, such as attention scores and residual sums, is covered by these
    runs only. A list is one that has passed, and not the shortest one there is.

    All runs use copies of weights, buffers and batches: the model, its gradients, and
    the random states are afterwards what they were, bit for bit. It needs memory for
    a copy of the weights in float32, and for three sets of gradients. Compiled code
    runs eagerly; reentrant checkpointing is not supported. Layers that draw random
    numbers are judged by magnitudes alone, modules that call others by those of their
    own parameters. Nothing is known of values that the batches do not cause: give
    typical batches, to a model that has trained for a while. Incurs CPU-GPU syncs for
    each layer.

    Args:
        model: The model, not wrapped by DDP and not sharded. Half-precision weights
            are cast to float32 in the copies.
        batches: Batches, each a tuple or list of arguments, a dict of keyword
            arguments, or the one argument. All are kept: give a few.
        loss: Takes the batch, or the model and the batch, calls the model and returns
            what to call `backward()` on, and leaves autocast off. None: the loss that
            the model returns; if it returns none, the forward alone is judged.
        headroom_bits: A layer must stay if its inputs, outputs or weights have fewer
            bits left: they could not double once. The loss scale leaves as many.
        max_error: A layer must stay if its error is more than so many times what
            rounding explains. Healthy layers are near 1; 8 is a loss of 3 bits.
        max_underflow: A layer must stay out of float16 if a larger share of its
            gradients becomes 0 there with the safe loss scale. The default is a
            judgement: no measurement says which share matters for a model.
        max_loss_difference: A check fails if the losses differ by a larger part.
        max_gradient_difference: A check fails if the gradients differ by a larger
            part of their L2 norm: 0.1 is a cosine of about 0.995.
        max_rounds: How often a list may be widened, or the loss scale lowered.

    Returns:
        The advice.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model cannot run on copies, there are no batches, a
            threshold is out of range, or the run in float32 is not finite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> advice = advise_precision(model, [torch.ones(1, 2)])
        >>> advice.bfloat16, advice.code
        (['0'], '')
    """
    function = step_of(model, loss)
    check_model(model)
    limits = Thresholds(
        headroom_bits,
        max_error,
        max_underflow,
        max_loss_difference,
        max_gradient_difference,
    )
    _check_numbers(limits, max_rounds)
    runs = BatchRuns(model, function, _listed(batches), loss is not None)
    probe = LayerProbe(model)
    found = runs.run(probe, dropout=True, on_gradients=probe.add_gradients)
    if not found.is_finite:
        raise ValueError(
            "batches must give a finite loss and finite gradients in float32; use "
            "overflow_fast.explain(model, batch, loss) to find out why they do not"
        )
    rows = list(probe.layers.values())
    scale = judge_layers(rows, limits)
    verifier = Verifier(runs, rows, limits, max_rounds)
    checks = [
        verifier.check("bfloat16", 1.0),
        verifier.check("float16", scale or 1.0),
    ]
    if scale is not None:
        scale = checks[1].loss_scale
    reference = verifier.reference
    return _advice(model, rows, checks, scale, reference, probe.not_seen)


def _listed(batches: Iterable[Any]) -> list[Any]:
    if isinstance(batches, (torch.Tensor, Mapping, str)):
        raise TypeError(
            "batches must be a list of batches, got one "
            f"{type(batches).__name__}: use [batch]"
        )
    try:
        found = list(batches)
    except TypeError:
        raise TypeError(
            f"batches must be a list of batches, got {type(batches).__name__}"
        ) from None
    if not found:
        raise ValueError("batches must hold at least one batch, got none")
    return found


def _check_numbers(limits: Thresholds, max_rounds: int) -> None:
    for name, value in (*vars(limits).items(), ("max_rounds", max_rounds)):
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")


def _advice(
    model: nn.Module,
    rows: list[Layer],
    checks: list[PrecisionCheck],
    loss_scale: float | None,
    reference: RunResult,
    not_seen: list[str],
) -> PrecisionAdvice:
    names = [name for name, _ in named_modules(model)]
    cast = any(each.dtype in HALF for each in model.parameters())
    passed = [check for check in checks if check.passed]
    best = min(passed, key=lambda check: len(check.kept), default=None)
    codes = {check.dtype: _code(check.kept, names, cast) for check in passed}
    lists = {check.dtype: _may_run(rows, check) for check in checks}
    in_half = {name for names in lists.values() for name in names}
    return PrecisionAdvice(
        rows=rows,
        float32=[row.name for row in rows if row.name not in in_half],
        **lists,
        dtype="float32" if best is None else best.dtype,
        code="" if best is None else codes[best.dtype],
        codes=codes,
        checks=checks,
        loss=reference.loss,
        loss_scale=loss_scale,
        not_seen=not_seen,
        notes=_notes(model, reference),
    )


def _may_run(rows: Sequence[Layer], check: PrecisionCheck) -> list[str]:
    """The layers that a check has run in its dtype; none if it has not passed."""
    return [
        row.name for row in rows if check.passed and not is_kept(row.name, check.kept)
    ]


def _code(kept: Sequence[str], names: Sequence[str], cast: bool) -> str:
    if not kept:
        return ""
    line = f"overflow_fast.keep_in_fp32(model, {shortened(kept, names)})"
    return f"model.float(); {line}" if cast else line


def _notes(model: nn.Module, reference: RunResult) -> list[str]:
    notes = []
    halves = {dtype_name(p.dtype) for p in model.parameters() if p.dtype in HALF}
    if halves:
        notes.append(
            f"Weights in {' and '.join(sorted(halves))} were cast to float32 for all "
            "runs: the advice is for `model.float()` under autocast."
        )
    if reference.has_drawn:
        notes.append(
            "The model draws random numbers (dropout modules were off in the checks): "
            "part of the differences may come from these."
        )
    if not reference.gradients:
        notes.append("Nothing is known of gradients: there was no backward.")
    return notes
