"""Writes the page: one HTML file that needs no network and nothing beside it."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.text import numbered, printable
from ...guard.files.reading import open_regular
from ...guard.verdict.entry_headroom import growth_text
from ..record.reading import read_record
from ..record.table import FlightRecord
from .columns import Column
from .failure_path import failure_path
from .grid import ALL_ZERO, BITS, FAMILIES, NONFINITE, NOT_SEEN, Grid, Sheet, name_of
from .incidents import Incident, read_incidents
from .payloads import payloads
from .sparklines import SPARKLINES, sparklines_of

# The tables of the page, which say in text what its pictures show.


_MOST_ROWS = 500  # of a table; chosen
_MOST_STEPS = 400  # columns of the heatmap's table; chosen
_HEADS = "entry", "class", "kind", "dtype", "least bits", "magnitude", "in step"
_FAR = 32.0  # bits from which a factor has too many digits to be read
_COUNTS = {"num_saturated": "saturated", "num_zero": "zeros"}
_NOT_COUNTED = {
    "num_saturated": "Saturated values were not counted: the monitor `Saturation` "
    "counts them in the step after one in which a float16 or float8 value was the "
    "dtype's largest number.",
    "num_zero": "Zero values were not counted: `monitors=[Underflow()]` counts them.",
}


class Table(NamedTuple):
    """A table of texts.

    Attributes:
        heads: The names of its columns.
        rows: The texts of its rows.
        remark: What it leaves out, in a sentence, or "".
    """

    heads: list[str]
    rows: list[list[str]]
    remark: str = ""


@dataclass
class _Nearest:
    """Of one entry, over all steps of all records."""

    bits: float = math.inf
    abs_max: float = math.nan
    where: str = "never checked"
    rank: str = ""
    num_bad: int = 0
    first_bad: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def entry_table(sheet: Sheet, grid: Grid) -> Table:
    """A row for each entry: its least headroom, and where it was not finite."""
    records, nearest = sheet.records, [_Nearest() for _ in sheet.entries]
    for record, rows in zip(records, sheet.rows, strict=True):
        _add(record, [nearest[row] for row in rows])
    worst = sorted(range(len(nearest)), key=lambda i: _need(nearest[i]))[:_MOST_ROWS]
    has_models = any(entry.model for entry in sheet.entries)
    left_out = len(nearest) - len(worst)
    ranks = ["rank"] if len(records) > 1 else []
    counts = [name for name in _COUNTS if name in grid.counts]
    last = "non-finite steps", "first", *(_COUNTS[name] for name in counts)
    whole = Table(
        [*_HEADS, *ranks, *last],
        [
            [
                name_of(sheet.entries[i], has_models),
                sheet.entries[i].class_name,
                sheet.entries[i].kind.replace("_", " "),
                sheet.entries[i].dtype,
                *_cells(nearest[i], bool(ranks)),
                *(_count(nearest[i].counts.get(name)) for name in counts),
            ]
            for i in sorted(worst)
        ],
        f"{left_out} more entries, which have more headroom, are not listed."
        if left_out
        else "",
    )
    return _without_empty(whole)


def _need(nearest: _Nearest) -> tuple[int, float]:
    return -nearest.num_bad, nearest.bits


def _cells(entry: _Nearest, has_ranks: bool) -> list[str]:
    is_known = not math.isnan(entry.abs_max)
    bits = "all 0" if entry.abs_max == 0 else f"{entry.bits:.1f}"
    return [
        bits if is_known else "",
        f"{entry.abs_max:.4g}" if is_known else "",
        entry.where,
        *([entry.rank] if has_ranks else []),
        str(entry.num_bad or ""),
        entry.first_bad,
    ]


def _count(number: int | None) -> str:
    return "not counted" if number is None else str(number)


def _add(record: FlightRecord, nearest: Sequence[_Nearest]) -> None:
    """Adds what one record knows of entries."""
    high = record.values["abs_max"]
    if not len(record) or not nearest or high is None:
        return
    bad, bits = record.is_nonfinite(), record.headroom_bits()
    is_known = bits.isfinite() | ((bits == math.inf) & ~bad)
    least, at = bits.masked_fill(~is_known, math.inf).min(0)
    # Where all known values were 0 there is no least: the first step of those.
    at = torch.where(least == math.inf, is_known.int().argmax(0), at)
    names = [str(Column(s.first, s.last, [])) for s in record.steps]
    num_bad, first_bad = bad.sum(0).tolist(), bad.int().argmax(0).tolist()
    most = {
        name: [int(number) for number in values.amax(0).tolist()]
        for name in _COUNTS
        if (values := record.values[name]) is not None
    }
    for j, each in enumerate(nearest):
        line = int(at[j])
        is_nearer = math.isnan(each.abs_max) or least[j].item() < each.bits
        if is_known[line, j] and is_nearer:
            each.bits, each.abs_max = least[j].item(), high[line, j].item()
            each.where, each.rank = names[line], str(record.run.get("rank", "?"))
        if num_bad[j]:
            each.where = "" if math.isnan(each.abs_max) else each.where
            each.num_bad = max(each.num_bad, num_bad[j])
            each.first_bad = each.first_bad or names[first_bad[j]]
        for name, numbers in most.items():
            if numbers[j] >= 0:
                each.counts[name] = max(each.counts.get(name, 0), numbers[j])


def step_table(sheet: Sheet) -> Table:
    """A row for each step, or for several: its numbers, and its worst entry."""
    records, grid = sheet.records, sheet.grid(_MOST_STEPS)
    if not grid.columns:
        return Table([], [])
    sparklines = sparklines_of(records, grid.columns)
    shown = [name for name in sparklines if name != "spikes"]
    names = [name_of(entry) for entry in sheet.entries]
    rows = []
    for i, column in enumerate(grid.columns):
        numbers = [_short(sparklines[name][i]) for name in shown]
        done = _actions(records, column)
        rows.append([str(column), *numbers, done, *_worst(grid, i, names)])
    heads = ["step", *(SPARKLINES[name] for name in shown), "guard"]
    return _without_empty(Table([*heads, "non-finite", "least bits", "at"], rows))


def _without_empty(table: Table) -> Table:
    """The table without the columns in which no row has anything."""
    if not table.rows:
        return table
    shown = [i for i in range(len(table.heads)) if any(row[i] for row in table.rows)]
    rows = [[row[i] for i in shown] for row in table.rows]
    return Table([table.heads[i] for i in shown], rows, table.remark)


def _actions(records: Sequence[FlightRecord], column: Column) -> str:
    found = {
        action
        for record, lines in zip(records, column.lines, strict=True)
        for i in lines
        for action in record.steps[i].actions
    }
    return ", ".join(sorted(found))


def _worst(grid: Grid, column: int, names: Sequence[str]) -> list[str]:
    codes = grid.headroom[:, column]
    num_bad = int((codes == NONFINITE).sum())
    if not len(codes):
        return ["", "", ""]
    row = int(codes.argmin())
    code = int(codes[row])
    if code == NOT_SEEN:
        return ["", "not checked", ""]
    texts = {NONFINITE: "non-finite", ALL_ZERO: "all 0"}
    bits = texts.get(code, f"{code / BITS:.1f}")
    return [str(num_bad or ""), bits, names[row]]


_HERE = Path(__file__).parent
# By this a page that may be written over is known.
GENERATOR = '<meta name="generator" content="overflow_fast">'
_MOST_COLUMNS = 2000
# Names, paths and calls; a module may have any name, which is left as it is.
_CODE = re.compile(r"`((?:[\w.\[\]/=*, :()-]|&#39;)+)`")
_ABSENT = {"recorded": "what `guard.record()` is given"}


def write_page(
    path: str | os.PathLike[str],
    records: Sequence[FlightRecord],
    incidents: Sequence[Incident] = (),
    gaps: Sequence[str] = (),
) -> Path:
    """Writes a page of records and incidents. Does not incur a CPU-GPU sync.

    Args:
        path: The file; an older page of overflow_fast is written over, nothing else.
        records: The flight records of one run, one for each rank.
        incidents: What the evidence tells of bad steps.
        gaps: What the guard did not check, in sentences.

    Returns:
        The file.

    Raises:
        FileExistsError: If the file is there, and no page of overflow_fast.
        OSError: If it cannot be written.
    """
    return save_page(path, lambda: page_of(records, incidents, gaps))


def save_page(path: str | os.PathLike[str], make: Callable[[], str]) -> Path:
    """Writes a page; its text needs `GENERATOR` near its beginning.

    Args:
        path: The file; an older page of overflow_fast is written over, nothing else.
        make: Makes the text.

    Returns:
        The file.

    Raises:
        FileExistsError: If the file is there, and no page of overflow_fast.
        OSError: If it cannot be written.
    """
    where = Path(path)
    if os.path.lexists(where) and not _is_page(where):
        raise FileExistsError(
            f"{where} is no page of overflow_fast, and is not written over: give "
            "another name"
        )
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(make(), encoding="utf-8", errors="backslashreplace")
    return where


def _is_page(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return GENERATOR.encode() in file.read(1024)
    except OSError:
        return False


def page_of(
    records: Sequence[FlightRecord],
    incidents: Sequence[Incident] = (),
    gaps: Sequence[str] = (),
) -> str:
    """Makes the text of a page; see `write_page()`."""
    from markupsafe import Markup

    sheet = Sheet(records)
    grid = sheet.grid(_MOST_COLUMNS)
    pages = html_templates(_HERE, short=_short, prose=_prose, text=_text_of)
    text: str = pages.get_template("page.html").render(
        generator=Markup(GENERATOR),
        style=Markup(page_style()),
        scripts=[Markup(_own(name)) for name in ("cells.js", "heatmap.js")],
        copy=Markup(_own("copy.js")),
        title=_title(records, incidents),
        payloads=payloads(sheet, [(each.step, each.kind) for each in incidents])
        if sheet.entries and grid.columns
        else {},
        runs=[record.run for record in records],
        incidents=list(reversed(incidents)),
        first_bad=None if incidents else _first_bad(sheet, grid),
        paths=[(each, failure_path(each, sheet, grid)) for each in reversed(incidents)],
        entries=entry_table(sheet, grid),
        steps=step_table(sheet),
        healthy=_healthy(sheet, grid),
        gaps=list(dict.fromkeys([*gaps, *_reported(incidents), *_gaps(sheet, grid)])),
        versions=_versions(records),
    )
    return text


def _title(records: Sequence[FlightRecord], incidents: Sequence[Incident]) -> str:
    """The subject of a page: steps, script, models, host, date, as far as known."""
    what = numbered("step", [each.step for each in incidents]) if incidents else "Run"
    parts = [f"Non-finite {what}" if incidents else what]
    for run in [record.run for record in records[:1]]:
        parts += [_short(run.get(name)) for name in ("script", "models", "host")]
        parts.append(_short(run.get("started")).replace("T", " ").replace("Z", " UTC"))
    folders = [each.folder for each in incidents[:1] if each.folder is not None]
    if folders and not records:
        parts.append(folders[0].resolve().parent.name)  # the id of the run
    return f"{', '.join(filter(None, parts))} - overflow_fast"


@functools.cache  # compiling the templates takes longer than filling them
def html_templates(folder: Path, **filters: Callable[..., Any]) -> Any:
    """Makes the jinja2 environment of a folder's templates; every value is escaped.

    Args:
        folder: The folder.
        filters: The filters of its templates, by name.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )
    pages.filters |= filters
    return pages


