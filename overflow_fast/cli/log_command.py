"""The command `log`: filters the guard's JSON log."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.strict_json import SCHEMA
from ..record.record_lines import KIND as RECORD
from .adding import Commands, add_command, fail, reason

_PAUSE = 0.5  # seconds between two looks at a log that is followed

Line = dict[str, Any]


class LogError(ValueError):
    """A file that cannot be read as a log; says why."""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "log",
        _run,
        "filter the guard's log: by step, rank, action, kind",
        """
        log guard.jsonl --bad
        log guard.rank0.jsonl guard.rank1.jsonl --step 1000:2000 --json
        """,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a log")
    parser.add_argument(
        "--step", type=_steps, metavar="N|A:B", help="this step, or from A to before B"
    )
    parser.add_argument("--rank", type=int, help="the lines of this rank")
    parser.add_argument("--action", help="such as raise, skip, warn, GradScaler")
    parser.add_argument("--kind", help="such as run, step, spike")
    parser.add_argument("--bad", action="store_true", help="non-finite steps alone")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on as the log grows"
    )
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not all(each.isdecimal() or not each for each in (first, last)) or text == "":
        raise argparse.ArgumentTypeError(f"must be N or A:B, got {text}")
    begin = int(first or 0)
    end = int(last or sys.maxsize) if colon else begin + 1
    if end <= begin:
        raise argparse.ArgumentTypeError(f"{text} has no step: A must be below B")
    return range(begin, end)


def _run(parsed: argparse.Namespace) -> int:
    logs = [_Log(Path(path)) for path in parsed.paths]
    num_lines = num_wanted = 0
    try:
        while True:
            for log in logs:
                for line in log.read():
                    num_lines += 1
                    if _is_wanted(line, parsed):
                        num_wanted += 1
                        print(json.dumps(line) if parsed.json else _text(line))
            if not parsed.follow:
                break
            sys.stdout.flush()
            time.sleep(_PAUSE)
    except BrokenPipeError:
        raise
    except (OSError, LogError) as error:
        return fail(f"The log cannot be read: {reason(error)}")
    except KeyboardInterrupt:
        return 0
    for log in logs:
        if not log.path.stat().st_size:
            return fail(f"{log.path} is empty: it has no lines yet.")
        if log.rest:
            print(f"The last line of {log.path} is not whole.", file=sys.stderr)
    if num_lines and not num_wanted:
        print(f"None of the {num_lines} lines is such a line.", file=sys.stderr)
    return 0


class _Log:
    """A log that may grow, or be renamed when a new one begins.

    Args:
        path: The file.

    Attributes:
        rest: The beginning of a line that is not whole yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""
        self._offset = 0
        self._inode = -1
        self._ranks: dict[str, int] = {}

    def read(self) -> Iterator[Line]:
        """Yields the lines that were added since the last call, with their rank.

        Raises:
            OSError: If the file cannot be read.
            LogError: If it is no log, or one of a newer version.
        """
        with open(self.path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset, self.rest = inode, 0, b""
            is_first = self._offset == 0
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        for text in whole:
            line = _parsed(text)
            if is_first:
                self._check(line)
                is_first = False
            if line is not None:
                yield self._with_rank(line)
        if is_first and self.rest:
            self._check(_parsed(self.rest))

    def _check(self, first: Line | None) -> None:
        if first is not None and first.get("kind") == RECORD:
            raise LogError(
                f"{self.path} is a flight record: see `overflow-fast export`, `watch` "
                "and `report`."
            )
        if first is None or "overflow_fast" not in first:
            raise LogError(f"{self.path} is no log of overflow_fast.")
        schema = first.get("schema", 0)
        if not isinstance(schema, int):
            raise LogError(f"{self.path} is no log of overflow_fast.")
        if schema > SCHEMA:
            raise LogError(
                f"{self.path} was written by overflow_fast {first['overflow_fast']}; "
                "run `pip install -U overflow_fast`."
            )

    def _with_rank(self, line: Line) -> Line:
        if line.get("kind") == "run":
            self._ranks[line["run"]] = line.get("rank", 0)
        return {"rank": self._ranks.get(line.get("run", ""), 0), **line}


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _is_wanted(line: Line, parsed: argparse.Namespace) -> bool:
    return (
        (parsed.step is None or line.get("step", -1) in parsed.step)
        and (parsed.rank is None or line["rank"] == parsed.rank)
        and (parsed.action is None or line.get("action") == parsed.action)
        and (parsed.kind is None or line.get("kind") == parsed.kind)
        and (not parsed.bad or line.get("is_clean") is False)
    )


def _text(line: Line) -> str:
    """A line for a reader: time, rank, and what it says."""
    when = datetime.fromtimestamp(line.get("time", 0)).isoformat(" ", "seconds")
    begin = f"{when} rank {line['rank']}"
    if line.get("kind") == "run":
        models = ", ".join(line.get("models", []))
        return f"{begin} run {line['run']}: {models}, on_overflow={line['policy']}"
    if line.get("kind") != "step":
        known = {"rank", "run", "time", "kind"}
        rest = ", ".join(f"{k}={v}" for k, v in line.items() if k not in known)
        return f"{begin} {line.get('kind')}: {rest}"
    action = f" {line['action']}" if line.get("action") else ""
    if line.get("is_clean"):
        bits = line.get("headroom_bits")
        near = f", {bits} bits left at {line['headroom_at']}" if bits else ""
        return f"{begin} step {line['step']} clean{action}{near}"
    cause = f", {line['cause']}" if line.get("cause") else ""
    return f"{begin} step {line['step']} NOT FINITE{action}: {line.get('first')}{cause}"
