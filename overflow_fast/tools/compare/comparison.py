"""The result of a comparison, and how it reads: text, a page, a table."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.text import aligned, as_lines, capitalized, counted, printable, rounded
from ...guard.files.json_text import SCHEMA, dumps
from ..page.render import GENERATOR, html_templates, page_style, save_page
from .first_difference import RootDifference
from .judged_rows import (
    EQUAL,
    INTRODUCED,
    NOT_COMPARED,
    PROPAGATED,
    ROUNDING,
    TensorDifference,
)

VERDICTS = (INTRODUCED, PROPAGATED, ROUNDING, EQUAL, NOT_COMPARED)
_MAX_ROWS = 20  # of a table in a terminal; chosen
_MAX_SAID = 12  # sentences above it; chosen


@dataclass
class Comparison:
    """Two runs, layer by layer.

    Attributes:
        name: The first run.
        reference: The run that it is compared with.
        rows: A row for each pair of tensors of one step, in the order of execution:
            the step of the first difference; where there is none, that of the largest.
        said: What is to be known first: how the runs were unlike, and what could not be
            compared, in sentences.
        first: The first difference that is more than rounding explains, or None.
        num_alone: How many tensors one run alone has.
        steps: The steps that were compared, in their order.
        num_computed: How many pairs were compared that models have computed: no
            weights, and no batch.
    """

    name: str
    reference: str
    rows: list[TensorDifference] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    first: RootDifference | None = None
    num_alone: int = 0
    steps: list[int] = field(default_factory=list)
    num_computed: int = 0
    _counts: collections.Counter[str] = field(
        default_factory=collections.Counter, init=False, repr=False
    )
    # Of the step of `rows`: whether it has a difference, the largest `times`.
    _size: tuple[bool, float] | None = field(default=None, init=False, repr=False)

    def add_step(
        self,
        step: int,
        rows: Sequence[TensorDifference],
        first: RootDifference | None,
    ) -> None:
        """Adds a step, and keeps its rows if it is the one to show.

        Args:
            step: The step.
            rows: Its rows.
            first: Its first difference, with which the comparison ends, or None.
        """
        self.steps.append(step)
        self._counts.update(row.verdict for row in rows)
        compared = [row.place for row in rows if not row.why]
        self.num_computed += sum(each.is_computed for each in compared)
        largest = max((row.times or 0.0 for row in rows), default=0.0)
        size = first is not None, largest
        if self._size is None or size > self._size:
            self.rows, self.first, self._size = list(rows), first, size

    @property
    def num_pairs(self) -> int:
        """The number of pairs of tensors, of all steps."""
        return self._counts.total()

    @property
    def differs(self) -> bool:
        """True if a difference is more than rounding."""
        return self.first is not None

    @property
    def num_compared(self) -> int:
        """The number of pairs of tensors that were compared."""
        return self.num_pairs - self._counts[NOT_COMPARED]

    def counts(self) -> dict[str, int]:
        """The number of pairs of each verdict, of all steps."""
        return {verdict: self._counts[verdict] for verdict in VERDICTS}

    def __str__(self) -> str:
        """The remarks, the verdict, and the rows from the first difference on."""
        lines = [printable(f"{self.name} against {self.reference}")]
        said = self.said[:_MAX_SAID]
        if len(self.said) > len(said):
            said.append(f"And {len(self.said) - len(said)} more remarks.")
        lines += [as_lines(said)] if said else []
        lines += [as_lines([self.verdict()])]
        rows = self._rows_to_print()
        if rows and len(self.steps) > 1:
            lines.append(f"Step {rows[0].step}:")
        return "\n".join([*lines, *_table(rows)])

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
        found = "all that was compared is equal."
        if counts[ROUNDING] or counts[PROPAGATED]:
            of_rest = " of the rest" if left_out else ""
            found = f"no layer{of_rest} differs more than rounding explains."
        return f"{capitalized(f'{but}{found}')} {text}"

    def _rows_to_print(self) -> list[TensorDifference]:
        """The rows from the first difference on; else the largest ones."""
        first = None if self.first is None else self.first.row
        compared = [r for r in self.rows if r.relative or r is first]
        if first is not None:
            at = next(i for i, row in enumerate(compared) if row is first)
            return compared[at : at + _MAX_ROWS]
        worst = sorted(compared, key=lambda row: -(row.times or 0.0))[:_MAX_ROWS]
        return sorted(worst, key=lambda row: row.place.order)

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
            "num_alone": self.num_alone,
            "steps": self.steps,
            "said": self.said,
            "first": None if self.first is None else self.first.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self) -> str:
        """The comparison as JSON."""
        return dumps(self.to_dict(), indent=1)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page that needs no network.

        Args:
            path: The file; an older page of overflow_fast is written over.

        Raises:
            FileExistsError: If the file is there, and no page of overflow_fast.
        """
        return save_page(path, lambda: _page_of(self.to_dict()))


HEADS = ("verdict", "tensor", "relative", "times", "propagated", "dtypes")


def _table(rows: list[TensorDifference]) -> list[str]:
    cells = [list(map(printable, _cells_of(row))) for row in rows]
    return aligned([HEADS, *cells]) if rows else []


def _cells_of(row: TensorDifference) -> list[str]:
    """The texts of a row, for `HEADS`."""
    dtypes = " / ".join(dict.fromkeys(row.dtypes))
    if row.why:
        return [row.verdict, row.name, row.why, *[""] * 2, dtypes]
    return [
        row.verdict,
        row.name,
        f"{row.relative:.1e}",
        "" if row.times is None else rounded(row.times),
        f"{row.propagated:.1e}" if row.propagated else "",
        dtypes,
    ]


# A comparison as one HTML file, which needs no network and no script.


_MOST_ROWS = 5000  # of the page; chosen


def _page_of(plain: Mapping[str, Any]) -> str:
    from markupsafe import Markup

    pages = html_templates(Path(__file__).parent, number=_short_number, rounded=rounded)
    rows = [row for row in plain["rows"] if row["verdict"] != EQUAL]
    text: str = pages.get_template("diff.html").render(
        it=plain,
        rows=rows[:_MOST_ROWS],
        num_more=len(rows) - len(rows[:_MOST_ROWS]),
        num_equal=len(plain["rows"]) - len(rows),
        empty={head for head, holds in _OPTIONAL.items() if not any(map(holds, rows))},
        generator=Markup(GENERATOR),
        style=Markup(page_style()),
    )
    return text


# Columns that are left out where no row has anything in them.
_OPTIONAL: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "reference": lambda row: bool(row["reference_name"] != row["name"]),
    "propagated": lambda row: bool(row["propagated"]),
    "nan": lambda row: bool(row["num_nan"] or row["reference_num_nan"]),
    "inf": lambda row: bool(row["num_inf"] or row["reference_num_inf"]),
    "remarks": lambda row: any((row["why"], *row["notes"])),
}


def _short_number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format(value, ".3g") if isinstance(value, float) else str(value)
