"""The pictures of the documentation are what their scripts make of today's results."""

import importlib.util
import runpy
import shutil

from pages import ROOT

TOOLS, IMAGES = ROOT / "docs" / "tools", ROOT / "docs" / "images"


def test_the_chart_shows_the_results():
    path = TOOLS / "overhead_chart.py"
    spec = importlib.util.spec_from_file_location("overhead_chart", path)
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    assert chart.CHART.read_text() == chart.chart(), f"run python {path}"


def test_the_run_of_the_picture_overflows(tmp_path, monkeypatch):
    shutil.copy(TOOLS / "drift.py", tmp_path / "train.py")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py")
    page = (tmp_path / "run.html").read_text()
    for part in ("range overflow", "train.py:19", "run layers.0.0 in float32"):
        assert part in page


def test_pictures_are_small():
    for path in IMAGES.iterdir():
        assert path.stat().st_size < 200_000, path
