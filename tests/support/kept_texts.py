"""The texts that single tests ask for: `tests/golden/tests` has a file for each test.

`pytest --renew` writes the texts of the tests that it runs, and prints what has become
of the words. A text that all cases of a test share is kept once; those of their own
have headlines.
"""

import difflib
import re
import tempfile

import pytest
import torch
from golden_text import FOLDER, tidied

TEXTS = FOLDER / "tests"
RENEW = "run this test with --renew and look at the difference"
_HEADER = re.compile(r"^=== (\[.*|\d+)$", re.MULTILINE)
# What differs between installations, and with each line that is added to a test.
_VOLATILE = (
    (rf"{re.escape(tempfile.gettempdir())}/(?:[^\s'\"`():]+/)*", ""),
    (re.escape(torch.__version__), "TORCH"),
    (r"(\.py):\d+", r"\1:N"),
    (r"\bline \d+\b", "line N"),
    (r"[\d.,]+(?=\s+times\s+what \w+\s+rounding)", "N"),
    (r"\d+\.\d+(?=%)", "N"),
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?|\d+e[+-]?\d+")
_NEAR = 0.1  # processors round otherwise, by less than this in what tests compute


def sections(path):
    """The texts of a test's file by their headlines; "" for the first of all cases."""
    first, *parts = _HEADER.split(path.read_text() if path.exists() else "")
    found = {name: text.removeprefix("\n") for name, text in _pairs(parts)}
    return {"": first} | found if first else found


def _pairs(parts):
    return zip(parts[::2], parts[1::2], strict=True)


def all_kept():
    """The files of texts as they are now."""
    return {str(p.relative_to(TEXTS)): p.read_text() for p in TEXTS.rglob("*.txt")}


def differences(before):
    """The lines of a difference between texts of `all_kept` and those of now."""
    now = all_kept()
    for name in sorted(before.keys() | now.keys()):
        lines = (texts.get(name, "").splitlines() for texts in (before, now))
        yield from difflib.unified_diff(*lines, name, name, lineterm="", n=1)


def plain(texts):
    """Texts, or lists of them, a line each, without what differs from run to run."""
    lists = (each if isinstance(each, (list, tuple)) else [each] for each in texts)
    text = "\n".join(str(each) for several in lists for each in several)
    for pattern, stands_for in _VOLATILE:
        text = re.sub(pattern, stands_for, text)
    return tidied(text)


def is_same(text, kept):
    """True if two texts are the same, but for empty lines and last digits."""
    text, kept = (re.sub(r"\n\s*\n", "\n", each) for each in (text, kept))
    words, numbers = zip(*map(_words_and_numbers, (text, kept)), strict=True)
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=_NEAR)


def _words_and_numbers(text):
    return _DECIMAL.sub("N", text), [float(each) for each in _DECIMAL.findall(text)]


class AsKept:
    """Compares the texts of a test with those that are kept for it.

    Args:
        path: The file of the texts.
        parameters: Those of the test as its name has them, such as "[cpu]"; or "".
        renews: The files that were renewed in this session; None to compare.
        is_whole: True if all cases of the test run in this session.
    """

    def __init__(self, path, parameters="", renews=None, is_whole=True):
        self.path, self.parameters = path, parameters
        self.renews, self.is_whole = renews, is_whole
        self.count, self.last = 0, ""

    def __call__(self, *texts):
        """The texts, each on lines of its own, are those that are kept.

        What is said once more, as by other ranks, is kept once.
        """
        text = plain(texts)
        if self.count and is_same(text, self.last):
            return
        self.count, self.last = self.count + 1, text
        shared = str(self.count) if self.count > 1 else ""
        own = f"{self.parameters} {shared}".strip()
        if self.renews is not None:
            self._renew(text, shared, own)
        known = sections(self.path)
        kept = known.get(own, known.get(shared))
        assert kept is not None, RENEW
        if not is_same(text, kept):
            assert text == kept, RENEW

    def error(self, kind, call, *arguments, **named):
        """The error of a kind that a call raises has the text that is kept."""
        with pytest.raises(kind) as raised:
            call(*arguments, **named)
        self(raised.value)

    def errors(self, call, cases):
        """The errors that a call raises for what it cannot use, one for each case."""
        found = []
        for case in cases:
            with pytest.raises((TypeError, ValueError)) as raised:
                call(case)
            found.append(f"{type(raised.value).__name__}: {raised.value}")
        self(found)

    def _renew(self, text, shared, own):
        is_first = self.path not in self.renews
        known = {} if is_first and self.is_whole else sections(self.path)
        self.renews.add(self.path)
        if is_same(text, known.setdefault(shared, text)):
            known = {k: t for k, t in known.items() if k != own or own == shared}
        else:
            known[own] = text
        self.path.parent.mkdir(parents=True, exist_ok=True)
        heads = (f"=== {name}\n" if name else "" for name in sorted(known))
        parts = zip(heads, (known[name] for name in sorted(known)), strict=True)
        self.path.write_text("".join(head + text for head, text in parts))
