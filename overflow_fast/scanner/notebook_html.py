"""HTML that notebooks show instead of a `repr`, escaped; imported when one asks."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape as escape_html

from .text import printable


def escape(text: str, quote: bool = True) -> str:
    """Escapes what HTML or a reader would take for something else."""
    return escape_html(printable(text), quote)


def text_html(
    headline: str, lines: Iterable[str], rest: str, aligned: Iterable[str] = ()
) -> str:
    """A headline, lines below it, lines whose columns stay, and a text that unfolds."""
    columns = escape_html(printable("\n".join(aligned), keep="\n\t"))
    columns = f"<pre>{columns}</pre>" if columns else ""
    whole = escape_html(printable(rest, keep="\n\t"))
    listed = "".join(f"<div>{escape(line)}</div>" for line in lines)
    folded = f"<details><summary>all</summary><pre>{whole}</pre></details>"
    return f"<div><strong>{escape(headline)}</strong>{listed}{columns}{folded}</div>"


def table_html(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def picture_html(png: bytes, described: str) -> str:
    """A picture, and what it shows in words."""
    data = base64.b64encode(png).decode()
    alt = escape(described, quote=True)
    return f'<img src="data:image/png;base64,{data}" alt="{alt}"><div>{alt}</div>'
