"""The command `export`: a flight record as CSV or Parquet."""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from ...base.text import printable, with_progress
from ...guard.files.json_text import dumps
from ...guard.record.record_lines import EXTREMES, RecordEntry
from ...guard.record.record_step import RecordStep
from .subcommand import Commands, add_command, command, fail, reason, warn

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