def _without_controls(value: Any) -> Any:
    return printable(value, keep="\t") if type(value) is str else value


def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def page_style() -> str:
    """Returns the style sheet of a page."""
    return _own("page.css")


def _first_bad(sheet: Sheet, grid: Grid) -> dict[str, Any] | None:
    """The first entry of the records that was not finite, or None."""
    bad = (grid.headroom == NONFINITE).T.nonzero()
    if not len(bad):
        return None
    column, row = bad[0].tolist()
    return {"steps": str(grid.columns[column]), "entry": name_of(sheet.entries[row])}


def _healthy(sheet: Sheet, grid: Grid) -> list[str]:
    """Sentences on a record without a non-finite value: loss and least headroom."""
    sentences = list[str]()
    for name, sparkline in sparklines_of(sheet.records, grid.columns).items():
        known = [(i, value) for i, value in enumerate(sparkline) if value is not None]
        if name in ("loss", "grad_norm", "largest_gradient") and len(known) > 1:
            (first, before), (last, after) = known[0], known[-1]
            sentences.append(
                f"{SPARKLINES[name]}: {before:.4g} in step {grid.columns[first]}, "
                f"{after:.4g} in step {grid.columns[last]}"
            )
    codes = grid.headroom
    if codes.numel() and int(codes.min()) < ALL_ZERO:
        row, column = divmod(int(codes.argmin()), codes.shape[1])
        bits = int(codes[row, column]) / BITS
        entry = sheet.entries[row]
        how = f"grow {growth_text(bits)}" if bits < _FAR else f"double {bits:.1f} times"
        sentences.append(
            f"nearest to its dtype's maximum: {name_of(entry)} ({entry.dtype}) in step "
            f"{grid.columns[column]}, which could {how}"
        )
    return sentences


