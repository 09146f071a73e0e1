"""The numbers of a run that a terminal shows, from the records of its ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..record.record_types import RecordEntry
from ..record.table import FlightRecord

_NUM_LINES = 512  # that are looked at
_TREND = 16  # lines that a trend is of
_NUM_INCIDENTS = 5

Numbers = dict[str, Any]


def summary_of(records: Sequence[FlightRecord], num: int) -> Numbers:
    """Summarizes records.

    Args:
        records: One of each rank.
        num: How many entries to list.

    Returns:
        A dict of plain values: see docs/formats.md.
    """
    tails = [record.tail(_NUM_LINES) for record in records]
    entries = [each for tail in tails for each in _entries(tail)]
    incidents = [each for tail in tails for each in _incidents(tail)]
    incidents.sort(key=lambda each: each["time"])
    run = records[0].run
    return {
        "schema": 1,
        "kind": "watch",
        "models": run.get("models", []),
        "host": run.get("host"),
        "world_size": run.get("world_size", 1),
        "policy": run.get("policy"),
        "ranks": [_rank(tail) for tail in tails],
        "worst": _worst(entries)[:num],
        "incidents": incidents[-_NUM_INCIDENTS:],
    }


def _rank(record: FlightRecord) -> Numbers:
    found: Numbers = {
        "path": str(record.path),
        "rank": record.run.get("rank", 0),
        "is_truncated": record.is_truncated,
        "step": None,
    }
    if not record.steps:
        return found
    last = record.steps[-1]
    seconds = None if last.seconds is None else last.seconds / last.count
    return {
        **found,
        "step": last.last,
        "age_seconds": max(0.0, time.time() - last.time),
        "step_seconds": seconds,
        "guard_share": last.guard_share,
        **{
            name: getattr(last, name)
            for name in ("loss", "grad_norm", "learning_rate", "loss_scale", "action")
        },
        "skipped": sum(step.num_skipped for step in record.steps),
    }


def _entries(record: FlightRecord) -> list[Numbers]:
    """The entries of a rank, with their headroom in the last line that has them."""
    if not record.steps:
        return []
    recent = record.tail(_TREND)
    bits = recent.headroom_bits()
    high = recent.values["abs_max"]
    assert high is not None
    rank = record.run.get("rank", 0)
    found = []
    for i, entry in enumerate(recent.entries):
        known = (~bits[:, i].isnan()).nonzero().flatten().tolist()
        if not known or entry.kind == "recorded":
            continue
        found.append(
            {
                "rank": rank,
                **_named(entry),
                "headroom_bits": float(bits[known[-1], i]),
                "trend": _trend(recent, bits[:, i], known),
                "abs_max": float(high[known[-1], i]),
            }
        )
    return found


def _named(entry: RecordEntry) -> Numbers:
    names = ("model", "module", "class_name", "kind", "label", "dtype")
    return {name: getattr(entry, name) for name in names}


def _trend(
    record: FlightRecord, bits: torch.Tensor, known: Sequence[int]
) -> float | None:
    """The bits that an entry wins or loses in a step, from its first to its last."""
    finite = [i for i in known if math.isfinite(bits[i])]
    if len(finite) < 2:
        return None
    first, last = finite[0], finite[-1]
    num_steps = record.steps[last].last - record.steps[first].last
    return float(bits[last] - bits[first]) / num_steps if num_steps > 0 else None


def _worst(entries: Sequence[Numbers]) -> list[Numbers]:
    """One of each entry, that of the rank where it is nearest to its end."""
    least: dict[tuple[Any, ...], Numbers] = {}
    for each in entries:
        key = tuple(each[name] for name in ("model", "module", "kind", "label"))
        if key not in least or each["headroom_bits"] < least[key]["headroom_bits"]:
            least[key] = each
    return sorted(least.values(), key=lambda each: each["headroom_bits"])


def _incidents(record: FlightRecord) -> list[Numbers]:
    return [
        {
            "rank": record.run.get("rank", 0),
            "step": step.first,
            "last_step": step.last,
            "time": step.time,
            "actions": step.actions,
        }
        for step in record.steps
        if step.actions
    ]
