"""Words for where a non-finite value came from."""

from __future__ import annotations

from ..verdict.verdict import BadEntry, Outsider, Verdict

_FEW = 4


def who_made_it(first: BadEntry, verdict: Verdict) -> str:
    """Writes the origin of the first bad value, as far as it is known."""
    return " ".join([_sentence(first, verdict), *verdict.remarks])


def _sentence(first: BadEntry, verdict: Verdict) -> str:
    maker = verdict.maker
    if verdict.origin == "made":
        given = f"The inputs of {maker} were finite{_exceptions(verdict)}"
        return f"{given}: it arose in {_code_of(maker, verdict)}."
    if verdict.origin == "given" and verdict.source == "unclear":
        return f"It was non-finite when the model received it: it came from {maker}."
    if verdict.source == "weight" and len(verdict.candidates) > 1:
        return f"It was non-finite when the call used it: {maker}."
    if verdict.origin == "given":
        return f"It was non-finite before the step: it came from {maker}."
    if verdict.origin == "unclear":
        return f"It is not known who created it: {maker}."
    if first.kind == "input" and verdict.source == "caller":
        name, *others = verdict.candidates
        if not isinstance(name, Outsider) and not others:
            return f"It arrived non-finite. It arose in {_code_of(name, verdict)}."
    return f"It arrived non-finite. It arose in {maker}."


def _exceptions(verdict: Verdict) -> str:
    exceptions = {"-inf": verdict.masks, "allowed values": verdict.allowed}
    but = " and ".join(
        f"{what} in {', '.join(labels)}"
        for what, labels in exceptions.items()
        if labels
    )
    return f" except {but}" if but else ""


def _code_of(name: str, verdict: Verdict) -> str:
    """Names the code of a module, as near as it is known."""
    after = f", after {verdict.after}" if verdict.after else ""
    if not verdict.unwatched:
        return f"{name}'s own code{after}"
    names = ", ".join(verdict.unwatched[:_FEW])
    more = len(verdict.unwatched) - _FEW
    names += f" and {more} more" if more > 0 else ""
    return f"{name}{after}; not watched within it: {names}"
