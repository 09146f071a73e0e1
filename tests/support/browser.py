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
    """A tab of a browser, in which one page after another is opened.

    A tab of its own for each page takes longer than most of what is asked of a page.

    Attributes:
        tab: Playwright's page.
        troubles: What was written to the console, errors, and requests of others.
    """

    def __init__(self, tab):
        self.tab, self.troubles = tab, []
        tab.on("console", lambda message: self.troubles.append(message.text))
        tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        tab.on("request", self._note)
        tab.set_default_timeout(10_000)

    def open(self, path, color_scheme="light"):
        """Opens a file as in a new tab."""
        self.troubles.clear()
        self.tab.mouse.move(0, 0)
        self.tab.set_viewport_size({"width": 1200, "height": 900})
        self.tab.emulate_media(media="screen", color_scheme=color_scheme)
        self.tab.goto(path.as_uri())

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
        """The heatmap's place on the screen, into which it is scrolled."""
        return self.tab.evaluate(
            "() => { const heat = document.getElementById('heat');"
            "heat.scrollIntoView({block: 'nearest', behavior: 'instant'});"
            "const {x, y, width, height} = heat.getBoundingClientRect();"
            "return {x, y, width, height}; }"
        )

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
        return tuple(
            self.tab.evaluate(
                "([x, y]) => { const heat = document.getElementById('heat');"
                "const k = heat.width / heat.clientWidth;"
                "const box = heat.getBoundingClientRect();"
                "const pen = new OffscreenCanvas(1, 1).getContext('2d');"
                "pen.drawImage("
                "heat, (x - box.x) * k, (y - box.y) * k, 1, 1, 0, 0, 1, 1);"
                "return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3); }",
                [x, y],
            )
        )
