"""A comparison as an Excel workbook."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.json_text import to_plain
from .own_files import CREATOR, check_replaceable

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
    "inherited": 11,
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
_COLORS = {"made here": "#FFC7CE", "inherited": "#FFEB9C", "not compared": "#D9D9D9"}


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
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        return
    if is_number and math.isfinite(value):
        sheet.write_number(i, j, value)
    elif value != "":
        sheet.write_string(i, j, str(to_plain(value)))


def _has_text(values: list[Any]) -> bool:
    return not values or isinstance(values[0], str)
