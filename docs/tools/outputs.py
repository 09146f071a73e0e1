"""Renews what pages show of programs that end with a report.

python docs/tools/outputs.py

The programs of `pages.Programs` are run as train.py, and the block behind each is
written anew, in all languages of the page.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from pages import ROOT, Programs, output_of

PAGES = {
    "docs/getting-started.md": (),
    "docs/reading-a-report.md": (),
    "docs/my-run-is-nan.md": ("docs/zh/my-run-is-nan.md", "docs/ko/my-run-is-nan.md"),
}


def renew(page: str, translations: tuple[str, ...]) -> None:
    """Writes the outputs of a page's programs into it and into its translations."""
    texts = {each: (ROOT / each).read_text() for each in (page, *translations)}
    for program in Programs(page).values():
        if not program.shown.startswith("Step "):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = output_of(program.code, folder)
        new = found[found.index("Step ") if "Step " in found else 0 :]
        for each, text in texts.items():
            texts[each] = text.replace(f"```\n{program.shown}```", f"```\n{new}```")
    for each, text in texts.items():
        (ROOT / each).write_text(text)


if __name__ == "__main__":
    for page, translations in PAGES.items():
        renew(page, translations)
