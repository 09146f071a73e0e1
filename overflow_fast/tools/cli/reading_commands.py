"""Commands that read files of runs: `log`, `report`, `export`, `explain`, `compare`."""

from __future__ import annotations

import argparse
import csv
import importlib
import inspect
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from ...base.text import counted, printable, with_progress
from ...guard.files.fields import tag_of
from ...guard.files.json_text import SCHEMA, dumps, parse_object
from ...guard.files.reading import FileError, lines_of, open_regular
from ...guard.files.schema import head_of
from ...guard.record.record_lines import EXTREMES, RecordEntry
from ...guard.record.record_lines import KIND as RECORD
from ...guard.record.record_step import RecordStep
from ...guard.report.log_lines import RunLine
from .log_reading import decoder
from .subcommand import (
    Commands,
    add_command,
    command,
    fail,
    reason,
    require_content,
    warn,
)

# `log`: filters the guard's JSON log.


_PAUSE = 0.5  # seconds between two looks at a log that is followed


class LogError(FileError):
    """A file that cannot be read as a log; says why."""


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
                    self._check(text)
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

    def _check(self, first: bytes | None) -> None:
        """Raises LogError if a first line is not that of a log that can be read."""
        head = head_of(first)
        if head.kind == RECORD:
            raise LogError(
                f"{self.path} is a flight record: see `overflow-fast export`, `watch` "
                "and `report`."
            )
        if head.overflow_fast is None:
            raise LogError(f"{self.path} is no log of overflow_fast.")
        try:
            head.check_schema(SCHEMA)
        except FileError as error:
            raise LogError(f"{self.path} cannot be read: {error}.") from error


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


# `report`: a page of flight records and evidence.


@command(after="watch")
def add_report(commands: Commands) -> None:
    """Adds the command `report`."""
    parser = add_command(
        commands,
        "report",
        _run_report,
        "write a page of flight records and evidence",
        "report run.ofr evidence/ -o run.html",
        more=": [what it shows](observing.md#a-page)",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a flight record (one of each rank), or a folder of evidence",
    )
    parser.add_argument(
        *("-o", "--output"), default="run.html", help="the page (default: run.html)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what is in the page as JSON"
    )


def _run_report(parsed: argparse.Namespace) -> int:
    from ..page.render import read_sources, write_page

    try:
        require_content(parsed.paths)
        paths = with_progress(parsed.paths, "files", len(parsed.paths))
        sources = read_sources(paths)
        page = write_page(
            parsed.output, sources.records, sources.incidents, sources.damaged
        )
    except (OSError, ValueError, ImportError) as error:
        return fail(f"The page cannot be written: {reason(error)}")
    for sentence in sources.damaged:
        warn(sentence)
    if sources.older:
        names = ", ".join(record.path.name for record in sources.older)
        warn(f"The page is of the newest run; left out, of earlier ones: {names}.")
    if parsed.json:
        print(dumps({**sources.to_dict(), "path": str(page)}))
    else:
        print(printable(str(page)))
    return 0


# `export`: a flight record as CSV or Parquet.


_ROWS = 50_000  # of a row group
_SUFFIXES = (".csv", ".parquet")

Row = dict[str, Any]


