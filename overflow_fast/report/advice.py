"""The sentence of a report that advises what to try."""

from __future__ import annotations

from ..replay.explanation import Explanation
from ..verdict.remedy import Remedy
from ..verdict.settings import nonfinite_settings
from ..verdict.verdict import BadEntry, Verdict


def advice_for(verdict: Verdict, step: int = 0, remedy: Remedy | None = None) -> str:
    """Writes what to try, by the bad entry and its origin.

    Args:
        verdict: The verdict, not clean.
        step: The step's number; before the first one weights were bad from the start.
        remedy: The modules to run in float32, or None.

    Returns:
        The sentence without its full stop; "" where no help is known.
    """
    first = verdict.first
    assert first is not None
    if first.kind == "optimizer_state":
        return "load a checkpoint in which the optimizer's state is finite" * (step > 0)
    if verdict.source in ("weight", "buffer"):
        return _of_tensor(first, verdict, step)
    if first.kind in ("input", "output") and first.signs == "-" and not first.num_nan:
        rule = {f"{first.fqn}:{first.label}": "-inf"}
        return f"if this is intended, as in a mask, allow={rule}"
    if verdict.source == "batch":
        return "check the data of this batch"
    if verdict.batch_places:
        return f"check {', '.join(verdict.batch_places)}"
    return "" if remedy is None else _in_float32(remedy)


def answers(explanation: Explanation | None, first: BadEntry) -> bool:
    """Tells whether -inf, as masks have it, is known to be an overflow."""
    is_mask = first.signs == "-" and not first.num_nan
    is_overflow = explanation is not None and explanation.cause == "range overflow"
    return is_overflow and is_mask


def _of_tensor(first: BadEntry, verdict: Verdict, step: int) -> str:
    name = f"`{first.fqn}`" if first.kind == verdict.source else verdict.maker
    settings = nonfinite_settings(verdict.remarks)
    if settings:
        return f"set {' and '.join(settings)} to a finite number first; {_load(name)}"
    if step == 0 and verdict.source == "buffer":
        return ""  # the forward may write it, initialized or not
    if step == 0:
        return f"initialize {name} or load it again"
    if verdict.source == "buffer":  # the guard may put it back
        still = f"if {name} is still non-finite after this step"
        return f"{still}, load a checkpoint in which it is finite"
    return _load(name)


def _load(name: str) -> str:
    return f"load a checkpoint in which {name} is finite"


def _in_float32(remedy: Remedy) -> str:
    (name,) = remedy.names
    if remedy.until:
        how = f"{name} runs in float32, and so do its values until {remedy.end}"
    else:
        how = f"{name} runs in float32 up to its last normalization, {remedy.end}"
    return f"`{remedy.code}`, which was not tried: {how}"
