"""The result of a comparison, and how it reads: text, a page, a workbook."""

from __future__ import annotations

import collections
import heapq
import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.tensors import is_number
from ...base.text import (
    aligned,
    as_lines,
    capitalized,
    counted,
    numbered,
    printable,
    rounded,
    some,
)
from ...guard.files.json_text import SCHEMA, dumps, parse_object, to_plain
from ...guard.files.reading import open_regular, read_bytes
from ..page.render import GENERATOR, html_templates, page_style, save_page
from .judged_rows import (
    EQUAL,
    INTRODUCED,
    NOT_COMPARED,
    PROPAGATED,
    ROUNDING,
    TensorDifference,
    coarser,
    epsilon,
    has_other_counts,
)

# The first difference of a comparison, as a sentence.


_MAX_PLACES = 3  # in a sentence; chosen


@dataclass
class RootDifference:
    """The first difference that is not propagated, and what made it.

    Attributes:
        module: The name of the module that made it; "" is the model itself, or what is
            outside of it.
        class_name: The module's class, or "".
        kind: "weights"; "update" where they were equal before the step before, and so
            were its gradients; "batch", "forward" or "backward"; "detached" where no
            gradient reaches the module in one run; "loss" where the
            gradient that the model was given differs; "gradients" where those of
            parameters differ and no module is known to have made it.
        row: The first row that shows it.
        after: The last call that had returned within the module, or "".
        op: The first operation that differs, with its line, or "". `compare_live()` and
            `shadow()` find it.
        remark: What it may be, in a sentence, or "".
        unknown: The places of what it was computed from that could not be compared; the
            difference may come from there, and `module` is not to blame then.
        earlier: The steps before, in which nothing that was compared differed more than
            rounding explains.
        is_equal_before: Whether all of that was equal.
        is_whole_before: Whether all tensors of those steps were compared.
        ranks: The ranks of which the same row shows it, if rows are of ranks.
        gradients: The steps before up to the one before, in which the gradients of
            parameters were compared, and how they were: "equal", or that but for
            rounding; of an update alone.
    """

    module: str
    class_name: str
    kind: str
    row: TensorDifference
    after: str = ""
    op: str = ""
    remark: str = ""
    unknown: tuple[str, ...] = ()
    earlier: tuple[int, ...] = ()
    is_equal_before: bool = True
    is_whole_before: bool = True
    gradients: tuple[tuple[int, ...], str] | None = None
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """It as texts and numbers."""
        return {
            "module": self.module,
            "class": self.class_name,
            "kind": self.kind,
            "row": self.row.name,
            "step": self.row.step,
            "rank": self.row.rank,
            "ranks": list(self.ranks),
            "after": self.after,
            "op": self.op,
            "remark": self.remark,
            "unknown": list(self.unknown),
            "earlier": list(self.earlier),
            "sentence": str(self),
        }

    def __str__(self) -> str:
        """One or two sentences; which step, where several were compared."""
        text = self._sentence()
        if self.op:
            text += f" The first operation that differs: {self.op}."
        return printable(f"{self._when()}{f'{text} {self.remark}'.strip()}")

    def _when(self) -> str:
        if not self.earlier:
            return ""
        before = "Before" if self.kind in ("weights", "update") else "In"
        text = f"{before} step {self.row.step}, "
        but = "" if self.is_whole_before else ", as far as they were compared"
        if self.gradients is not None:
            steps, how = self.gradients
            how = f"{how} in {numbered('step', steps)}{but}"
            return f"{text}with gradients {how}: the update. "
        what = "no difference" if self.is_equal_before else "no more than rounding"
        but = but.replace("they were", "it was") if len(self.earlier) == 1 else but
        return f"{text}with {what} in {numbered('step', self.earlier)}{but}: "

    def _sentence(self) -> str:
        row = self.row
        name = self.module or "the model"
        of_class = f" ({self.class_name})" if self.class_name else ""
        on_rank = ""
        if row.rank is not None:
            on_rank = f" on {numbered('rank', self.ranks or (row.rank,))}"
        amount = _amount(row)
        if self.kind in ("weights", "update"):
            text = f"{row.place} of {name}{of_class} differs{on_rank}{amount}."
        elif self.kind == "detached":
            return ""  # the remark is the sentence
        elif self.kind == "batch":
            text = f"The model was given other inputs{on_rank}: {row.place}{amount}."
        elif self.kind == "gradients":
            text = f"Gradients of parameters differ{on_rank}, {row.place} first{amount}"
            is_made = not self.module
            text += "." if is_made else "; what made them could not be compared."
        elif self.kind == "loss":
            text = (
                f"The gradient that the model was given differs{on_rank}: {row.place}"
                f"{amount}. The loss, its scale, its labels, or other code outside of "
                "the model makes it."
            )
        else:
            where = "Backward of " if self.kind == "backward" else ""
            does = "gives another result" if self.unknown else "computes differently"
            if has_other_shape(row):
                does = "gives a tensor of another shape"
            text = f"{where}{name}{of_class} {does}{on_rank}{amount}."
            seen = f" It shows at {row.place}"
            text += f"{seen}, after {self.after}." if self.after else f"{seen}."
            text += _caveat(self.unknown)
        return text