def _short(value: object) -> str:
    """A value of a file: a number with four digits, nothing where it is not known."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _prose(sentence: object) -> Any:
    """A sentence as HTML, with what stands in backticks as code."""
    from markupsafe import Markup, escape

    text = printable(str(sentence))
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _text_of(frames: Sequence[str]) -> Any:
    """Frames as HTML, which have lines of their own."""
    from markupsafe import Markup, escape

    return Markup(escape(printable("\n".join(map(str, frames)), keep="\n\t")))


def _reported(incidents: Sequence[Incident]) -> list[str]:
    """The sentences of incidents' reports on what was not checked."""
    return [str(gap) for i in incidents for gap in i.report.get("not_covered") or []]


def _gaps(sheet: Sheet, grid: Grid) -> list[str]:
    """Sentences on what the records do not hold."""
    records, entries, sentences = sheet.records, sheet.entries, list[str]()
    world = max((int(r.run.get("world_size", 1)) for r in records), default=0)
    if world > len(records):
        given = len(records)
        sentences.append(
            f"{world - given} of {world} ranks: no record of theirs given."
        )
    for record in records:
        if record.is_truncated:
            sentences.append(f"{record.path.name}: the last line is not whole.")
        if record.num_damaged:
            sentences.append(f"{record.path.name}: {record.num_damaged} damaged lines.")
    unseen = (grid.headroom == NOT_SEEN).float()
    if unseen.numel() and unseen.any():
        share = unseen.mean().item()
        never = int(unseen.all(1).sum())
        sentences.append(
            f"{share:.1%} of the heatmap was not checked or had no values; "
            f"{never} of {len(entries)} entries never."
        )
    kinds = {entry.kind for entry in entries}
    absent = [name for name, each in FAMILIES.items() if not kinds.intersection(each)]
    if entries and absent:
        names = ", ".join(_ABSENT.get(name, name) for name in absent)
        sentences.append(f"Not in the record: {names}.")
    for name, why in _NOT_COUNTED.items():
        if entries and name not in grid.counts:
            sentences.append(why)
    return sentences


