"""Writes the tables of pages that follow from the code: fields, options, commands.

python docs/tools/tables.py

They stand between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from msgspec import UNSET, Struct
from msgspec.structs import FieldInfo

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from pages import headings, slug

import overflow_fast
from overflow_fast import integrations
from overflow_fast.base.text import dtype_name
from overflow_fast.explainer import step_file
from overflow_fast.guard.files.fields import (
    FIRST_RELEASE,
    default_of,
    fields_of,
    meaning_of,
    said_of,
    tag_of,
)
from overflow_fast.guard.libraries import LIBRARIES
from overflow_fast.guard.options import Option, Options, options_of
from overflow_fast.guard.record import record_lines
from overflow_fast.guard.report import log_lines
from overflow_fast.guard.report.causes import CAUSES, Cause
from overflow_fast.monitors import MONITORS
from overflow_fast.options import Evidence, Explain, Log, Record, Schedule
from overflow_fast.scanner import fallback
from overflow_fast.tools.cli.command_line import make_parser
from overflow_fast.tools.compare import recording_schema
from overflow_fast.tools.page import evidence_schema

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


def _lines(*kinds: type[Struct]) -> Callable[[], str]:
    rows = [
        row
        for kind in kinds
        for row in [
            [f"`{json.dumps(tag_of(kind))}`", "", _first_line(kind), ""],
            *_fields(kind, "", {}),
        ]
    ]
    head = "`kind`", "field", "content", "if it is missing"
    return lambda: _table(head, [_joined(row) for row in rows])


def _joined(row: Sequence[str]) -> Sequence[str]:
    return [" ".join(cell.split()) for cell in row]


def _first_line(kind: type[Any]) -> str:
    return f"**{(kind.__doc__ or '').splitlines()[0].rstrip('.')}**"


def _fields(kind: Any, prefix: str, listed: dict[Any, str]) -> Iterator[list[str]]:
    """The rows of a Struct's fields.

    Args:
        kind: The Struct.
        prefix: What stands before their names.
        listed: The Structs that the table has, and where.
    """
    for each in fields_of(kind).values():
        key = f"{prefix}{each.encode_name}"
        first = said_of(each, "since") or FIRST_RELEASE
        since = "" if first == FIRST_RELEASE else f" (since {first})"
        parts = dict(_parts(each.type))
        text = f"{_meaning(each)}{since}" + "".join(
            f"; as `{listed[part]}`" if part in listed else f"; as `{tag}` has it"
            for part in parts
            if (tag := tag_of(part)) or part in listed
        )
        yield ["", f"`{key}`", text, _default(each)]
        for part, several in parts.items():
            if part not in listed and not tag_of(part):
                listed[part] = f"{key}{several}"
                yield from _fields(part, f"{key}{several}.", listed)


def _meaning(field: FieldInfo) -> str:
    """The meaning of a field, or what the docstring of its dataclass says of it."""
    if text := meaning_of(field):
        return text
    cls, name = said_of(field, "documented")
    text = _attributes(cls)[name]
    return text[:1].lower() + text[1:]


@functools.cache
def _attributes(cls: type[Any]) -> dict[str, str]:
    """The attributes that the docstrings of a class and its bases list."""
    return {
        each.name: each.description.rstrip(".")
        for base in reversed(cls.__mro__)
        for section in griffe.Docstring(inspect.cleandoc(base.__doc__ or "")).parse(
            "google"
        )
        if section.kind is griffe.DocstringSectionKind.attributes
        for each in section.value
    }


def _parts(kind: Any) -> Iterator[tuple[Any, str]]:
    """The Structs in a field's type, with "[]" for those of which it has many."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind, ""
    several = "[]" * (typing.get_origin(kind) in (list, tuple))
    for each in typing.get_args(kind):
        yield from ((part, f"{several}{more}") for part, more in _parts(each))


def _default(field: FieldInfo) -> str:
    if field.required:
        return "damage"
    return "" if field.default is UNSET else f"`{json.dumps(default_of(field))}`"


# What is scanned.


def _scanned() -> str:
    floats, complexes = (
        ", ".join(dtype_name(dtype) for dtype in dtypes)
        for dtypes in (fallback.FLOATS, fallback.COMPLEX)
    )
    how = {
        f"{floats}, all integers, bool": "by bit pattern: every value, subnormals "
        "included",
        complexes: "by modulus; nan and inf as `torch.isnan` and `torch.isinf`",
        "contiguous, permuted, sliced, expanded, 0-d, unaligned; more than 2**31 "
        "elements": "in place",
        "sparse, jagged nested, DTensor": "its values, its buffer, its local part",
        "meta, fake, quantized, functorch-wrapped, unknown subclasses, freed "
        "storage": "not scanned, and reported as such",
    }
    return _table(("scanned", "how"), list(how.items()))


# Options and monitors.


