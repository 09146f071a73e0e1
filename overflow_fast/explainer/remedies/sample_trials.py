"""Remedies that change the batch: without bad samples, with other numbers in them.

Each is run on the step, as remedies of code are; what it says is of this batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ...base.tree import tensors
from ...guard.report.remedy import Remedy
from ..calls import Call, ModelCall, batch_size, is_forward_alone
from ..replayer import Patch
from ..sentinel import outliers_in, sentinel_in
from ..tensor_kinds import is_float
from .failure import Failure
from .patches import ChangedTensor, FiniteSamples, SomeSamples, finite_rows
from .rules import power_below, with_numbers
from .trials import Attempts, Trial, Trials


def dropping_trials(failure: Failure, trials: Trials) -> Attempts:
    """The step without the samples that are not finite."""
    found = failure.found
    if trials.found_remedy:
        return
    size, bad = batch_size(trials.calls[failure.place]), failure.bad
    if not trials.replayer.ranks.can_cut(failure.place):
        return
    if size is None or bad is None or not bad.dim() or len(bad) != size:
        return
    rows = finite_rows(bad)
    if not rows:
        return
    name = found.tensor
    yield from _least_for_inf(bad, failure)
    mask = f"torch.isfinite({name}).reshape(len({name}), -1).all(1)"
    remedy = Remedy(
        f"drop the {size - len(rows)} of {size} samples whose {name} is not finite",
        _dropping_code(trials.calls[failure.place], mask),
        is_of_data=True,
    )
    yield Trial(remedy, FiniteSamples(name))


def _least_for_inf(bad: torch.Tensor, failure: Failure) -> Iterator[Trial]:
    """The least finite number in place of -inf alone, as a logarithm of 0 gives it.

    Not in a mask, which has one finite number.
    """
    is_low, finite = bad == -math.inf, bad[bad.isfinite()]
    is_mask = not finite.numel() or bool(finite.min() == finite.max())
    if is_mask or int(is_low.sum()) != bad.numel() - finite.numel():
        return
    name, low = failure.found.tensor, float(f"{float(finite.min()):.4g}")
    words = f"replace -inf in `{name}` by {low:g}, its least finite number"
    patch = ChangedTensor(failure.place, name, low)
    given = f"{name}.isneginf(), {low:g}"
    yield _changing(words, name, "masked_fill", given, patch)


def without_sample(
    failure: Failure, trials: Trials, without: SomeSamples
) -> Iterator[Trial]:
    """The step without the one sample that fails, and with smaller numbers in it.

    Without an outlier in it that is none where others are as near to failing, or a
    weight is another one since the guard began.
    """
    sample, call = failure.found.sample, trials.replayer.calls[failure.place]
    if sample is None or failure.found.phase == "data":
        return
    outliers = [*outliers_in(call, sample)] if sample.outlier else []
    again = " (the next such one does it again)"
    text, code = f"leave sample {int(sample)} out of this batch{again}", ""
    if not outliers and (failure.has_drifted or failure.num_near > 1):
        return
    if outliers:
        name, bound, usual = outliers[0].name, outliers[0].bound, outliers[0].usual
        text = f"leave out samples whose `{name}` is above {bound:g} in magnitude"
        mask = f"{name}.abs().reshape(len({name}), -1).amax(1) <= {bound:g}"
        code = _dropping_code(call, mask)
        words = f"clamp `{name}` to {usual:g} in magnitude"
        patch = ChangedTensor(failure.place, name, -usual, usual)
        if len(outliers) == 1:  # else what belongs to it stays as large
            yield _changing(words, name, "clamp", f"-{usual:g}, {usual:g}", patch)
    yield Trial(Remedy(text, code, is_of_data=True), without)


def _changing(words: str, name: str, method: str, given: str, patch: Patch) -> Trial:
    """The trial of a change of a tensor in the batch, which may be in a tuple."""
    code = f"{name}.{method}_({given})"
    if name.isidentifier():
        code = f"{name} = {name}.{method}({given})"
    return Trial(Remedy(words, code, is_of_data=True), patch)


def _dropping_code(call: Call, mask: str) -> str:
    """The code that leaves samples out of a batch, or "" where it is none of a line.

    Args:
        call: The call with the batch.
        mask: The expression for those that are kept.
    """
    lines = [f"keep = {mask}"]
    for name, value in call.variables().items():
        parts = list(value.values()) if type(value) is dict else value
        parts = [parts] if isinstance(parts, torch.Tensor) else parts
        if not any(isinstance(each, torch.Tensor) for _, each in tensors(value)):
            continue
        if type(parts) not in (list, tuple) or not all(map(_has_samples, parts)):
            return ""
        if isinstance(value, torch.Tensor):
            lines.append(f"{name} = {name}[keep]")
        elif type(value) is dict:
            lines.append(f"{name} = {{k: v[keep] for k, v in {name}.items()}}")
        else:
            kept = f"each[keep] for each in {name}"
            lines.append(
                f"{name} = "
                + (f"[{kept}]" if type(value) is list else f"tuple({kept})")
            )
    if isinstance(call, ModelCall):
        labels = ", such as labels" * (not is_forward_alone([call]))
        lines[-1] += f"  # and what belongs to it{labels}"
    return "\n".join(lines)


def _has_samples(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.dim() > 0


def border_trials(tensor: torch.Tensor, failure: Failure, trials: Trials) -> Attempts:
    """A lower bound of a tensor of the batch whose least number is 0.

    A smaller one than its other numbers have is far from them in a logarithm.
    """
    names = [n for n, each in trials.calls[failure.place].leaves() if each is tensor]
    values = tensor.detach()
    if not names or not is_float(tensor) or values.min() != 0 or not values.any():
        return
    number = power_below(float(values[values > 0].min()))
    name, low = names[0], with_numbers("N", {"N": number})
    words = f"clamp `{name}` to at least {low}, below its positive numbers"
    patch = ChangedTensor(failure.place, name, number)
    yield _changing(words, name, "clamp", f"min={low}", patch)


def sentinel_trials(failure: Failure, trials: Trials) -> Attempts:
    """The step with 0 in place of a number that looks like a placeholder."""
    sample, replayer = failure.found.sample, trials.replayer
    if sample is None or not replayer.ranks.is_alone:
        return
    sentinel = sentinel_in(replayer.calls[failure.place], int(sample))
    if sentinel is None or not sentinel.can_be_replaced:
        return
    name, number = sentinel.name, sentinel.number
    words, given = f"replace {number:.6g} in `{name}` by 0", f"{name} == {number!r}, 0"
    patch = ChangedTensor(failure.place, name, without=number)
    yield _changing(words, name, "masked_fill", given, patch)
