"""HTML that notebooks show instead of a `repr`. Everything in it is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape


def text_html(headline: str, lines: Iterable[str], rest: str) -> str:
    """A headline, lines below it, and a text that unfolds."""
    listed = "".join(f"<div>{escape(line)}</div>" for line in lines)
    folded = f"<details><summary>all</summary><pre>{escape(rest)}</pre></details>"
    return f"<div><strong>{escape(headline)}</strong>{listed}{folded}</div>"


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
