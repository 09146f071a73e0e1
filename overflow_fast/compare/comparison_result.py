"""The result of a comparison: what differs, from where on, and how much."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files.json_text import SCHEMA, dumps
from ..text import as_lines, printable
from .first_difference import First
from .judged_rows import (
    EQUAL,
    INHERITED,
    MADE_HERE,
    NOT_COMPARED,
    ROUNDING,
    Difference,
)
from .own_files import check_replaceable

_MAX_ROWS = 20
_MAX_SAID = 12
VERDICTS = (MADE_HERE, INHERITED, ROUNDING, EQUAL, NOT_COMPARED)


@dataclass
class Comparison:
    """Two runs, layer by layer.

    Attributes:
        name: The first run.
        reference: The run that it is compared with.
        rows: A row for each pair of tensors, in the order of execution of the steps.
        said: What is to be known first: how the runs were unlike, and what could not be
            compared, in sentences.
        first: The first layer that computes differently from equal inputs; None if
            nothing differs more than rounding explains.
        threshold: The user's own threshold, or None.
    """

    name: str
    reference: str
    rows: list[Difference]
    said: list[str] = field(default_factory=list)
    first: First | None = None
    threshold: float | None = None

    @property
    def differs(self) -> bool:
        """Tells whether a difference is more than rounding, or above the threshold."""
        return self.first is not None or any(row.highlight for row in self.rows)

    @property
    def num_compared(self) -> int:
        """How many pairs of tensors were compared."""
        return sum(row.measures is not None for row in self.rows)

    @property
    def num_computed(self) -> int:
        """How many of these the models have computed: no weights, and no batch."""
        compared = (row.place for row in self.rows if row.measures is not None)
        return sum(each.is_computed for each in compared)

    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return {v: sum(row.verdict == v for row in self.rows) for v in VERDICTS}

    def __str__(self) -> str:
        """The remarks, the first difference, and the rows around it."""
        lines = [printable(f"{self.name} against {self.reference}")]
        said = self.said[:_MAX_SAID]
        if len(self.said) > len(said):
            said.append(f"And {len(self.said) - len(said)} more remarks.")
        lines += [as_lines(said)] if said else []
        lines += [as_lines([self.verdict()])]
        rows = self._rows_to_print()
        return "\n".join([*lines, *_table(rows)])

    def verdict(self) -> str:
        """The verdict in a sentence."""
        counts = self.counts()
        text = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
        text = f"{len(self.rows)} pairs of tensors: {text or 'none'}."
        if self.first is not None:
            return f"{self.first} {text}"
        if not self.num_compared:
            return f"Nothing could be compared. {text}"
        if not self.num_computed:
            return (
                "Nothing that the models compute was compared; what was, their weights "
                f"or batches, is equal but for rounding. {text}"
            )
        if any(row.relative for row in self.rows):
            return f"No layer differs more than rounding explains. {text}"
        return f"All that was compared is equal. {text}"

    def _rows_to_print(self) -> list[Difference]:
        """The rows from the first difference on; else the largest ones."""
        first = None if self.first is None else self.first.row
        compared = [r for r in self.rows if r.relative or r.highlight or r is first]
        if self.first is not None:
            at = next(i for i, row in enumerate(compared) if row is self.first.row)
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
        from .workbook import write_workbook

        return write_workbook(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page that needs no network.

        Args:
            path: The file.
        """
        from .diff_page import write_diff_page

        return write_diff_page(self.to_dict(), path)


HEADS = (
    *("verdict", "tensor", "bits", "relative", "times", "inherited", "cosine"),
    *("max abs", "dtypes"),
)


def _table(rows: list[Difference]) -> list[str]:
    if not rows:
        return []
    cells = [list(HEADS), *(list(map(printable, cells_of(row))) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADS))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def cells_of(row: Difference) -> list[str]:
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
        "" if row.times is None else _number(row.times, ".3g"),
        _number(row.inherited, ".1e") if row.inherited else "",
        estimate + _number(measures.cosine, ".7f"),
        "" if measures.max_abs is None else _number(measures.max_abs, ".2e"),
        dtypes,
    ]


def _number(value: float, form: str) -> str:
    return "all" if form == ".1f" and value == math.inf else format(value, form)
