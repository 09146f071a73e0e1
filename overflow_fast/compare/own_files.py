"""Files that may be written: new ones, and older comparisons."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

CREATOR = "overflow_fast"  # of workbooks
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
    if where.exists() and not (_is_json(where) or _is_workbook(where)):
        raise FileExistsError(
            f"{where} is no comparison of overflow_fast, and is not written over: give "
            "another name"
        )
    return where


def _is_json(path: Path) -> bool:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    is_whole = isinstance(plain, dict) and plain.keys() >= _KEYS
    return is_whole and plain["kind"] == "comparison"


def _is_workbook(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as book:
            properties = book.read("docProps/core.xml")
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile):
        return False
    return f"<dc:creator>{CREATOR}</dc:creator>".encode() in properties