def _caveat(unknown: Sequence[str]) -> str:
    if not unknown:
        return ""
    return (
        f" The difference may come from what could not be compared: "
        f"{some(unknown, _MAX_PLACES)}."
    )


def has_other_shape(row: TensorDifference) -> bool:
    """True if the two were not compared for their shapes."""
    return row.measures is None and row.shapes[0] != row.shapes[1]


def _amount(row: TensorDifference) -> str:
    if has_other_shape(row):
        return f", of shapes {row.shapes[0]} and {row.shapes[1]}"
    if row.measures is None:
        return ""
    if has_other_counts(row):
        (nan, its_nan), (inf, its_inf) = row.num_nan, row.num_inf
        return f", by {nan} nan and {inf} inf against {its_nan} and {its_inf}"
    text = f", by {row.relative:.2g} of its norm"
    times = row.times
    if row.factor is not None:
        return f"{text}: it is {row.factor:.6g} times the reference"
    dtype = coarser(*row.dtypes)
    if times is not None and times < 1e6 and epsilon(dtype):
        text += f", {rounded(times)} times what {dtype} rounding explains"
    return text


# Files that may be written: new ones, and older comparisons.


CREATOR = "overflow_fast"  # of workbooks
_MAX_JSON = 2**31  # a row takes about 1 KB
_MAX_PROPERTIES = 2**16
_KEYS = {"schema", "kind", "name", "reference", "verdict", "counts", "rows"}


def check_replaceable(path: str | os.PathLike[str]) -> Path:
    """Checks that writing to a file does not destroy what is not a comparison.

    Args:
        path: The file, with a name that ends with .xlsx if it is a workbook.

    Returns:
        The file.

    Raises:
        FileExistsError: If there is one that overflow_fast has not written.
    """
    where = Path(path)
    if os.path.lexists(where) and not (_is_json(where) or _is_workbook(where)):
        raise FileExistsError(
            f"{where} is no comparison of overflow_fast, and is not written over: give "
            "another name"
        )
    return where


def _is_json(path: Path) -> bool:
    try:
        plain = parse_object(read_bytes(path, _MAX_JSON))
    except OSError:
        return False
    return plain is not None and plain.keys() >= _KEYS and plain["kind"] == "comparison"


def _is_workbook(path: Path) -> bool:
    try:
        with (
            open_regular(path) as file,
            zipfile.ZipFile(file) as book,
            book.open("docProps/core.xml") as part,
        ):
            properties = part.read(_MAX_PROPERTIES)
    except Exception:  # of files that are none, zipfile raises a dozen
        return False
    return f"<dc:creator>{CREATOR}</dc:creator>".encode() in properties


# A comparison as an Excel workbook.


