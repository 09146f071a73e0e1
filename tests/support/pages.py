"""The README and the pages of docs/: their examples, headings and links."""

import re
from pathlib import Path

import pytest
import torch

import overflow_fast

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages():
    """The text of each page by its path, the README first."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text):
    """The anchors of a page's headings, in order."""
    return [slug(h) for h in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.M)]


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
    """The examples of a page for its tests: `@runs("anchor")` gives a test the code.

    Attributes:
        untested: The anchors of the examples that no test has asked for.
    """

    def __init__(self, page):
        found = {
            place.split("#")[1]: code
            for place, code in examples().items()
            if place.startswith(f"{page}#")
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


def assert_shown(page, opening, report):
    """A report stands in a page as it is today, but for numbers and line breaks."""
    (shown,) = re.findall(
        rf"^```\n({opening}.*?)^```$", pages()[page], re.M | re.DOTALL
    )
    for part in shown.split("[...]"):
        assert _without_numbers(part) in _without_numbers(report), report


def _without_numbers(text):
    return re.sub(r"\d", "N", " ".join(text.split()))
