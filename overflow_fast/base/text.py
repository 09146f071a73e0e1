"""Text on its way to a terminal, a logger or a page.

Names of modules, tensors and files, and what stands in files, may hold anything:
sequences that clear a terminal, the end of a line and a line that looks like one of
ours, marks that turn the direction of what follows, characters that nobody sees and
that make two names look the same. Such characters are written as Python writes them in
a string (`\\x1b`, `\\n`, `\\u202e`, `\\u200b`) where names become text. What is for
programs (`to_dict()`, JSON) has the names as they are.
"""

from __future__ import annotations

import difflib
import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_WIDTH = 84  # with what each logged line begins with: 100
_LONGEST = 1003  # characters of a name in a file
_CODE = re.compile(r"`[^`]*`|\{[^}]*\}|\[[\d:, ]{2,24}\]")
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


def printable_lines(lines: Iterable[str]) -> list[str]:
    """Escapes what is no part of a line in each of several."""
    return [printable(line) for line in lines]


def shortened(name: str) -> str:
    """A name without its middle, where it is too long for a file."""
    return name if len(name) <= _LONGEST else f"{name[:500]}...{name[-500:]}"


def counted(number: int, noun: str) -> str:
    """Writes a number of things: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Iterable[str], most: int) -> str:
    """Lists the first of several names: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" * (len(listed) > most)
    return f"{', '.join(listed[:most])}{more}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Writes things by numbers in order: `step 1`, `ranks 0 and 1`, `steps 0 to 9`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == 2:
        return f"{noun}s {numbers[0]} and {numbers[1]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {some(map(str, numbers), 6)}"


def either(words: Iterable[str], most: int | None = None) -> str:
    """Lists alternatives: `a, b or c`, or `a, b or one of 3 more`."""
    listed = list(words)
    if most is not None and len(listed) > most:
        return f"{', '.join(listed[:most])} or one of {len(listed) - most} more"
    return " or ".join([", ".join(listed[:-1]), listed[-1]][len(listed) < 2 :])


def capitalized(sentence: str) -> str:
    """Writes the first letter of a sentence large, and leaves the others."""
    return f"{sentence[0].upper()}{sentence[1:]}"


def nearest(word: str, names: Iterable[str]) -> str:
    """Writes which name was probably meant: `: did you mean skip?`; "" for none.

    A name that is spelled alike, else those that begin with the same word: `on_nan` is
    meant for `on_overflow`.
    """
    bare, known = word.strip("-"), {name.strip("-"): name for name in names}
    found = difflib.get_close_matches(bare, known, n=1)
    if not found:
        first, *others = _WORDS.split(bare)
        alike = [each for each in known if others and _WORDS.split(each)[0] == first]
        found = alike[:_MOST_MEANT]
    return f": did you mean {either(known[each] for each in found)}?" if found else ""


_WORDS = re.compile("[-_.]")
_MOST_MEANT = 3  # more say nothing


def rounded(number: float, digits: int = 3) -> str:
    """Writes a factor as people read it: `53,000`, not `5.3e+04`."""
    return f"{float(f'{number:.{digits}g}'):,.10g}"


def bits_left(limit: float, abs_max: float) -> float:
    """The headroom: how often a magnitude could double before it passes a limit.

    Returns:
        inf for 0; -inf for inf; nan where one of the two is not known.
    """
    if abs_max == 0:
        return math.inf if limit > 0 else math.nan
    ratio = limit / abs_max
    if ratio > 0:
        return math.log2(ratio)
    return -math.inf if ratio == 0 else math.nan


def error_line(error: BaseException, most: int = 500) -> str:
    """Writes the class of an error and its first line, of which so many characters."""
    return f"{type(error).__name__}: {str(error)[:most]}".splitlines()[0]


def dtype_name(dtype: object) -> str:
    """Writes a dtype without its package: "float16"."""
    return str(dtype).removeprefix("torch.")


def as_lines(sentences: Iterable[str]) -> str:
    """Writes a message: one sentence a line, a long one continued in the next line."""
    return "\n".join(line for each in sentences for line in wrapped(each))


def kind_of(value: object) -> str:
    """Names the class of a value, for an error; a class as such."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Writes the rows of a table as lines.

    Args:
        rows: The cells of each row, all of one length.
        right: The columns whose cells end together; those of others begin together.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = {i: str.rjust for i in right}
    return [
        "  ".join(
            ends.get(i, str.ljust)(cell, widths[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def wrapped(sentence: str, width: int = _WIDTH, indent: str = "  ") -> list[str]:
    """Wraps a sentence, but no code in backticks or braces, and no [0, 1]."""
    fixed = _CODE.sub(
        lambda code: code[0].replace(" ", _FIXED_SPACE), printable(sentence)
    )
    lines = textwrap.wrap(
        fixed,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED_SPACE, " ") for line in lines]


def listed_fields(meanings: Iterable[tuple[str, str]]) -> str:
    """Lists fields as a docstring does, by their names and what they mean."""
    return "\n".join(
        textwrap.fill(
            f"{name}: {meaning}",
            _WIDTH,  # help() indents docstrings
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, meaning in meanings
    )


def with_progress(items: Iterable[_T], unit: str, total: int | None) -> Iterable[_T]:
    """Iterates, with a progress bar on a terminal from the third second on.

    Args:
        items: The items.
        unit: The word for several of them.
        total: How many there are, or None.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    shown: Iterable[_T] = tqdm(
        items, total=total, unit=f" {unit}", delay=2, disable=None
    )
    return shown