def _options(options: type[Options]) -> str:
    rows = [(f"`{_signature(options, n)}`", _help(o)) for n, o in options_of(options)]
    return _table(("field", "meaning"), rows)


def _signature(options: type[Options], name: str) -> str:
    default = inspect.signature(options).parameters[name].default
    if default is inspect.Parameter.empty:
        return name
    return f"{name}={default!r}".replace("'", '"')


def _help(option: Option) -> str:
    return option.help + (f" [More]({option.see})" if option.see else "")


def _monitors() -> str:
    rows = []
    for kind in MONITORS:
        helps = " ".join(_help(option) for _, option in options_of(kind))
        first = (kind.__doc__ or "").splitlines()[0]
        rows.append((f"`{kind()!r}`".replace("'", '"'), f"{first} {helps}"))
    return _table(("monitor", "meaning"), rows)


# Commands.


def _commands() -> str:
    (parsers,) = (
        each.choices
        for each in make_parser()._actions
        if isinstance(each, argparse._SubParsersAction)
    )
    rows = [
        (f"`{name}`", f"{parser.description.split('. ')[0].rstrip('.')}{parser.more}")
        for name, parser in parsers.items()
    ]
    return _table(("command", "what it does"), rows)


# Libraries that train.


def _libraries() -> str:
    rows = []
    for name, library in LIBRARIES.items():
        path = Path(integrations.__path__[0]) / f"{name}.py"
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        found = "by `overflow-fast run`, too" if library.trainer else ""
        rows.append((f"`overflow_fast.integrations.{name}`", first.rstrip("."), found))
    return _table(("module", "what it is", "found"), rows)


# Causes.


class _Language(NamedTuple):
    """How a page in a language names causes and their page.

    Attributes:
        head: The head of its table.
        named: A name with its translation.
        comma: What stands between two links.
        causes: The page of causes, in words.
    """

    head: Sequence[str]
    named: str
    comma: str
    causes: str


_LANGUAGES = {
    "": _Language(("`cause` in the report", "look at"), "{0}", ", ", "causes"),
    "zh": _Language(("报告中的原因", "请看"), "{0}（{1}）", "、", "全部原因"),  # noqa: RUF001
    "ko": _Language(("보고서의 원인", "볼 곳"), "{0} ({1})", ", ", "모든 원인"),
}
_NAN = "my-run-is-nan.md"


def _meanings() -> str:
    rows = [[_shown(each), each.meaning] for each in CAUSES.values()]
    return _table(["cause", "meaning"], rows)


def _sections(code: str) -> str:
    """The sections of a page that a cause leads to, by their headings in English."""
    language = _LANGUAGES[code]
    texts = (DOCS / _NAN).read_text(), (DOCS / code / _NAN).read_text()
    titles = dict(zip(*map(headings, texts), strict=True))
    rows = [
        [
            language.named.format(_shown(cause), cause.translations.get(code)),
            language.comma.join(_links(cause, code, titles)),
        ]
        for cause in CAUSES.values()
        if cause.sections or cause.help
    ]
    return _table(language.head, rows)


def _links(cause: Cause, code: str, titles: dict[str, str]) -> list[str]:
    links = [f"[{titles[e]}](#{slug(titles[e])})" for e in cause.sections]
    path = f"{'../' * bool(code)}causes.md#{slug(cause.name)}"
    return [*links, *([f"[{_LANGUAGES[code].causes}]({path})"] if cause.help else [])]


def _shown(cause: Cause) -> str:
    return f"`{cause.name}{' (float16)' * cause.is_overflow}`"


TABLES: dict[str, Callable[[], str]] = {
    "scanned": _scanned,
    **{
        each.__name__: functools.partial(_options, each)
        for each in (Explain, Evidence, Log, Record, Schedule)
    },
    "monitors": _monitors,
    "commands": _commands,
    "libraries": _libraries,
    "log": _lines(*log_lines.KINDS),
    "flight record": _lines(*record_lines.KINDS),
    "recording": _lines(*recording_schema.KINDS),
    "evidence": _lines(*evidence_schema.KINDS, *step_file.KINDS),
    "causes": _meanings,
    **{
        f"sections {code}".strip(): functools.partial(_sections, code)
        for code in _LANGUAGES
    },
}


def stub() -> str:
    """The public names for type checkers, which do not run `__getattr__`."""
    lines = ["# Written by docs/tools/tables.py.", "from typing import Final", ""]
    places = {n: "" if n == m else m for n, m in overflow_fast._MODULES.items()}
    for name, place in sorted(places.items(), key=lambda each: each[::-1]):
        lines.append(f"from .{place} import {name} as {name}")
    listed = [f"    {name!r}," for name in overflow_fast.__all__]
    lines += ["", "__all__ = [", *listed, "]"]
    lines += ["__version__: Final[str]", ""]
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
