"""Words for a bad entry: what it is, and how many bad values it holds."""

from __future__ import annotations

from ..verdict.verdict import BadEntry


def what_of(entry: BadEntry) -> str:
    """Writes how many bad values an entry holds, and which entry it is."""
    if entry.not_scanned:
        return f"{_name_of(entry)} could not be scanned ({entry.not_scanned})"
    values = entry.nonfinite_text(has_numel=False)
    if entry.numel == 1 and not entry.is_finite_now:
        is_loss = entry.kind == "recorded" and entry.label == "loss"
        name = "the loss" if is_loss else _name_of(entry)
        return f"{name} is {values.removeprefix('1 ')}"
    if entry.is_finite_now:
        return (
            f"what was read as the weight `{entry.label}` held {values}; the weight is "
            "finite now"
        )
    return f"{_name_of(entry)} holds {values}"


def written_by_update(entry: BadEntry) -> str:
    values = entry.nonfinite_text(has_numel=False)
    return f"the optimizer's step wrote {values} to {_name_of(entry)}"


def _name_of(entry: BadEntry) -> str:
    if entry.class_name:
        return f"{entry.path.of_module('`')} ({entry.class_name})"
    return f"the {entry.kind.replace('_', ' ')} `{entry.label}`"
