"""Writes the tables of pages that follow from the code: fields, options, commands.

python docs/tools/tables.py

They stand between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import overflow_fast
from overflow_fast.guard.files.fields import (
    ABSENT,
    FIRST_RELEASE,
    REQUIRED,
    Field,
    fields_of,
)
from overflow_fast.guard.files.schema import kinds_of
from overflow_fast.guard.record import record_lines
from overflow_fast.guard.report import log_lines
from overflow_fast.tools.compare import recording_schema

DOCS = Path(__file__).parents[1]
STUB = DOCS.parent / "overflow_fast" / "__init__.pyi"
_TABLE = re.compile(
    r"(<!-- table: ([^\n]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL
)


def renewed(text: str) -> str:
    """The text of a page with its tables as the code has them."""
    return _TABLE.sub(
        lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", text
    )


def names_in(text: str) -> list[str]:
    """The names of the tables that a page has."""
    return [found[1] for found in _TABLE.findall(text)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in cells)


# Formats.


def _lines(*kinds: type[Any]) -> Callable[[], str]:
    rows = [
        row
        for kind in kinds
        for row in [
            [f"`{json.dumps(kind.KIND)}`", "", _first_line(kind), ""],
            *_fields(kind, ""),
        ]
    ]
    head = "`kind`", "field", "content", "if it is missing"
    return lambda: _table(head, [_joined(row) for row in rows])


def _joined(row: Sequence[str]) -> Sequence[str]:
    return [" ".join(cell.split()) for cell in row]


def _first_line(kind: type[Any]) -> str:
    return f"**{(kind.__doc__ or '').splitlines()[0].rstrip('.')}**"


def _fields(kind: Any, prefix: str) -> Iterator[list[str]]:
    for name, each in fields_of(kind).items():
        key = f"{prefix}{each.name or name}"
        since = "" if each.since == FIRST_RELEASE else f" (since {each.since})"
        yield ["", f"`{key}`", f"{each.meaning}{since}", _default(each)]
        for part in typing.get_args(kinds_of(kind)[name]):
            if isinstance(part, type) and fields_of(part):
                yield from _fields(part, f"{key}[].")


def _default(field: Field) -> str:
    if field.default is REQUIRED:
        return "damage"
    return "" if field.default is ABSENT else f"`{json.dumps(field.default)}`"


TABLES: dict[str, Callable[[], str]] = {
    "log": _lines(*log_lines.KINDS),
    "flight record": _lines(*record_lines.KINDS),
    "recording": _lines(*recording_schema.KINDS),
}


def stub() -> str:
    """The public names for type checkers, which do not run `__getattr__`."""
    lines = ["# Written by docs/tools/tables.py.", "from typing import Final", ""]
    places = {n: "" if n == m else m for n, m in overflow_fast._MODULES.items()}
    for name, place in sorted(places.items(), key=lambda each: each[::-1]):
        lines.append(f"from .{place} import {name} as {name}")
    listed = [f"    {name!r}," for name in overflow_fast.__all__]
    lines += ["", "__all__ = [", *listed, "]"]
    lines += ["__version__: Final[str]", "MONITORS: Final[dict[str, str]]", ""]
    return "\n".join(lines).replace("'", '"')


def main() -> None:
    """Renews the pages, and the stub of the public names."""
    STUB.write_text(stub())
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        if (new := renewed(text)) != text:
            page.write_text(new)
            print(page.relative_to(DOCS))


if __name__ == "__main__":
    main()