@command(after="log")
def add_export(commands: Commands) -> None:
    """Adds the command `export`."""
    parser = add_command(
        commands,
        "export",
        _run_export,
        "write a flight record as CSV or Parquet",
        """
        export run.ofr -o run.csv
        export run.rank0.ofr run.rank1.ofr --steps -o steps.parquet
        """,
        more=(
            " (`pip install pyarrow`): a row for each entry of each step, or "
            "with `--steps` for each step; never over a file"
        ),
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a flight record")
    parser.add_argument(
        *("-o", "--output"),
        required=True,
        help="a new file that ends in .csv or .parquet",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="a row for each step (loss, learning rate, ...), not for each entry of it",
    )
    parser.add_argument("--json", action="store_true", help="print what was written")


def _run_export(parsed: argparse.Namespace) -> int:
    from ..record.reading import read_record

    output = Path(parsed.output)
    if output.suffix not in _SUFFIXES:
        return fail(f"output must end in .csv or .parquet, got {output.name}")
    try:
        records = [read_record(path) for path in parsed.paths]
        if len({*map(os.path.realpath, parsed.paths)}) < len(parsed.paths):
            return fail(f"a record is given twice: {' '.join(parsed.paths)}")
        make = _step_rows if parsed.steps else _value_rows
        rows = itertools.chain.from_iterable(map(make, records))
        total = None if not parsed.steps else sum(map(len, records))
        num_rows = _write(output, with_progress(rows, "rows", total))
    except FileExistsError:
        return fail(f"{output} is there already: remove it, or choose another name.")
    except (OSError, ValueError, ImportError) as error:
        return fail(f"The record cannot be exported: {reason(error)}")
    for record in records:
        if record.is_truncated or record.num_damaged:
            warn(f"{record.path} has lines that are not whole.")
    written = {"path": str(output), "rows": num_rows}
    text = printable(f"{output}: {num_rows} rows")
    print(dumps(written) if parsed.json else text)
    return 0


def _value_rows(record: Any) -> Iterator[Row]:
    rank = record.run.get("rank", 0)
    for row in record:
        yield {"rank": rank, **row}


def _step_rows(record: Any) -> Iterator[Row]:
    rank = record.run.get("rank", 0)
    for step in record.steps:
        row = msgspec.structs.asdict(step)
        del row["actions"]
        yield {"rank": rank, **row, "action": step.action}


def _write(output: Path, rows: Iterable[Row]) -> int:
    """Writes a new file, and returns the number of its rows.

    Raises:
        ImportError: If the file is to be Parquet and pyarrow is not installed.
        OSError: If it cannot be written, or is there already.
        ValueError: If there are no rows.
    """
    write = _write_csv if output.suffix == ".csv" else _write_parquet
    parts = _parts(rows)
    first = next(parts, None)
    if first is None:
        raise ValueError("it has no steps yet.")
    if output.suffix == ".parquet":
        _pyarrow()
    with open(output, "xb") as file:
        try:
            return write(file, itertools.chain([first], parts))
        except BaseException:
            output.unlink()
            raise


def _parts(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    iterator = iter(rows)
    while part := list(itertools.islice(iterator, _ROWS)):
        yield part


def _write_csv(file: Any, parts: Iterable[Sequence[Row]]) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer: csv.DictWriter[str] | None = None
    num_rows = 0
    for part in parts:
        if writer is None:
            writer = csv.DictWriter(text, list(part[0]))
            writer.writeheader()
        writer.writerows(part)
        num_rows += len(part)
    text.flush()
    text.detach()
    return num_rows


def _write_parquet(file: Any, parts: Iterable[Sequence[Row]]) -> int:
    pyarrow = _pyarrow()
    writer, num_rows = None, 0
    for part in parts:
        table = pyarrow.Table.from_pylist(list(part), schema=_schema(part[0]))
        if writer is None:
            writer = pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        num_rows += len(part)
    if writer is not None:
        writer.close()
    return num_rows


_TEXTS = ("module", "class_name", "kind", "label", "dtype", "action")


def _schema(row: Row) -> Any:
    """The columns' types, whatever the first rows lack."""
    pyarrow = _pyarrow()
    hints = {**get_type_hints(RecordEntry), **get_type_hints(RecordStep)}
    floats = {n for n, hint in hints.items() if float in (hint, *get_args(hint))}
    kinds = {name: pyarrow.string() for name in _TEXTS}
    kinds |= {name: pyarrow.float64() for name in (*EXTREMES, *floats)}
    return pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in row])


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            f"Parquet needs pyarrow: run `pip install pyarrow` ({error})."
        ) from error
    return importlib.import_module("pyarrow")


# `explain`: a step, from the folder of its evidence.


