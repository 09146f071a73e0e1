"""The site of the documentation builds without a warning and loads nothing."""

import json
import re
import subprocess
import sys

import pytest
from browser import OpenPage, browser
from pages import ROOT

import overflow_fast

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]
SITE = ROOT / "build" / "site"


@pytest.fixture(scope="module")
def site():
    for module in ("zensical", "mkdocstrings"):
        pytest.importorskip(module, reason="needs the packages of the group docs")
    for command in (["docs/tools/site_pages.py"], ["-m", "zensical", "build", "-s"]):
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return SITE


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    loaded = re.compile(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)"
    )
    for page in pages:
        assert loaded.findall(page.read_text()) == []


def test_search_finds_pages_in_three_languages(site):
    index = json.loads((site / "search.json").read_text())
    titles = {each["title"] for each in index["items"]}
    assert {"Attention masks", "注意力掩码", "어텐션 마스크"} <= titles


def test_every_public_name_is_on_the_page_of_the_api(site):
    page = (site / "api.html").read_text()
    for name in overflow_fast.__all__:
        assert re.search(rf'id="overflow_fast\.([\w.]+\.)?{name}"', page), name


def test_pages_from_outside_of_docs_link_to_the_others(site):
    home = (site / "index.html").read_text()
    assert 'href="my-run-is-nan.html"' in home
    assert 'href="docs/' not in home


def test_a_browser_opens_it_without_a_server_and_searches(site):
    with browser() as chromium:
        page = OpenPage(chromium.new_page())
        page.open(site / "zh" / "my-run-is-nan.html")
        assert "nan" in page.tab.locator("h1").inner_text()
        page.tab.locator(".md-search__button").click()
        page.tab.get_by_label("Search").last.press_sequentially("headroom")
        page.tab.locator("a", has_text="headroom()").first.wait_for()
        page.tab.goto((site / "index.html").as_uri())
        assert (
            page.tab.locator("img[src$='incident.png']").bounding_box()["width"] > 400
        )
        assert page.troubles == []
