"""Whole texts: what a run said, and what of it differs from one run to another."""

import contextlib
import html.parser
import io
import logging
import platform
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from overflow_fast import NonFiniteError

BLOCKS = {"p", "div", "li", "tr", "pre", "section", "figcaption", "caption", "dd"}
BLOCKS |= {"h1", "h2", "h3", "h4", "br", "summary", "dt", "td", "th"}
UNSEEN = {"script", "style", "title", "noscript", "button", "label", "select"}
TREE = re.escape(str(Path(__file__).parents[2]))  # which may lie in a temporary folder
# What differs from run to run or from machine to machine, and what stands for it.
VOLATILE = (
    (rf"{TREE}/(?:[^\s/'\"`():]+/)*", ""),
    (rf"(/[^\s'\"`()]+)?{re.escape(tempfile.gettempdir())}/[^\s'\"`()]+", "PATH"),
    (r"(?<!\w)/(?:[^\s'\"`():]+/)+([^\s/'\"`():]+)", r"\1"),
    (r"\b20\d{6}T\d{6}Z-\S+?-\d+-[0-9a-f]{6}", "RUN"),
    (re.escape(platform.node()), "HOST"),
    (r"0x[0-9a-f]{6,}", "ADDRESS"),
    (r"\d+(\.\d+)?(e-\d+)? (s|ms|us)\b", r"N \3"),
    (r"\d+(\.\d+)? ?%(?= of (the|their) time)", "N %"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?", "TIME"),
    (r"(?<=pid \| )\d+", "PID"),
    (r"\b\d+(\.\d+)* (KiB|MiB|GiB|bytes)\b", r"N \2"),
    (r"  # <-", ""),
)


FOLDER = Path(__file__).parents[1] / "golden"
ANSWER = "(the text of NonFiniteError)"


def told(function, has_frames=True):
    """The text of a case: what it logs, returns, and raises with its whole report."""
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logger = logging.getLogger("overflow_fast")
    logger.addHandler(handler)
    returned, raised = None, None
    try:
        argv = mock.patch.object(sys, "argv", ["train.py"])  # of a page's title
        with contextlib.redirect_stdout(io.StringIO()), argv:
            returned = function()
    except NonFiniteError as error:
        raised = error
    except Exception as error:
        returned = f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(handler)
    parts = []
    if raised is not None:
        report = raised.report
        report.frames *= has_frames
        whole = str(report).replace(str(raised), ANSWER)
        parts = [("NonFiniteError", str(raised)), ("report", whole)]
    if returned is not None:
        parts.append(("returned", str(returned)))
    if raised is None and logged.getvalue():
        parts.append(("log", logged.getvalue()))
    return "\n".join(f"--- {name}\n{tidied(text)}" for name, text in parts)


def tidied(text):
    """A text without what differs between two runs of the same program."""
    for pattern, plain in VOLATILE:
        text = re.sub(pattern, plain, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


class _Visible(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts, self.hidden = [], []

    def handle_starttag(self, tag, attributes):
        if tag in UNSEEN:
            self.hidden.append(tag)
        elif tag in BLOCKS:
            self.parts.append(" | " if tag in ("td", "th") else "\n")
        if re.fullmatch("h[1-4]", tag):
            self.parts.append("#" * int(tag[1]) + " ")

    def handle_endtag(self, tag):
        if self.hidden and self.hidden[-1] == tag:
            self.hidden.pop()

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)


def text_of(page):
    """The text of a page as a reader sees it, a block a line."""
    visible = _Visible()
    visible.feed(page)
    lines = (" ".join(line.split()) for line in "".join(visible.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def path_of(name):
    """The file of a case."""
    return FOLDER / f"{name}.txt"


def kept(name):
    """The text of a case as it is kept; "" where there is none."""
    path = path_of(name)
    return path.read_text() if path.exists() else ""


def part(text, name):
    """A part of a text: "NonFiniteError", "report", "returned" or "log"."""
    return text.partition(f"--- {name}\n")[2].partition("\n--- ")[0]