COLUMNS = {
    "verdict": 13,
    "name": 48,
    "reference_name": 30,
    "step": 6,
    "rank": 6,
    "class": 16,
    "dtype": 10,
    "reference_dtype": 10,
    "shape": 16,
    "reference_shape": 16,
    "cosine": 12,
    "max_abs": 11,
    "max_rel": 11,
    "relative": 11,
    "bits": 8,
    "ulp_median": 10,
    "ulp_p99": 10,
    "explained": 11,
    "times": 9,
    "propagated": 11,
    "amplification": 11,
    "made": 11,
    "low": 11,
    "high": 11,
    "reference_low": 11,
    "reference_high": 11,
    "num_nan": 8,
    "reference_num_nan": 8,
    "num_inf": 8,
    "reference_num_inf": 8,
    "num_one_sided": 9,
    "highlight": 26,
    "why": 26,
    "notes": 26,
}
_COLORS = {"introduced": "#FFC7CE", "propagated": "#FFEB9C", "not compared": "#D9D9D9"}


def write_workbook(plain: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes the workbook of `Comparison.to_dict()`.

    Args:
        plain: The comparison.
        path: The file; an older comparison is written over, nothing else.

    Raises:
        FileExistsError: If the file is there, and no comparison of overflow_fast.
        ImportError: If XlsxWriter is not installed.
    """
    try:
        import xlsxwriter  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "a workbook needs XlsxWriter: run `pip install XlsxWriter`"
        ) from error
    where = check_replaceable(path)
    data = io.BytesIO()
    with xlsxwriter.Workbook(data, {"in_memory": True}) as book:
        book.set_properties({"author": CREATOR})
        _write_summary(book.add_worksheet("summary"), book, plain)
        _write_rows(book.add_worksheet("rows"), book, plain["rows"])
    where.write_bytes(data.getvalue())
    return where


def _write_summary(sheet: Any, book: Any, plain: Mapping[str, Any]) -> None:
    wrapped = book.add_format({"text_wrap": True, "valign": "top"})
    sheet.set_column(0, 0, 14)
    sheet.set_column(1, 1, 110, wrapped)
    lines = [("run", plain["name"]), ("reference", plain["reference"])]
    lines += [("verdict", plain["verdict"])]
    lines += [(verdict, count) for verdict, count in plain["counts"].items()]
    lines += [("note", sentence) for sentence in plain["said"]]
    for i, (name, value) in enumerate(lines):
        sheet.write_string(i, 0, name)
        _write(sheet, i, 1, value)


def _write_rows(sheet: Any, book: Any, rows: list[Mapping[str, Any]]) -> None:
    bold = book.add_format({"bold": True, "text_wrap": True})
    for j, (name, size) in enumerate(COLUMNS.items()):
        sheet.set_column(j, j, size)
        sheet.write_string(0, j, name.replace("_", " "), bold)
    for i, row in enumerate(rows, 1):
        for j, name in enumerate(COLUMNS):
            _write(sheet, i, j, row[name])
    sheet.freeze_panes(1, 2)
    last, names = max(1, len(rows)), list(COLUMNS)
    sheet.autofilter(0, 0, last, len(COLUMNS) - 1)
    for verdict, color in _COLORS.items():
        rule = {"type": "cell", "criteria": "==", "value": f'"{verdict}"'}
        rule["format"] = book.add_format({"bg_color": color})
        sheet.conditional_format(1, 0, last, 0, rule)
    at = names.index("times")
    scale = {"type": "3_color_scale", "mid_type": "num", "mid_value": 4}
    scale |= {"min_type": "num", "min_value": 0, "max_type": "num", "max_value": 8}
    scale |= {"min_color": "#FFFFFF", "mid_color": "#FFEB9C", "max_color": "#FFC7CE"}
    sheet.conditional_format(1, at, last, at, scale)
    at = names.index("highlight")
    marked = {"type": "no_blanks", "format": book.add_format({"bg_color": "#FFC7CE"})}
    sheet.conditional_format(1, at, last, at, marked)


def _write(sheet: Any, i: int, j: int, value: Any) -> None:
    """Writes a cell: a finite number, or text that is never taken for a formula."""
    if isinstance(value, list):
        value = "; ".join(map(str, value)) if _has_text(value) else str(value)
    if value is None:
        return
    if is_number(value) and math.isfinite(value):
        sheet.write_number(i, j, value)
    elif value != "":
        sheet.write_string(i, j, str(to_plain(value)))


def _has_text(values: list[Any]) -> bool:
    return not values or isinstance(values[0], str)


# A comparison as one HTML file, which needs no network and no script.


_MOST_ROWS = 5000  # of the page; chosen
_HERE = Path(__file__).parent
_MAX_BITS = 24  # those of float32's significand


def write_diff_page(plain: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes the page of `Comparison.to_dict()`.

    Args:
        plain: The comparison.
        path: The file; an older page of overflow_fast is written over, nothing else.

    Raises:
        FileExistsError: If the file is there, and no page of overflow_fast.
    """
    return save_page(path, lambda: _text_of(plain))


def _text_of(plain: Mapping[str, Any]) -> str:
    from markupsafe import Markup

    pages = html_templates(_HERE, number=_short_number, bar=_bar, rounded=rounded)
    rows = [row for row in plain["rows"] if row["verdict"] != EQUAL]
    counts = plain["counts"]
    text: str = pages.get_template("diff.html").render(
        it=plain,
        rows=rows[:_MOST_ROWS],
        num_more=sum(counts.values()) - counts[EQUAL] - len(rows[:_MOST_ROWS]),
        num_equal=counts[EQUAL],
        empty={head for head, holds in _OPTIONAL.items() if not any(map(holds, rows))},
        generator=Markup(GENERATOR),
        style=Markup(page_style()),
    )
    return text


def _is_number(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: _short_number(row.get(name)) != ""


# Columns that are left out where no row has anything in them.
_OPTIONAL: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "reference": lambda row: bool(row.get("reference_name") != row["name"]),
    "propagated": lambda row: bool(row.get("propagated")),
    "amplified": _is_number("amplification"),
    "max abs": _is_number("max_abs"),
    "ULP median": _is_number("ulp_median"),
    "ULP 99 %": _is_number("ulp_p99"),
    "nan": lambda row: bool(row.get("num_nan") or row.get("reference_num_nan")),
    "inf": lambda row: bool(row.get("num_inf") or row.get("reference_num_inf")),
    "remarks": lambda row: any((row["why"], row["highlight"], *row["notes"])),
}


def _short_number(value: Any, form: str = ".3g") -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format(value, form) if isinstance(value, float) else str(value)


def _bar(bits: Any) -> float:
    """The length of the bar of a number of bits, from 0 to 100."""
    if bits is None:
        return 0.0
    return 100 * min(_MAX_BITS, max(0.0, float(bits))) / _MAX_BITS


_MAX_ROWS = 20  # of a table in a terminal; chosen
_MAX_SAID = 12  # sentences under it; chosen
VERDICTS = (INTRODUCED, PROPAGATED, ROUNDING, EQUAL, NOT_COMPARED)


MAX_ROWS = 50_000  # before the step of the first difference, and from it on


@dataclass
class UnlistedRows:
    """Counts of the rows that a comparison does not list."""

    verdicts: collections.Counter[str] = field(default_factory=collections.Counter)
    num_compared: int = 0
    num_computed: int = 0
    is_highlighted: bool = False
    differs: bool = False
    steps: set[int] = field(default_factory=set)

    def add(self, rows: Sequence[TensorDifference]) -> None:
        """Adds rows."""
        compared = [row for row in rows if row.measures is not None]
        self.verdicts.update(row.verdict for row in rows)
        self.num_compared += len(compared)
        self.num_computed += sum(row.place.is_computed for row in compared)
        self.is_highlighted |= any(row.highlight for row in rows)
        self.differs |= any(row.relative for row in rows)
        self.steps.update(row.step for row in rows)


@dataclass
class Comparison:
    """Two runs, layer by layer.

    Attributes:
        name: The first run.
        reference: The run that it is compared with.
        rows: A row for each pair of tensors, in the order of execution of the steps. Of
            more than 100,000 rows these are the 50,000 with the largest differences of
            the steps before the first difference, the rows of its step, and up to
            50,000 the ones that differ in the steps behind; all are counted.
        said: What is to be known first: how the runs were unlike, and what could not be
            compared, in sentences.
        first: The first layer that computes differently from equal inputs; None if
            nothing differs more than rounding explains.
        threshold: The user's own threshold, or None.
        num_alone: How many tensors one run alone has.
        unlisted: What is counted of the rows that are not listed.
    """

    name: str
    reference: str
    rows: list[TensorDifference]
    said: list[str] = field(default_factory=list)
    first: RootDifference | None = None
    threshold: float | None = None
    num_alone: int = 0
    unlisted: UnlistedRows = field(default_factory=UnlistedRows)

    def add_step(self, rows: Sequence[TensorDifference]) -> None:
        """Adds the rows of a step, whose first difference is known."""
        self.rows += rows
        if len(self.rows) <= 2 * MAX_ROWS:
            return
        step = math.inf if self.first is None else self.first.row.step
        before = [row for row in self.rows if row.step < step]
        own = [row for row in self.rows if row.step == step]
        behind = [row for row in self.rows if row.step > step and row.verdict != EQUAL]
        if len(before) > MAX_ROWS:
            largest = heapq.nlargest(MAX_ROWS, before, key=_size_of)
            before = sorted(largest, key=lambda row: (row.step, row.order))
        listed = [*before, *own, *behind[: max(0, MAX_ROWS - len(own))]]
        kept = set(map(id, listed))
        self.unlisted.add([row for row in self.rows if id(row) not in kept])
        self.rows = listed

    @property
    def num_pairs(self) -> int:
        """The number of pairs of tensors."""
        return len(self.rows) + self.unlisted.verdicts.total()

    @property
    def differs(self) -> bool:
        """True if a difference is more than rounding, or above the threshold."""
        is_highlighted = any(row.highlight for row in self.rows)
        return self.first is not None or is_highlighted or self.unlisted.is_highlighted

    @property
    def num_compared(self) -> int:
        """The number of pairs of tensors that were compared."""
        compared = sum(row.measures is not None for row in self.rows)
        return compared + self.unlisted.num_compared

    @property
    def num_computed(self) -> int:
        """The number of these that models have computed: no weights, and no batch."""
        compared = (row.place for row in self.rows if row.measures is not None)
        listed = sum(each.is_computed for each in compared)
        return listed + self.unlisted.num_computed

    def counts(self) -> dict[str, int]:
        """The number of rows of each verdict."""
        found = collections.Counter(row.verdict for row in self.rows)
        return {v: found[v] + self.unlisted.verdicts[v] for v in VERDICTS}

    def __str__(self) -> str:
        """The remarks, the first difference, and the rows around it."""
        lines = [printable(f"{self.name} against {self.reference}")]
        said = self.said[:_MAX_SAID]
        if len(self.said) > len(said):
            said.append(f"And {len(self.said) - len(said)} more remarks.")
        lines += [as_lines(said)] if said else []
        lines += [as_lines([self.verdict()])]
        rows = self._rows_to_print()
        if rows and len({row.step for row in self.rows} | self.unlisted.steps) > 1:
            lines.append(self._head(rows))
        return "\n".join([*lines, *_table(rows)])

    def _head(self, rows: Sequence[TensorDifference]) -> str:
        """The steps of the rows that are printed, and the kind of the first."""
        steps = numbered("step", list(dict.fromkeys(row.step for row in rows)))
        if self.first is None:
            return f"The largest differences, of {steps}:"
        found = f"{steps}, {self.first.kind} first:"
        return capitalized(found)

    def verdict(self) -> str:
        """The verdict in a sentence."""
        counts = self.counts()
        text = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        text = f"{counted(self.num_pairs, 'pair')} of tensors: {text or 'none'}."
        if self.num_alone:
            text += f" {counted(self.num_alone, 'tensor')} of one run alone."
        if self.first is not None:
            return f"{self.first} {text}"
        if not self.num_compared:
            return f"Nothing could be compared. {text}"
        if not self.num_computed:
            return (
                "Nothing that the models compute was compared; what was, their weights "
                f"or batches, is equal but for rounding. {text}"
            )
        left_out = counts[NOT_COMPARED] + self.num_alone
        but = f"{counted(left_out, 'tensor')} could not be compared; " * bool(left_out)
        if self.unlisted.differs or any(row.relative for row in self.rows):
            of_rest = " of the rest" if left_out else ""
            found = f"{but}no layer{of_rest} differs more than rounding explains."
        else:
            found = f"{but}all that was compared is equal."
        return f"{capitalized(found)} {text}"

    def _rows_to_print(self) -> list[TensorDifference]:
        """The rows from the first difference on; else the largest ones."""
        first = None if self.first is None else self.first.row
        compared = [r for r in self.rows if r.relative or r.highlight or r is first]
        if self.first is not None:
            at = next(i for i, row in enumerate(compared) if row is first)
            return compared[at : at + _MAX_ROWS]
        worst = sorted(compared, key=lambda row: -(row.times or 0.0))[:_MAX_ROWS]
        return sorted(worst, key=lambda row: (row.step, row.order))

    def to_dict(self) -> dict[str, Any]:
        """The comparison as dicts, lists, texts and numbers."""
        return {
            "schema": SCHEMA,
            "kind": "comparison",
            "name": self.name,
            "reference": self.reference,
            "differs": self.differs,
            "verdict": self.verdict(),
            "counts": self.counts(),
            "threshold": self.threshold,
            "num_alone": self.num_alone,
            "num_unlisted": self.num_pairs - len(self.rows),
            "said": self.said,
            "first": None if self.first is None else self.first.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the comparison as JSON.

        Args:
            path: A file to write it to, or None. An older comparison is written over,
                nothing else.

        Returns:
            The JSON.

        Raises:
            FileExistsError: If the file is there, and no comparison of overflow_fast.
        """
        text = dumps(self.to_dict(), indent=1)
        if path is not None:
            check_replaceable(path).write_text(text, encoding="utf-8")
        return text

    def to_dataframe(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
            ImportError: If pandas is not installed.
        """
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame([row.to_dict() for row in self.rows])

    def to_xlsx(self, path: str | os.PathLike[str]) -> Path:
        """Writes a workbook: the rows with colors, and what is to be known first.

        Args:
            path: The file; an older comparison is written over, nothing else.

        Raises:
            FileExistsError: If the file is there, and no comparison of overflow_fast.
            ImportError: If XlsxWriter is not installed.
        """

        return write_workbook(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page that needs no network.

        Args:
            path: The file.
        """

        return write_diff_page(self.to_dict(), path)


def _size_of(row: TensorDifference) -> tuple[float, bool, bool]:
    """The size of a difference, beside others that are no more than rounding."""
    return row.times or 0.0, bool(row.highlight), bool(row.relative)


HEADS = (
    *("verdict", "tensor", "bits", "relative", "times", "propagated", "cosine"),
    *("max abs", "dtypes"),
)


def _table(rows: list[TensorDifference]) -> list[str]:
    if not rows:
        return []
    cells = (list(map(printable, cells_of(row))) for row in rows)
    return aligned([HEADS, *cells])


def cells_of(row: TensorDifference) -> list[str]:
    """The texts of a row, for `HEADS`."""
    measures = row.measures
    dtypes = " / ".join(dict.fromkeys(row.dtypes))
    if measures is None:
        return [row.verdict, row.name, row.why, *[""] * 5, dtypes]
    estimate = "" if measures.is_exact or not row.relative else "~"
    return [
        row.verdict + (" !" if row.highlight else ""),
        row.name,
        _number(measures.bits, ".1f"),
        estimate + _number(measures.relative, ".2e"),
        "" if row.times is None else rounded(row.times),
        _number(row.propagated, ".1e") if row.propagated else "",
        estimate + _number(measures.cosine, f".{measures.cosine_digits}f"),
        "" if measures.max_abs is None else _number(measures.max_abs, ".2e"),
        dtypes,
    ]


def _number(value: float, form: str) -> str:
    return "all" if form == ".1f" and value == math.inf else format(value, form)
