"""The entries of a flight record, from the lines that name them."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from .record_lines import Line
from .record_types import RecordEntry


def widths_of(steps: Sequence[Line]) -> list[int]:
    """How many entries each model has, by the widest of its lines."""
    models = max((len(line["models"]) for line in steps), default=0)
    widths = [0] * models
    for line in steps:
        for i, columns in enumerate(line["models"]):
            widths[i] = max(widths[i], columns["num"])
    return widths


def entries_of(heads: Sequence[Line], widths: Sequence[int]) -> list[RecordEntry]:
    """The entries of all models; those whose line was damaged are of no known kind.

    Args:
        heads: The lines of entries.
        widths: How many entries each model has; of further ones no step tells.
    """
    by_model = collections.defaultdict[int, list[Line]](list)
    for line in heads:
        by_model[line["model"]].append(line)
    return [
        each
        for model, width in enumerate(widths)
        for each in _of_model(by_model[model], model, width)
    ]


def _of_model(heads: Sequence[Line], model: int, width: int) -> list[RecordEntry]:
    found = [
        RecordEntry(model, "", "", "unknown", f"entry {i}", "unknown", math.nan, 0)
        for i in range(width)
    ]
    for line in heads:
        room = max(0, width - line["first"])  # its step may be missing
        for i, each in enumerate(line["entries"][:room]):
            found[line["first"] + i] = RecordEntry(
                model, each["module"], each["class"], *_rest(each)
            )
    return found


def _rest(entry: Line) -> tuple[str, str, str, float, int]:
    limit = float(entry["limit"])
    return entry["kind"], entry["label"], entry["dtype"], limit, entry["numel"]
