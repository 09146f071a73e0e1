"""Text on its way to a terminal, a logger or a page.

Names of modules, tensors and files, and what stands in files, may hold anything:
sequences that clear a terminal, the end of a line and a line that looks like one of
ours, marks that turn the direction of what follows, characters that nobody sees and
that make two names look the same. Such characters are written as Python writes them in
a string (`\\x1b`, `\\n`, `\\u202e`, `\\u200b`) where names become text. What is for
programs (`to_dict()`, JSON) has the names as they are.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable

_WIDTH = 84  # with what each logged line begins with: 100
_LONGEST = 1003  # characters of a name in a file
_CODE = re.compile(r"`[^`]*`|\{[^}]*\}")
_FIXED_SPACE = "\0"


# Controls, formats (directions, what has no width), halves of surrogate pairs, which no
# terminal's encoding has, ends of lines and of paragraphs.
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_MAY_BE_UNSAFE = re.compile("[^\x20-\x7e]")


def printable(text: str, keep: str = "") -> str:
    """Escapes what is no part of a line; escaping twice changes nothing.

    Args:
        text: A name, a sentence, a line.
        keep: Characters to leave, such as "\\n" in a text of several lines.
    """
    if text.isprintable():
        return text
    return _MAY_BE_UNSAFE.sub(lambda found: _escaped(found[0], keep), text)


def _escaped(character: str, keep: str) -> str:
    if character in keep or unicodedata.category(character) not in _UNSAFE:
        return character
    return ascii(character)[1:-1]


def shortened(name: str) -> str:
    """A name without its middle, where it is too long for a file."""
    return name if len(name) <= _LONGEST else f"{name[:500]}...{name[-500:]}"


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
