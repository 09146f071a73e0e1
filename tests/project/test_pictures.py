"""The pictures of the documentation are what their scripts make of today's results."""

import importlib.util
import runpy
import shutil

import pytest
from pages import ROOT

TOOLS, IMAGES = ROOT / "docs" / "tools", ROOT / "docs" / "images"


CHART = TOOLS / "overhead_chart.py"


@pytest.fixture
def chart():
    spec = importlib.util.spec_from_file_location("overhead_chart", CHART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_shows_the_results(chart):
    assert chart.CHART.read_text() == chart.chart(), f"run python {CHART}"


def test_the_readme_says_what_the_chart_shows(chart):
    readme, added = (ROOT / "README.md").read_text(), chart.percents()
    single, half = added["guard, everything"].values()
    said = f"added {single:g} % to training steps of GPT-2 small in float32, {half:g} %"
    assert said in readme
    bars = {
        "guard": "guard, everything",
        "detect_anomaly": "torch's detect_anomaly",
        "transformers": "transformers' detector",
    }
    pairs = {name: added[bar].values() for name, bar in bars.items()}
    shown = [f"{name} {a:g} and {b:g} %" for name, (a, b) in pairs.items()]
    said = f"Added to a training step in float32 and bfloat16: {', '.join(shown)}"
    assert f"[{said}]" in readme


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
