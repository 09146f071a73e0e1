"""HTML that notebooks show instead of a `repr`, escaped; imported when one asks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape as escape_html

from .text import printable


def escape(text: str) -> str:
    """Escapes what HTML or a reader would take for something else."""
    return escape_html(printable(text))


# No colours: those of the notebook's theme are, light or dark.
_GRID = "display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 12px"
_CODE_STYLE = "margin:0;white-space:pre;overflow-x:auto"
_CODE = re.compile(r"`([^`]+)`")


def text_html(
    headline: str,
    lines: Iterable[str],
    rest: str,
    rows: Iterable[tuple[str, str, str]],
) -> str:
    """A headline, lines below it, rows of label, text and code, a text that unfolds."""
    listed = "".join(f"<div>{_prose(line)}</div>" for line in lines)
    cells = "".join(
        f'<div style="opacity:.7">{escape(label)}</div>'
        f'<div style="overflow-wrap:anywhere">{_prose(text)}{_code(code)}</div>'
        for label, text, code in rows
    )
    grid = f'<div style="{_GRID}">{cells}</div>' if cells else ""
    folded = f"<details><summary>all</summary>{_code(rest)}</details>"
    return f"<div><strong>{_prose(headline)}</strong>{listed}{grid}{folded}</div>"


def _prose(text: str) -> str:
    """A sentence, with what stands in backticks as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _code(text: str) -> str:
    whole = escape_html(printable(text, keep="\n\t"))
    return f'<pre style="{_CODE_STYLE}">{whole}</pre>' if whole else ""
