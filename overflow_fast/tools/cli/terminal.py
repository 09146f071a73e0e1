"""Reports on a terminal: lines of its width, and colours.

In a file or a pipe they stay as they are, each sentence and row a line, without colours
unless FORCE_COLOR is set. NO_COLOR (https://no-color.org) turns colours off.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from ...base.text import wrapped

_NARROWEST = 40  # columns; narrower ones would break each line. Chosen
_USUAL = 80  # of a terminal that does not know its width
_BOLD, _RED, _GREEN, _CYAN = "1", "31;1", "32", "36"
# How an explanation writes a row: its label, as wide as the column of labels.
_ROW = re.compile(r"(did not help:|[a-z][a-z ]{8}) (?=\S)")
_REMEDIES = "tried", "nearest"
_MARKS = re.compile(r" *\^+")
_CELLS = re.compile(r"\S {2,}\S")  # of a table, whose columns stay
_MORE = re.compile(r" {2}\S")  # as sentences go on


def shown(text: str, stream: TextIO | None = None) -> str:
    """A report as a stream is to show it; as it is where that is no terminal.

    Its first line, which is the answer, is bold.

    Args:
        text: The report, or an error's text that is one.
        stream: Where it is written; by default stdout.
    """
    stream = sys.stdout if stream is None else stream
    width, has_colours = _width_of(stream), _has_colours(stream)
    lines, is_remedy = list[str](), False
    for line in _whole_lines(text) if width else text.split("\n"):
        row = _ROW.match(line)
        label = "" if row is None else row[1].strip()
        is_code = label == "code" or line.startswith(" ") or _CELLS.search(line, 10)
        is_remedy = label in _REMEDIES or (is_remedy and row is None)
        parts = [line]
        if width and not is_code and len(line) > width:
            parts = wrapped(line, width, " " * 10 if label else "  ")
        if has_colours:
            parts = _coloured(parts, label, is_remedy, is_first=not lines)
        lines += parts
    return "\n".join(lines)


def is_shown_as_it_is(stream: TextIO) -> bool:
    """True where `shown()` changes nothing."""
    return not (_width_of(stream) or _has_colours(stream))


def _whole_lines(text: str) -> list[str]:
    """The lines, each sentence that goes on in the next one as a whole."""
    lines, is_sentence = list[str](), False
    for line in text.split("\n"):
        if is_sentence and _MORE.match(line):
            lines[-1] += f" {line.strip()}"
            continue
        is_sentence = bool(line) and line[0] != " " and not _ROW.match(line)
        lines.append(line)
    return lines


def _coloured(
    parts: list[str], label: str, is_remedy: bool, is_first: bool
) -> list[str]:
    first, *others = parts
    if label:
        colour = _GREEN if label in _REMEDIES else _CYAN
        row = _ROW.match(first)
        assert row is not None
        return [f"{_in(colour, row[1])}{first[row.end(1) :]}", *others]
    if _MARKS.fullmatch(first):
        return [_in(_RED, first)]
    if is_remedy and first.startswith(" "):
        return [_in(_GREEN, first)]
    return [_in(_BOLD, each) for each in parts] if is_first else parts


def _in(colour: str, text: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def _width_of(stream: TextIO) -> int:
    """The width of a terminal; 0 where a stream is none."""
    if not stream.isatty():
        return 0
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(_NARROWEST, int(columns))
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return max(_NARROWEST, width or _USUAL)


def _has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"
