"""Words for a bad entry, and for the gradients beside it."""

from __future__ import annotations

from ..verdict.verdict import BadEntry, Verdict

_NEAREST = 8


def place_of(entry: BadEntry) -> str:
    """Returns the name of an entry's module, or of its tensor; or "the model"."""
    return entry.fqn or "the model"


def what_of(entry: BadEntry) -> str:
    """Writes how many bad values an entry holds, and which entry it is."""
    infs = {"-": "-inf", "+-": "inf and -inf"}.get(entry.signs, "inf")
    kinds = [
        f"{count} {name}"
        for count, name in ((entry.num_nan, "nan"), (entry.num_inf, infs))
        if count
    ]
    holds = f"holds {' and '.join(kinds)}"
    if entry.class_name:
        return f"`{entry.label}` of {place_of(entry)} ({entry.class_name}) {holds}"
    return f"the {entry.kind.replace('_', ' ')} `{entry.label}` {holds}"


def share_sentences(entry: BadEntry) -> list[str]:
    """Writes how many of an entry's values are bad, where it has more than one."""
    if entry.numel <= 1:
        return []
    bad = entry.num_nan + entry.num_inf
    are = "is" if bad == 1 else "are"
    return [f"{bad} of its {entry.numel} {entry.dtype} values {are} non-finite."]


def gradient_sentences(verdict: Verdict) -> list[str]:
    """Names the gradients that are bad, and the nearest ones that are not."""
    dirty, clean = verdict.dirty_gradients, verdict.clean_gradients
    if not dirty:
        return []
    sentences = [f"Non-finite gradients: {some(dirty)}."]
    if clean:
        sentences.append(f"The nearest finite ones: {some(clean)}.")
    return sentences


def some(names: list[str]) -> str:
    """Lists the first of several names, and how many more there are."""
    shown = ", ".join(names[:_NEAREST])
    more = len(names) - _NEAREST
    return f"{shown} and {more} more" if more > 0 else shown
