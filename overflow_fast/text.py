"""Text on its way to a terminal, a logger or a page.

Names of modules, tensors and files, and what stands in files, may hold anything:
sequences that clear a terminal, the end of a line and a line that looks like one of
ours, marks that turn the direction of what follows. Such characters are written as
Python writes them in a string (`\\x1b`, `\\n`, `\\u202e`) where names become text. What
is for programs (`to_dict()`, JSON) has the names as they are.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

_WIDTH = 84  # with what each logged line begins with: 100
_CODE = re.compile(r"`[^`]*`|\{[^}]*\}")
_FIXED_SPACE = "\0"


# C0 and C1 controls, ends of lines and paragraphs, overrides and isolates of direction,
# halves of surrogate pairs, which no terminal's encoding has.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str, keep: str = "") -> str:
    """Escapes what is no part of a line; escaping twice changes nothing.

    Args:
        text: A name, a sentence, a line.
        keep: Characters to leave, such as "\\n" in a text of several lines.
    """
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: _escaped(found[0], keep), text)


def _escaped(character: str, keep: str) -> str:
    return character if character in keep else ascii(character)[1:-1]


def counted(number: int, noun: str) -> str:
    """Writes a number of things: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_lines(sentences: Iterable[str]) -> str:
    """Writes a message: one sentence a line, a long one continued in the next line."""
    return "\n".join(line for each in sentences for line in wrapped(each))


def wrapped(sentence: str) -> list[str]:
    """Wraps a sentence; code in backticks or braces is not broken."""
    fixed = _CODE.sub(
        lambda code: code[0].replace(" ", _FIXED_SPACE), printable(sentence)
    )
    lines = textwrap.wrap(
        fixed,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED_SPACE, " ") for line in lines]
