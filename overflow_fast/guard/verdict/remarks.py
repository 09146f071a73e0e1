"""Remarks on the first bad call: fill values, variances, the batch."""

from __future__ import annotations

import torch

from ... import _C
from ...base.tree import entry_label
from ..watching.inputs import is_batch_first, is_plain
from .bad_frames import BadFrame

# Masks are filled with the lowest finite number, or with nearly that.
_NEAR_MAX = 0.999  # finds -3.4e38. A smaller one would name values that are no fill


class FillRemark(str):
    """A sentence on a finite input that reaches the end of its dtype."""


def remarks_on(first: BadFrame) -> list[str]:
    """Writes what else was seen at the first bad call, in sentences.

    Incurs a CPU-GPU sync for each running variance on a device.
    """
    return [*_sentinels(first), *_negative_variances(first)]


def batch_remarks(first: BadFrame) -> list[str]:
    """Writes where the batch that a trainer has noted is non-finite, in sentences.

    Incurs a CPU-GPU sync for each tensor of the batch.
    """
    noted = first.watch.inputs.loop_batches.of(first.frame.batch)
    if noted is None:
        return []
    places = noted.bad_places(is_batch_first(first.watch.model))
    return [f"The batch is non-finite: {', '.join(places)}."] if places else []


def _sentinels(first: BadFrame) -> list[FillRemark]:
    """Lists finite inputs that reach the end of their dtype, as finfo.min does."""
    sentences = []
    for entry in first.entries:
        stat, dtype = entry.stat, entry.dtype
        if stat is None or entry.role != _C.Role.INPUT:
            continue
        limit, abs_max = limit_of(dtype), stat.abs_max
        num_bad = stat.num_nan + stat.num_inf
        if abs_max is None or limit is None or num_bad or abs_max < _NEAR_MAX * limit:
            continue
        label = entry_label(entry.place)
        sentences.append(
            FillRemark(
                f"`{label}` holds a magnitude of {abs_max:.3g}, at the end of {dtype}: "
                "a fill value such as finfo.min overflows when something is added to "
                "it."
            )
        )
    return sentences


def limit_of(dtype: str) -> float | None:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return None
    return float(torch.finfo(found).max)


def _negative_variances(first: BadFrame) -> list[str]:
    module = first.watch.module_at(first.frame.module)
    variance = getattr(module, "running_var", None)
    if variance is None or not is_plain(variance):
        return []
    count = int((variance < 0).sum())
    name = f"{first.watch.name_at(first.frame.module)}.running_var".lstrip(".")
    are = "is" if count == 1 else "are"
    text = f"{count} of {variance.numel()} values of {name} {are} negative."
    return [text] * bool(count)
