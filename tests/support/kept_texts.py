"""The texts that single tests ask for: `tests/golden/tests` has a file for each file.

`pytest --renew` writes the texts of the tests that it runs; `git diff` shows what has
become of the words. A text that all parameters of a test share is kept once.
"""

import re
import tempfile

import pytest
import torch
from golden_text import FOLDER, tidied

TEXTS = FOLDER / "tests"
RENEW = "run this test with --renew and look at `git diff tests/golden`"
_HEADER = re.compile(r"^=== (test_.*)$", re.MULTILINE)
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
    """The texts of a file by the names of their tests."""
    _, *parts = _HEADER.split(path.read_text() if path.exists() else "")
    return {
        name: text.removeprefix("\n")
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def plain(texts):
    """Texts, or lists of them, a line each, without what differs from run to run."""
    lists = (each if isinstance(each, (list, tuple)) else [each] for each in texts)
    text = "\n".join(str(each) for several in lists for each in several)
    for pattern, stands_for in _VOLATILE:
        text = re.sub(pattern, stands_for, text)
    return tidied("\n".join(filter(str.strip, text.splitlines())))


def is_same(text, kept):
    """True if two texts are the same, but for the last digits of decimals."""
    words, numbers = zip(*map(_words_and_numbers, (text, kept)), strict=True)
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=_NEAR)


def _words_and_numbers(text):
    return _DECIMAL.sub("N", text), [float(each) for each in _DECIMAL.findall(text)]


class AsKept:
    """Compares the texts of a test with those that are kept for it.

    Args:
        path: The file of the texts.
        test: The test's name.
        parameters: Those of the test as its name has them, such as "[cpu]"; or "".
        renews: The tests that were renewed in this session; None to compare.
    """

    def __init__(self, path, test, parameters, renews):
        self.path, self.test, self.parameters = path, test, parameters
        self.renews, self.count, self.last = renews, 0, ""

    def __call__(self, *texts):
        """The texts, each on lines of its own, are those that are kept.

        What is said once more, as by other ranks, is kept once.
        """
        text = plain(texts)
        if self.count and is_same(text, self.last):
            return
        self.count, self.last = self.count + 1, text
        number = f" {self.count}" if self.count > 1 else ""
        shared, own = self.test + number, self.test + self.parameters + number
        if self.renews is not None:
            self._renew(text, shared, own)
        known = sections(self.path)
        kept = known.get(own, known.get(shared))
        assert kept is not None, RENEW
        if not is_same(text, kept):
            assert text == kept, RENEW

    def _renew(self, text, shared, own):
        known = sections(self.path)
        if (self.path, self.test) not in self.renews:
            self.renews.add((self.path, self.test))
            known = {k: t for k, t in known.items() if name_of(k) != self.test}
        if not is_same(text, known.setdefault(shared, text)):
            known[own] = text
        self.path.parent.mkdir(exist_ok=True)
        parts = [f"=== {name}\n{known[name]}" for name in sorted(known)]
        self.path.write_text("".join(parts))


def name_of(section):
    """The name of the test that a section is of."""
    return re.split(r"[\[ ]", section)[0]


def errors_of(call, cases):
    """The errors that a call raises for what it cannot use, a line for each case."""
    found = []
    for case in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call(case)
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found
