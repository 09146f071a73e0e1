"""Writes docs/images/incident.png: the page of an incident, as a browser shows it.

python docs/tools/picture.py  # needs playwright, and Chromium on the path

Between the card of the incident and the heatmap, the picture leaves out the report.
"""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import FloatRect, Page, sync_playwright

HERE = Path(__file__).resolve().parent
WIDTH = 1000
PICTURE = HERE.parent / "images" / "incident.png"
# What the picture leaves out.
SHORTER = """
body > header, .card > h4:last-of-type, .card > h4:last-of-type + ul,
.card > div.scroll:first-of-type, #headroom > p, .bar, #readout, #keys { display: none }
"""


def page(folder: Path) -> Path:
    """The page of the run in drift.py."""
    shutil.copy(HERE / "drift.py", folder / "train.py")
    os.chdir(folder)  # the page shows the path of the program as it was given
    runpy.run_path("train.py")
    return folder / "run.html"


def _frame(tab: Page) -> FloatRect:
    """From the card of the incident to the end of the heatmap."""
    end = tab.locator("#rows").bounding_box()
    assert end is not None
    return {"x": 0, "y": 24, "width": WIDTH, "height": end["y"] + end["height"] - 12}


def main() -> None:
    """Takes the picture."""
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with tempfile.TemporaryDirectory() as name, sync_playwright() as steering:
        path = page(Path(name))
        browser = steering.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900})
        tab.goto(path.as_uri())
        tab.locator("#app").wait_for()
        tab.locator("#fold").click()
        tab.add_style_tag(content=SHORTER)
        tab.evaluate("() => scrollTo(0, 0)")
        tab.wait_for_timeout(500)  # the heatmap is drawn
        tab.screenshot(path=PICTURE, full_page=True, clip=_frame(tab))
        browser.close()


if __name__ == "__main__":
    main()
