"""The details of a report: shares, magnitudes, other gradients, the guard's cost."""

from __future__ import annotations

from ...base.text import some
from ..verdict.entry_headroom import EntryHeadroom
from ..verdict.verdict import BadEntry, Verdict
from .cost import Cost

_NEAREST = 8  # names in a sentence; chosen
_FEW_BITS = 8  # room to grow 256-fold; chosen


def share_sentences(entry: BadEntry) -> list[str]:
    """Writes how many of an entry's values are bad, where it has more than one."""
    if entry.numel <= 1 or entry.not_scanned:
        return []
    bad = entry.num_nan + entry.num_inf
    if bad < 0:  # some
        return []
    are = "is" if bad == 1 else "are"
    return [f"{bad} of its {entry.numel} {entry.dtype} values {are} non-finite."]


def gradient_sentences(verdict: Verdict) -> list[str]:
    """Names the gradients that are bad, and the nearest ones that are not."""
    dirty, clean = verdict.dirty_gradients, verdict.clean_gradients
    if not dirty:
        return []
    sentences = [f"Non-finite gradients: {some(dirty, _NEAREST)}."]
    if clean:
        sentences.append(f"The nearest finite ones: {some(clean, _NEAREST)}.")
    return sentences


def headroom_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes how large the first bad entry was when it was last seen finite."""
    if headroom is None or headroom.abs_max == 0:
        return []
    could = (
        f", which could grow {headroom.growth} before it overflows "
        f"{headroom.dtype} ({headroom.limit:.5g})"
    )
    near = could if headroom.bits <= _FEW_BITS else ""
    return [
        "When it was last seen finite, its largest magnitude was "
        f"{headroom.abs_max:.3g}{near}."
    ]


def least_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes which value is nearest to its dtype's maximum, if it is near."""
    if headroom is None or headroom.bits > _FEW_BITS:
        return []
    return [
        "The finite value nearest to its dtype's maximum: "
        f"{headroom.where}, which could grow {headroom.growth} before "
        f"{headroom.dtype} overflows."
    ]


def cost_sentences(cost: Cost) -> list[str]:
    """Writes the guard's share of a step, where that was measured."""
    if not cost.step_seconds:
        return []
    return [f"The guard takes {cost.share:.1%} of the time of a watched step."]
