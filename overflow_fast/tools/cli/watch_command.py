"""The command `watch`: a run as it trains, from its flight records."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...guard.files.json_text import dumps
from ...guard.record.record_lines import RecordEntry
from ..record.table import DRAWN, FlightRecord
from .subcommand import (
    Commands,
    add_command,
    at_least_one,
    command,
    fail,
    reason,
    require_content,
)

# The numbers of a run that a terminal shows, from the records of its ranks.


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
        **{name: getattr(last, name) for name in (*DRAWN, "action")},
        "skipped": sum(step.num_skipped for step in record.steps),
    }


def _entries(record: FlightRecord) -> list[Numbers]:
    """The entries of a rank, with their headroom in the last line that has them."""
    if not record.steps:
        return []
    recent = record.tail(_TREND)
    lines = range(len(recent))
    bits = [recent.headroom_row(i) for i in lines]
    high = [recent.row("abs_max", i) for i in lines]
    rank = record.run.get("rank", 0)
    found = []
    for j, entry in enumerate(recent.entries):
        known = [i for i in lines if not math.isnan(bits[i][j])]
        if not known or entry.kind == "recorded":
            continue
        last = known[-1]
        found.append(
            {
                "rank": rank,
                **_named(entry),
                "headroom_bits": bits[last][j],
                "trend": _trend(recent, [row[j] for row in bits], known),
                "abs_max": high[last][j],
            }
        )
    return found


def _named(entry: RecordEntry) -> Numbers:
    names = ("model", "module", "class_name", "kind", "label", "dtype")
    return {name: getattr(entry, name) for name in names}


def _trend(
    record: FlightRecord, bits: Sequence[float], known: Sequence[int]
) -> float | None:
    """The bits that an entry wins or loses in a step, from its first to its last."""
    finite = [i for i in known if math.isfinite(bits[i])]
    if len(finite) < 2:
        return None
    first, last = finite[0], finite[-1]
    num_steps = record.steps[last].last - record.steps[first].last
    return (bits[last] - bits[first]) / num_steps if num_steps > 0 else None


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


_SHARE = 4  # of the time, at most one in this many seconds is spent reading
_LONGEST = 86_400  # seconds between two looks


@command(after="run")
def add_watch(commands: Commands) -> None:
    """Adds the command `watch`."""
    parser = add_command(
        commands,
        "watch",
        _run,
        "watch a run in the terminal: worst entries, trend, incidents, ranks",
        """
        watch run.ofr
        watch run.rank0.ofr run.rank1.ofr --once --json
        """,
        more=(
            "; needs rich (`pip install rich`) but with `--json`; `--once` prints once"
        ),
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a flight record, one of each rank"
    )
    parser.add_argument("--once", action="store_true", help="print once, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line each")
    parser.add_argument(
        *("-n", "--num"), type=at_least_one, default=12, help="how many entries to show"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, help="seconds between two looks"
    )


def _seconds(text: str) -> float:
    found = float(text)
    if not 0 < found <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"must be above 0 and at most {_LONGEST}, got {text}"
        )
    return found


def _run(parsed: argparse.Namespace) -> int:
    try:
        if parsed.once:
            require_content(parsed.paths)
        if parsed.json:
            return _print_json(parsed)
        return _show(parsed)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return fail(f"The record cannot be read: {reason(error)}")
    except ImportError as error:
        return fail(f"watch cannot run: {error}.")
    except KeyboardInterrupt:
        return 0


def _look(paths: Sequence[str], num: int) -> dict[str, Any]:
    from ..record.reading import read_record

    return summary_of([read_record(path) for path in paths], num)


def _print_json(parsed: argparse.Namespace) -> int:
    while True:
        begin = time.monotonic()
        found = _look(parsed.paths, parsed.num)
        print(dumps(found), flush=True)
        if parsed.once:
            return 0
        _pause(parsed.interval, time.monotonic() - begin)


def _show(parsed: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ImportError(
            f"it needs rich: run `pip install rich`, or add --json ({error})"
        ) from error
    from .watch_view import view_of

    console = Console()
    found = _look(parsed.paths, parsed.num)
    if parsed.once or not sys.stdout.isatty():
        console.print(view_of(found))
        return 0
    with Live(view_of(found), console=console, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            live.update(view_of(_look(parsed.paths, parsed.num)), refresh=True)
            _pause(parsed.interval, time.monotonic() - begin)


def _pause(interval: float, taken: float) -> None:
    time.sleep(max(interval, _SHARE * taken))
