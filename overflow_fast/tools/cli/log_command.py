"""The command `log`: filters the guard's JSON log."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ...base.text import counted, printable
from ...guard.files.fields import tag_of
from ...guard.files.json_text import dumps, parse_object
from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.report.log_lines import RunLine
from .log_reading import LogError, check_first, decoder
from .subcommand import Commands, add_command, command, fail, reason, warn

_PAUSE = 0.5  # seconds between two looks at a log that is followed


@command(after="doctor")
def add_log(commands: Commands) -> None:
    """Adds the command `log`."""
    parser = add_command(
        commands,
        "log",
        _run_log,
        "filter the guard's log: by step, rank, action, kind",
        """
        log guard.jsonl --bad
        log guard.rank0.jsonl guard.rank1.jsonl --step 1000:2000 --json
        """,
        more=(
            ": `--step`, `--rank`, `--action`, `--kind`, `--bad`; `-f` follows "
            "[it](../formats.md#log)"
        ),
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a log")
    parser.add_argument(
        "--step",
        type=_step_range,
        metavar="N|A:B",
        help="this step, or from A to before B",
    )
    parser.add_argument("--rank", type=int, help="the lines of this rank")
    parser.add_argument("--action", help="such as raise, skip, warn, GradScaler")
    parser.add_argument("--kind", help="such as run, step, spike")
    parser.add_argument("--bad", action="store_true", help="non-finite steps alone")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on as the log grows"
    )
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def _step_range(text: str) -> range:
    first, colon, last = text.partition(":")
    if not all(each.isdecimal() or not each for each in (first, last)) or text == "":
        raise argparse.ArgumentTypeError(f"must be N or A:B, got {text}")
    begin = int(first or 0)
    end = int(last or sys.maxsize) if colon else begin + 1
    if end <= begin:
        raise argparse.ArgumentTypeError(f"{text} has no step: A must be below B")
    return range(begin, end)


def _run_log(parsed: argparse.Namespace) -> int:
    try:
        logs = [_Log(Path(path)) for path in parsed.paths]
        return _print_all(logs, parsed)
    except BrokenPipeError:
        raise
    except (OSError, LogError, ImportError) as error:
        return fail(f"The log cannot be read: {reason(error)}")
    except KeyboardInterrupt:
        return 0


def _print_all(logs: list[_Log], parsed: argparse.Namespace) -> int:
    num_lines = num_wanted = 0
    while True:
        for log in logs:
            for line in log.read():
                num_lines += 1
                if _is_wanted(line, parsed):
                    num_wanted += 1
                    try:
                        text = (_json if parsed.json else _text_of)(line)
                    except (FileError, RecursionError):
                        log.num_damaged += 1
                    else:
                        print(text)
        if not parsed.follow:
            break
        sys.stdout.flush()
        time.sleep(_PAUSE)
    for log in logs:
        if not log.has_lines:
            return fail(f"{log.path} is empty: it has no lines yet.")
        if log.num_damaged:
            damaged = counted(log.num_damaged, "damaged line")
            warn(f"{log.path}: {damaged} left out.")
        if log.is_truncated:
            warn(f"The last line of {log.path} is not whole.")
    if num_lines and not num_wanted:
        warn(f"None of the {num_lines} lines is such a line.")
    return 0


class _Log:
    """A log that may grow, or be renamed when a new one begins.

    Args:
        path: The file.

    Attributes:
        has_lines: Whether the file is not empty.
        is_truncated: Whether the last line is not whole yet.
        num_damaged: How many other lines cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_lines = self.is_truncated = False
        self.num_damaged = 0
        self._lines = decoder()
        self._offset = 0
        self._inode = -1
        self._ranks: dict[str, int] = {}

    def read(self) -> Iterator[_Line]:
        """Yields the lines that were added since the last call, as they are written.

        Raises:
            OSError: If the file cannot be read.
            LogError: If it is no log, or one of a newer version.
        """
        with open_regular(self.path) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            self.is_truncated = False
            for text in lines_of(file):
                self.has_lines = True
                if self._offset == 0:
                    check_first(self.path, text)
                if text is not None and not text.endswith(b"\n"):
                    self.is_truncated = True
                    return
                self._offset = file.tell()
                found = self._decoded(text)
                if found is not None:
                    yield found

    def _decoded(self, text: bytes | None) -> _Line | None:
        try:
            line = None if text is None else self._lines.decode(text)
        except FileError:
            line = None
        if line is None or text is None:
            self.num_damaged += 1
            return None
        rank = getattr(line, "rank", None)
        if not isinstance(rank, int):
            rank = self._ranks.get(line.run, 0)
        elif isinstance(line, RunLine):  # which tells it for the others
            self._ranks[line.run] = rank
        return _Line(line, rank, text)


class _Line(NamedTuple):
    """A line of a log.

    Attributes:
        known: The fields that this version knows, as `guard.report.log_lines` has them.
        rank: The rank that wrote it, or that it is about.
        data: All of it.
    """

    known: Any
    rank: int
    data: bytes

    @property
    def kind(self) -> str:
        """Its kind, known or not."""
        return str(getattr(self.known, "kind", None) or tag_of(type(self.known)))


def _is_wanted(line: _Line, parsed: argparse.Namespace) -> bool:
    step = getattr(line.known, "step", None)
    return (
        (parsed.step is None or (-1 if step is None else step) in parsed.step)
        and (parsed.rank is None or line.rank == parsed.rank)
        and (
            parsed.action is None
            or getattr(line.known, "action", None) == parsed.action
        )
        and (parsed.kind is None or line.kind == parsed.kind)
        and (not parsed.bad or getattr(line.known, "is_clean", None) is False)
    )


def _json(line: _Line) -> str:
    """A line with all its fields, and its rank, as JSON."""
    return dumps({"rank": line.rank, **_fields(line.data)})


def _fields(data: bytes) -> dict[str, Any]:
    """All fields of a line.

    Raises:
        FileError: If one is nested too deeply, or a number has too many digits.
    """
    fields = parse_object(data)
    if fields is None:
        raise FileError("not every field of the line can be read")
    return fields


def _text_of(line: _Line) -> str:
    """A line for a reader: time, rank, and what it says."""
    when = datetime.fromtimestamp(line.known.time or 0).isoformat(" ", "seconds")
    return printable(f"{when} rank {line.rank} {_content(line)}")


def _content(whole: _Line) -> str:
    line, kind = whole.known, whole.kind
    if kind == "run":
        models = ", ".join(line.models or [])
        return f"run {line.run}: {models}, on_overflow={line.policy or 'unknown'}"
    if kind != "step":
        known = {"rank", "run", "time", "kind"}
        fields = _fields(whole.data).items()
        rest = ", ".join(f"{k}={v}" for k, v in fields if k not in known)
        return f"{kind}: {rest}"
    action = f" {line.action}" if line.action else ""
    if line.is_clean:
        bits = line.headroom_bits
        near = f", {bits} bits left at {line.headroom_at}" if bits else ""
        return f"step {line.step} clean{action}{near}"
    cause = f", {line.cause}" if line.cause else ""
    return f"step {line.step} NOT FINITE{action}: {line.first}{cause}"
