"""Files that may be written: new ones, and older comparisons."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from ..files.json_text import parse_object
from ..files.reading import open_regular, read_bytes

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
