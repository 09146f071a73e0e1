"""Words for where a non-finite value came from."""

from __future__ import annotations

from .verdict import BadEntry, Verdict


def who_made_it(first: BadEntry, verdict: Verdict) -> str:
    """The sentence on who made the first bad value, as far as it is known."""
    if verdict.origin == "made" and first.kind in ("output", "input"):
        exceptions = {"the -inf": verdict.masks, "what is allowed": verdict.allowed}
        but = " and ".join(
            f"{what} in {', '.join(labels)}"
            for what, labels in exceptions.items()
            if labels
        )
        given = (
            f"What {verdict.maker} was given was finite{' but for ' * bool(but)}{but}"
        )
        return f"{given}: it made the value itself."
    if verdict.origin == "made":
        return f"It was made by {verdict.maker}."
    if verdict.origin == "unclear":
        return f"It cannot be told who made it: {verdict.maker}."
    if verdict.origin == "given":
        return f"It was bad before the step: it came from {verdict.maker}."
    return f"It was bad when it came there: made by {verdict.maker}."