@command(after="report")
def add_explain(commands: Commands) -> None:
    """Adds the command `explain`."""
    parser = add_command(
        commands,
        "explain",
        _run_explain,
        "explain a non-finite step from the folder of its evidence",
        "explain evidence/overflow_fast/RUN/step-00000012 --model train.py:build",
        more=(
            ": [how](explanations.md#explain-it-elsewhere); `--any-weights` "
            "accepts other weights than those of the step"
        ),
        needs_extension=True,
    )
    parser.add_argument("folder", help="the folder, such as evidence/.../step-00000012")
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="a function that returns the model with the weights of the step",
    )
    parser.add_argument(
        "--loss",
        metavar="FILE.py:FUNCTION",
        help="a function that takes the model and the batch and returns the loss",
    )
    parser.add_argument(
        "--any-weights", action="store_true", help="explain with other weights, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_explain(parsed: argparse.Namespace) -> int:
    from ...explainer.explain_folder import explain_folder, function_at, require_step
    from ...explainer.step_file import UnreadableStepError
    from .terminal import shown

    try:
        require_step(parsed.folder)
        model = _made(function_at("--model", parsed.model))
        loss = None if parsed.loss is None else function_at("--loss", parsed.loss)
        found = explain_folder(
            parsed.folder, model, loss, any_weights=parsed.any_weights
        )
    except UnreadableStepError as error:
        return fail(f"The step cannot be explained: {error}.")
    print(dumps(found.to_dict(), indent=1) if parsed.json else shown(str(found)))
    return 0


def _made(make: Callable[..., Any]) -> Any:
    from torch import nn

    from ...explainer.step_file import UnreadableStepError

    wanted = "--model must name a function that takes no arguments and returns a model"
    if isinstance(make, nn.Module):
        raise UnreadableStepError(f"{wanted}, got a {type(make).__name__}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UnreadableStepError(f"{wanted}: {error}") from error
    except ValueError:  # it has no signature
        pass
    return make()


# `compare`: two recordings, layer by layer.


_FORMATS = (".html", ".xlsx", ".json")
NOTHING_COMPUTED = 3  # the exit status where only weights or batches were compared


@command(after="explain")
def add_compare(commands: Commands) -> None:
    """Adds the command `compare`."""
    parser = add_command(
        commands,
        "compare",
        _run_compare,
        "compare two recordings layer by layer, and name the first that differs",
        """
        compare run_a run_b
        compare run_a run_b --map '^layer\\.=blocks.' -o diff.html
        """,
        more=": [how](compare.md#two-runs-compared)",
    )
    parser.add_argument("recording", help="the folder of a recording")
    parser.add_argument("reference", help="the folder of the one to compare it with")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a regular expression in its module names, and its replacement",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="also highlight rows with a largest absolute difference above this",
    )
    parser.add_argument(
        "--cosine", type=float, help="also highlight rows with a lower cosine"
    )
    parser.add_argument(
        *("-o", "--output"),
        metavar="FILE",
        help="also write the comparison: FILE.html, FILE.xlsx or FILE.json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_compare(parsed: argparse.Namespace) -> int:
    """Returns the exit status: see docs/guides/command-line.md."""
    from ..compare.entry_points import compare
    from .terminal import shown

    output: str = parsed.output or ""
    if output and not output.endswith(_FORMATS):
        return fail(f"FILE must end with {', '.join(_FORMATS)}, got {output}")
    pairs = [each.partition("=") for each in parsed.map]
    if not all(sign for _, sign, _ in pairs):
        return fail(f"--map must be OLD=NEW, got {' '.join(parsed.map)}")
    try:
        found = compare(
            parsed.recording,
            parsed.reference,
            names={old: new for old, _, new in pairs},
            threshold=parsed.threshold,
            cosine=parsed.cosine,
        )
        if output:
            getattr(found, f"to_{output.rpartition('.')[2]}")(output)
    except (ImportError, OSError, ValueError) as error:
        return fail(f"The runs cannot be compared: {reason(error)}")
    print(found.to_json() if parsed.json else shown(str(found)))
    if output and not parsed.json:
        print(printable(output))
    if not found.num_compared:
        return 2
    if not found.differs and not found.num_computed:
        return NOTHING_COMPUTED
    return int(found.differs)
