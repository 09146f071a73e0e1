"""The README and the pages of docs/: their examples, headings and links."""

import contextlib
import io
import re
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import overflow_fast

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages():
    """The text of each page by its path, the README first."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(text):
    """The headings of a page, in order."""
    return re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.M)


def anchors(text):
    """The anchors of a page's headings, in order."""
    return [slug(each) for each in headings(text)]


def links(text):
    """The targets of a page's links."""
    return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))


def examples():
    """The Python examples by page and anchor: "docs/guide.md#ddp", then "...#ddp 2"."""
    found = {}
    for page, text in pages().items():
        for fence in _FENCE.finditer(text):
            if fence[1] == "python":
                place = f"{page}#{anchors(text[: fence.start()])[-1]}"
                count = sum(key.split()[0] == place for key in found)
                found[f"{place} {count + 1}" if count else place] = fence[2]
    return found


def section(page, anchor):
    """The text between a heading and the next one of any level."""
    text = pages()[page]
    parts = re.split(r"^#+ (.+)\n", text, flags=re.MULTILINE)
    return {slug(parts[i]): parts[i + 1] for i in range(1, len(parts), 2)}[anchor]


class Examples:
    """The examples of pages for their tests: `@runs("anchor")` gives a test the code.

    Attributes:
        untested: The anchors of the examples that no test has asked for.
    """

    def __init__(self, *pages):
        found = {
            place.split("#")[1]: code
            for place, code in examples().items()
            if place.split("#")[0] in pages
        }
        self._codes, self.untested = found, set(found)

    def __call__(self, anchor):
        self.untested.discard(anchor)
        return pytest.mark.parametrize("code", [self._codes[anchor]], ids=[anchor])


def run(code, **names):
    """Runs an example where these names are known; returns what is known afterwards."""
    known = {"torch": torch, "overflow_fast": overflow_fast, **names}
    exec(code, known)
    return known


def guides():
    """The paths of the guides."""
    return [page for page in pages() if page.startswith("docs/guide")]


def assert_shown(page, opening, report):
    """A report stands in a page as it is today, but for numbers and line breaks.

    Also in one of several pages, of which `page` is the beginning.
    """
    text = "\n".join(pages()[path] for path in pages() if path.startswith(page))
    (shown,) = re.findall(rf"^```\n({opening}.*?)^```$", text, re.M | re.DOTALL)
    for part in shown.split("[...]"):
        assert without_numbers(part) in without_numbers(report), report


def without_numbers(text):
    """A text in one line, with N for each run of digits."""
    return re.sub(r"\d+", "N", " ".join(text.split()))


def fences(text, language=None):
    """The fenced blocks of a page, of all languages or one: (language, content)."""
    found = [(fence[1], fence[2]) for fence in _FENCE.finditer(text)]
    return [each for each in found if language in (None, each[0])]


@dataclass
class Program:
    """A program of a page.

    Attributes:
        code: The program.
        shown: What the page says that it prints.
        cures: The program with each of the changes that the page shows below it.
    """

    code: str
    shown: str
    cures: list[str]


class Programs(dict[str, Program]):
    """The programs of a page, by anchor: a python block, its output, and changes."""

    def __init__(self, page):
        text = pages()[page]
        before = ""
        for fence in _FENCE.finditer(text):
            place = anchors(text[: fence.start()])[-1]
            if fence[1] == "" and before:
                self[place] = Program(before, fence[2], [])
            elif fence[1] == "diff" and place in self:
                self[place].cures.append(_changed(self[place].code, fence[2]))
            before = fence[2] if fence[1] == "python" else ""


def _changed(code, diff):
    old = "".join(line[1:] for line in diff.splitlines(True) if line[0] != "+")
    new = "".join(line[1:] for line in diff.splitlines(True) if line[0] != "-")
    assert code.count(old) == 1, old
    return code.replace(old, new)


def output_of(code, folder):
    """The output of a program as train.py, and the report that ends it."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "train.py"
    path.write_text(code)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except overflow_fast.NonFiniteError as error:
            print(error)
    return out.getvalue()
