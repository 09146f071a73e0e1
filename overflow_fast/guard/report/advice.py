"""The sentence of a report that advises what to try."""

from __future__ import annotations

from collections.abc import Iterable

from ...base.torch_ops import base_of, has
from ..verdict.optimizer_settings import SettingRemark
from ..verdict.verdict import BadEntry, Origin, Verdict
from .causes import UNKNOWN, Cause
from .findings import Findings


def advice_for(
    verdict: Verdict,
    step: int = 0,
    is_cured: bool = False,
    is_beyond_repair: bool = False,
    is_noted: bool = False,
    of_weights: str = "",
) -> str:
    """Writes what to try, by the bad entry and its origin.

    Args:
        verdict: The verdict, not clean.
        step: The step's number; before the first one weights were bad from the start.
        is_cured: A replay has tried what helps.
        is_beyond_repair: The value stays, whatever becomes of the step.
        is_noted: A note says how to find what made a bad input.
        of_weights: What to do where several weights were bad from the start; or "".

    Returns:
        The sentence without its full stop; "" where no help is known.
    """
    first, origin = verdict.first, verdict.origin
    assert first is not None
    if origin.source == "update":  # it is undone, unless the policy is to warn
        settings = nonfinite_settings(origin.remarks)
        advice = f"set {' and '.join(settings)} to a finite number" if settings else ""
        load = _load(f"`{first.fqn}`") * is_beyond_repair
        return "; ".join(filter(None, [advice, load]))
    if first.kind == "optimizer_state":
        return "load a checkpoint in which the optimizer's state is finite" * (step > 0)
    if origin.source in ("weight", "buffer") and first.kind != "state":
        return _advise_on_tensor(first, origin, step, of_weights)
    if first.kind == "output" and _may_be_mask(first):
        return f"if this is intended, as in a mask, allow={ {first.path.rule: '-inf'} }"
    if is_cured:
        return ""
    if origin.source == "batch":
        return "check the data of this batch"
    is_itself = origin.batch_places == [f"`{first.label}`"]
    if origin.batch_places and not (is_noted and is_itself):
        return f"check {', '.join(origin.batch_places)}"
    return ""


def answers(explanation: Findings | None, first: BadEntry) -> bool:
    """True if -inf, as masks have it, is known to be no intended one."""
    if not _may_be_mask(first) or explanation is None:
        return _may_be_mask(first) and not UNKNOWN.may_be_intended
    op = explanation.op  # masks are logarithms of 0; quotients are none
    is_quotient = op is not None and has(base_of(op.name), "divides")
    return is_quotient or not Cause.of(explanation.cause).may_be_intended


def _may_be_mask(entry: BadEntry) -> bool:
    """True if an entry is -inf as a whole. In part it is no alarm by itself."""
    return entry.signs == "-" and entry.num_inf == entry.numel


def _advise_on_tensor(
    first: BadEntry, origin: Origin, step: int, of_weights: str
) -> str:
    name = f"`{first.fqn}`" if first.kind == origin.source else origin.maker
    settings = nonfinite_settings(origin.remarks)
    if settings:
        return f"set {' and '.join(settings)} to a finite number first; {_load(name)}"
    if step == 0 and origin.source == "buffer":
        return ""  # the forward may write it, initialized or not
    if step == 0:
        return of_weights or f"initialize {name} or load it again"
    if origin.source == "buffer":  # the guard may put it back
        still = f"if {name} is still non-finite after this step"
        return f"{still}, load a checkpoint in which it is finite"
    return _load(name)


def nonfinite_settings(remarks: Iterable[str]) -> list[str]:
    """Lists the settings that are no finite numbers, from those sentences."""
    return [each.setting for each in remarks if isinstance(each, SettingRemark)]


def _load(name: str) -> str:
    return f"load a checkpoint in which {name} is finite"
