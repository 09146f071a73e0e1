"""Sentences as lines of a message."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

_WIDTH = 84  # with what each logged line begins with: 100
_CODE = re.compile(r"`[^`]*`|\{[^}]*\}")
_FIXED_SPACE = "\0"


def counted(number: int, noun: str) -> str:
    """Writes a number of things: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_lines(sentences: Iterable[str]) -> str:
    """Writes a message: one sentence a line, a long one continued in the next line."""
    return "\n".join(line for each in sentences for line in wrapped(each))


def wrapped(sentence: str) -> list[str]:
    """Wraps a sentence; code in backticks or braces is not broken."""
    fixed = _CODE.sub(lambda code: code[0].replace(" ", _FIXED_SPACE), sentence)
    lines = textwrap.wrap(
        fixed,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED_SPACE, " ") for line in lines]