_RUN = (
    *("run", "started", "host", "pid", "script", "rank", "world_size", "devices"),
    "models",
)
_VERSIONS = ("dtypes", "policy", "overflow_fast", "torch", "python", "schema")


def _versions(records: Sequence[FlightRecord]) -> Table:
    """A row for each record, or for each field of a single one: its run, versions."""
    names = [*_RUN, *_VERSIONS]
    rows = [
        [record.path.name, *(_short(record.run.get(n)) for n in names)]
        for record in records
    ]
    heads = ["file", *(name.replace("_", " ") for name in names)]
    if len(rows) == 1:
        pairs = zip(heads, rows[0], strict=True)
        return Table(["field", "value"], [list(pair) for pair in pairs])
    return Table(heads, rows)


# The files and folders that a command line makes a page of.


@dataclass(frozen=True)
class Sources:
    """The records and incidents of a page.

    Attributes:
        records: Those of a run, by rank.
        incidents: The incidents, by step.
        damaged: Sentences on evidence that cannot be read.
        older: The records of earlier runs, which are left out.
    """

    records: Sequence[FlightRecord]
    incidents: Sequence[Incident]
    damaged: Sequence[str] = ()
    older: Sequence[FlightRecord] = ()


def read_sources(paths: Iterable[str | os.PathLike[str]]) -> Sources:
    """Reads flight records and folders of evidence.

    Of several runs, as `run.*.ofr` names them behind a restart, each rank's newest.

    Args:
        paths: The files of the ranks' records, and folders of evidence.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a path is of neither kind, or a record is given twice.
    """
    records, incidents = list[FlightRecord](), list[Incident]()
    damaged = list[str]()
    for path in map(Path, paths):
        if os.path.isdir(path):
            found, cannot = read_incidents(path)
            incidents += found
            damaged += cannot
        else:
            records.append(read_record(path))
    newest, older = _newest_of_ranks(records)
    incidents.sort(key=lambda incident: incident.step)
    return Sources(newest, incidents, damaged, older)


def _newest_of_ranks(
    records: Sequence[FlightRecord],
) -> tuple[list[FlightRecord], list[FlightRecord]]:
    """The records of the last run, by rank, and those of earlier ones."""
    runs = {(record.run.get("run"), record.run.get("rank", 0)) for record in records}
    if len(runs) < len(records):
        names = ", ".join(record.path.name for record in records)
        raise ValueError(f"a page is of one run, with one record a rank; got {names}")
    newest: dict[int, FlightRecord] = {}
    for record in sorted(records, key=lambda each: each.run.get("time", 0.0)):
        newest[record.run.get("rank", 0)] = record
    older = [each for each in records if newest[each.run.get("rank", 0)] is not each]
    return [newest[rank] for rank in sorted(newest)], older
