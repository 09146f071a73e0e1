"""An addition takes as few places as the table of tools/additions.py says.

The script makes each in a copy of the tree and runs the tests that concern it. Here it
is asked whether the places are there, which takes no time.
"""

import importlib.util
import shutil
import sys

import pytest
from pages import ROOT

_spec = importlib.util.spec_from_file_location("additions", ROOT / "tools/additions.py")
additions = sys.modules["additions"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(additions)
ADDITIONS = additions.ADDITIONS


@pytest.mark.day
@pytest.mark.parametrize("name", ADDITIONS)
def test_the_places_of_an_addition_are_there_and_few(name, tmp_path):
    addition = ADDITIONS[name]
    assert 0 < addition.files <= len(addition.places) <= addition.goal
    for place in addition.places:
        (tmp_path / place.path).parent.mkdir(parents=True, exist_ok=True)
        if place.after and not (tmp_path / place.path).exists():
            shutil.copy(ROOT / place.path, tmp_path / place.path)
        assert bool(place.after) == (ROOT / place.path).exists()
        place.make(tmp_path)
        text = (tmp_path / place.path).read_text()
        assert place.text in text
        if place.path.endswith(".py"):
            compile(text, place.path, "exec")


def test_a_place_that_is_not_there_is_said(tmp_path, as_kept):
    (tmp_path / "x").write_text("a\n")
    place = additions.Place("x", "c", after="b")
    as_kept.error(ValueError, place.make, tmp_path)


def test_contributing_has_a_row_for_each():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "tools/additions.py" in text
    for name in ADDITIONS:
        assert name in text
