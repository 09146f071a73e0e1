"""A comparison as one HTML file, which needs no network and no script."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..page.render import GENERATOR, html_templates, page_style, save_page

_MAX_ROWS = 5000
_HERE = Path(__file__).parent
_MAX_BITS = 24


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

    pages = html_templates(_HERE, number=_number, bar=_bar)
    rows = [row for row in plain["rows"] if row["verdict"] != "equal"]
    text: str = pages.get_template("diff.html").render(
        it=plain,
        rows=rows[:_MAX_ROWS],
        num_more=max(0, len(rows) - _MAX_ROWS),
        num_equal=len(plain["rows"]) - len(rows),
        generator=Markup(GENERATOR),
        style=Markup(page_style()),
    )
    return text


def _number(value: Any, form: str = ".3g") -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format(value, form) if isinstance(value, float) else str(value)


def _bar(bits: Any) -> float:
    """How long the bar of a number of bits is, from 0 to 100."""
    if bits is None:
        return 0.0
    return 100 * min(_MAX_BITS, max(0.0, float(bits))) / _MAX_BITS
