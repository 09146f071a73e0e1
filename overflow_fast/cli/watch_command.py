"""The command `watch`: a run as it trains, from its flight records."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..files.json_text import dumps
from .adding import Commands, add_command, at_least_one, fail, reason, require_content

_SHARE = 4  # of the time, at most one in this many seconds is spent reading
_LONGEST = 86_400  # seconds between two looks


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "watch",
        _run,
        "watch a run in the terminal: worst entries, trend, incidents, ranks",
        """
        watch run.ofr
        watch run.rank0.ofr run.rank1.ofr --once --json
        """,
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
    from .watch_summary import summary_of

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
