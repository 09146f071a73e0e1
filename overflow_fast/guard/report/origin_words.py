"""Words for where a non-finite value came from."""

from __future__ import annotations

from ...base.text import capitalized, some
from ..verdict.verdict import BadEntry, NonModuleOrigin, Origin, Verdict

_FEW = 4  # names in a sentence; chosen


def who_made_it(first: BadEntry, verdict: Verdict, unit: str) -> str:
    """Writes the origin of the first bad value, as far as it is known.

    Args:
        first: The first bad value.
        verdict: The verdict.
        unit: What is judged, such as "step".
    """
    if first.not_scanned:
        return "It is not known whether its values are finite."
    return " ".join([_sentence(first, verdict, unit), *verdict.origin.remarks])


def _sentence(first: BadEntry, verdict: Verdict, unit: str) -> str:
    origin, maker = verdict.origin, verdict.origin.maker
    if origin.how == "made":
        but = exceptions(verdict)
        given = f"The inputs of {maker} were finite{' except ' * bool(but)}{but}"
        given += " when they were scanned, before its call" * bool(origin.stale_inputs)
        return f"{given}; {_code_of(maker, origin)} produced it."
    if origin.how == "given" and origin.source == "unclear":
        return f"It was non-finite when the model received it: it came from {maker}."
    if origin.source == "weight" and len(origin.candidates) > 1:
        if not first.class_name:  # it is the weight itself
            return f"{capitalized(maker)}."
        return f"It was already non-finite when {first.place} read it: {maker}."
    if origin.how == "given":
        return f"It was non-finite before the {unit}: it came from {maker}."
    if origin.how == "unclear":
        return f"Which code produced it is not known: {maker}."
    if first.kind == "input" and origin.source == "caller":
        name, *others = origin.candidates
        if not isinstance(name, NonModuleOrigin) and not others:
            code = _code_of(name, origin)
            return f"Module {first.fqn} received it; {code} produced it."
    if first.class_name and first.fqn and first.kind in ("input", "grad_output"):
        return f"Module {first.fqn} received it; it came from {maker}."
    return f"It came from {maker}."


def exceptions(verdict: Verdict) -> str:
    """Lists the inputs of the maker that were non-finite by intent; "" for none."""
    exceptions = {"-inf": verdict.masks, "allowed values": verdict.allowed}
    return " and ".join(
        f"{what} in {', '.join(labels)}"
        for what, labels in exceptions.items()
        if labels
    )


def _code_of(name: str, origin: Origin) -> str:
    """Names the code of a module, as near as it is known."""
    after = f", after {origin.after}," if origin.after else ""
    if not origin.unwatched:
        return f"code in {_module(name)} itself{after}"
    names = some(origin.unwatched, _FEW)
    return f"code in {_module(name)}{after} (not watched within it: {names})"


def _module(name: str) -> str:
    """Names a module so that a number is not taken for another thing."""
    return name if name == "the model" else f"module {name}"
