"""The page of causes is what its generator writes, and what the guard says today."""

import importlib.util
import re

import pytest
import torch
from answers.families import FAILURES
from answers.tools import TOOLS
from pages import ROOT, without_numbers

_spec = importlib.util.spec_from_file_location("causes", ROOT / "docs/tools/causes.py")
causes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(causes)

TEXT = causes.PAGE.read_text()
SHOWN = causes.shown(TEXT)
ALONE = [n for n, each in FAILURES.items() if each.ranks == 1 and not each.kind]
FEW = ALONE[3 :: len(ALONE) // 6]


def test_every_failure_has_a_reason_and_a_place():
    assert set(causes.CLASSES) == {each.causes[0] for each in FAILURES.values()}
    assert SHOWN.keys() == FAILURES.keys()
    for each in FAILURES.values():
        assert len(re.split(r"\.\s+", each.build.__doc__.strip())) >= 2, each.name


def test_the_page_is_what_its_generator_writes():
    assert causes.page(SHOWN) == TEXT, "run python docs/tools/causes.py"


@pytest.mark.parametrize("name", SHOWN)
def test_a_line_that_was_tried_is_not_said_not_to_be(name):
    is_tried = re.search(r"^tried     \S+:\d+: ", SHOWN[name], re.MULTILINE)
    assert not (is_tried and "A change of the line was not tried" in SHOWN[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_the_guard_still_says_what_the_page_shows(name):
    torch.manual_seed(0)
    failure = FAILURES[name]
    said = TOOLS["ours-run"](failure, failure.build(False)).text
    assert without_numbers(causes.tidied(said)) == without_numbers(SHOWN[name])
