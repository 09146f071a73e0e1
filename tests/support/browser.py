"""A browser without a window, for tests that need one."""

import contextlib
import shutil

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextlib.contextmanager
def browser():
    """Chromium, steered by playwright; skips where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs a browser: apt install chromium")
    with playwright.sync_playwright() as steering:
        # Chromium has no sandbox for root, as which CI may run.
        chromium = steering.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


class OpenPage:
    """A page in a browser.

    Attributes:
        tab: Playwright's page.
        troubles: What was written to the console, errors, and requests of others.
    """

    def __init__(self, tab, path):
        self.tab, self.troubles = tab, []
        tab.on("console", lambda message: self.troubles.append(message.text))
        tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        tab.on("request", self._note)
        tab.set_default_timeout(10_000)
        tab.goto(path.as_uri())

    def _note(self, request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.troubles.append(request.url)

    @property
    def readout(self):
        return self.tab.locator("#readout").inner_text()

    def wait(self):
        """Lets the page draw: it does with the next frame."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame("
            "() => requestAnimationFrame(done)))"
        )

    def box(self):
        heat = self.tab.locator("#heat")
        heat.scroll_into_view_if_needed()
        return heat.bounding_box()

    def at(self, part, row):
        """A place of the heatmap: a part of its width behind the names, and a row."""
        box = self.box()
        return box["x"] + 300 + part * (box["width"] - 312), box["y"] + 16 * row + 8

    def hover(self, part, row):
        self.tab.mouse.move(*self.at(part, row))
        self.wait()
        return self.readout

    def click_name(self, row):
        box = self.box()
        self.tab.mouse.click(box["x"] + 40, box["y"] + 16 * row + 8)
        self.wait()

    def press(self, *keys):
        for key in keys:
            self.tab.keyboard.press(key)
        self.wait()
        return self.readout

    def colour(self, part, row):
        """The colour of a place of the heatmap: red, green, blue."""
        x, y = self.at(part, row)
        box = self.box()
        return tuple(
            self.tab.evaluate(
                "([x, y]) => { const heat = document.getElementById('heat');"
                "const k = heat.width / heat.clientWidth;"
                "const pen = new OffscreenCanvas(1, 1).getContext('2d');"
                "pen.drawImage(heat, x * k, y * k, 1, 1, 0, 0, 1, 1);"
                "return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3); }",
                [x - box["x"], y - box["y"]],
            )
        )
