"""Writes docs/causes.md: the failures of benchmarks/answers, and what the guard says.

python docs/tools/causes.py

What it says stands in golden files, which `python tests/support/golden.py` renews.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from answers.failure import Failure
from answers.families import FAILURES
from golden_text import kept, part

from overflow_fast.guard.report.causes import CAUSES, Cause

PAGE = Path(__file__).parents[1] / "causes.md"
_HEAD = """\
# Causes

<!-- Written by docs/tools/causes.py. -->

{count} failures from public reports, made again in small models, by cause. Each has
the reason, what to do, and the text of the `NonFiniteError` that the guard raised when
the failure was run with `guard.run`: the answer in its first line, the line that
failed, and at the end a remedy that was tried on the step. Where the guard does not
know the cause, it says so.

Lines of code are those of
[benchmarks/answers/families](../benchmarks/answers/families); `cured` is False in
them, and True in the run that is finite. A test runs the failures again. Yours is not
here? Look at [my run is nan](my-run-is-nan.md) for where to begin.
"""
# What stands in titles for words of the functions' names.
_WORDS = {
    "nan to num": "`nan_to_num`",
    "where": "`torch.where`",
    "logsumexp": "`logsumexp`",
    "logaddexp": "`logaddexp`",
    "half": "float16",
}


def entry(failure: Failure, said: str) -> str:
    """The part of the page on a failure.

    Args:
        failure: The failure.
        said: The text of its error.
    """
    why = textwrap.fill(" ".join((inspect.getdoc(failure.build) or "").split()), 100)
    sources = ", ".join(map(_link, failure.source.split(", ")))
    parts = (
        f"### {_title(failure)}",
        why,
        f"```\n{said}\n```",
        f"Reported in {sources}.",
    )
    return "\n\n".join(parts) + "\n"


def page(said: dict[str, str]) -> str:
    """The whole page.

    Args:
        said: The text of each failure's error, by its name.
    """
    parts = [_HEAD.format(count=len(FAILURES))]
    for cause in with_help():
        own = _of_cause(cause)
        parts.append(f"## {cause.name.capitalize()}\n\n{cause.help}\n")
        parts += [entry(failure, said[failure.name]) for failure in own]
    return "\n".join(parts)


def shown(text: str) -> dict[str, str]:
    """The texts that a page has, by the names of their failures."""
    found = re.findall(r"^### .*?^```\n(.*?)\n```$", text, re.M | re.S)
    names = [each.name for cause in with_help() for each in _of_cause(cause)]
    return dict(zip(names, found, strict=True))


def with_help() -> list[Cause]:
    """The causes that have a section of the page, with examples if there are any."""
    return [each for each in CAUSES.values() if each.help]


def _of_cause(cause: Cause) -> list[Failure]:
    return [each for each in FAILURES.values() if each.causes[0] == cause.name]


def _title(failure: Failure) -> str:
    title = failure.name.replace("_", " ")
    for word, plain in _WORDS.items():
        title = re.sub(rf"\b{word}\b", plain, title)
    return title[0].upper() + title[1:]


def _link(source: str) -> str:
    repository, number = source.split("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def said() -> dict[str, str]:
    """The text of each failure's `NonFiniteError`, from the golden files."""
    return {name: part(kept(name), "NonFiniteError").strip() for name in FAILURES}


if __name__ == "__main__":
    PAGE.write_text(page(said()))
