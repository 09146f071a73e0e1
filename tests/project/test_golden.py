"""The whole texts that a user reads are those that are kept in golden files."""

import ast
import re
from pathlib import Path

import golden
import golden_text
import pytest
from golden import ALONE, CASES, NAMES, said
from golden_text import FOLDER, kept, path_of
from kept_texts import TEXTS, AsKept, sections
from pages import without_numbers

from overflow_fast.guard.report.causes import CAUSES

TESTS = Path(__file__).parents[1]
# Runs that diverge: their numbers, and signs of infs, depend on the processor.
DIVERGING = ("gradient_through_time", "gradient_through_depth")
# In this one, which of two products overflows first does, too: it is held to the line
# that names module, operation and cause.
CHAOTIC = "gradient_through_time"
RENEW = "run `python tests/support/golden.py` and look at the differences"
# The others import a trainer, start processes, compile, or are one of many of a kind.
FAST = {*CASES, *ALONE[::8]} - {"trainer_of_transformers"}


def test_each_run_has_a_file_and_each_file_a_run():
    assert sorted(FOLDER.glob("*.txt")) == sorted(map(path_of, NAMES)), RENEW
    assert len(NAMES) >= 100


def test_each_cause_is_that_of_a_program_whose_text_is_kept():
    """A row of the table that no program reaches any longer is found here."""
    paths = FOLDER.rglob("*.txt")
    texts = "\n".join(path.read_text() for path in paths)
    found = {
        cause
        for cause in CAUSES
        if re.search(rf"^cause +{cause}\b", texts, re.MULTILINE)
        or re.search(rf"^Step \d+: .*\. {cause.capitalize()}: ", texts, re.MULTILINE)
    }
    assert found == set(CAUSES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in NAMES],
)
def test_a_run_still_says_what_its_file_has(name):
    found, wanted = said(name), kept(name)
    if name == CHAOTIC:
        found, wanted = (text.splitlines()[1] for text in (found, wanted))
    found, wanted = map(without_numbers, (found, wanted))
    if name in DIVERGING:
        found, wanted = map(as_on_any_processor, (found, wanted))
    assert found == wanted, RENEW


def as_on_any_processor(text):
    """A text without what depends on the order of sums: signs of infs, decimals."""
    text = re.sub(r"\binfinite( values)?\b|-inf\b", "inf", text)
    return re.sub(r"N\.N(e[+-]N)?", "N", text)


def test_renewing_prints_what_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(golden_text, "FOLDER", tmp_path)
    monkeypatch.setattr(golden, "said", lambda name: "a new line\n")
    path_of("warned").write_text("an old line\n")
    print(golden._renewed("warned"))
    printed = capsys.readouterr().out
    assert "-an old line\n+a new line" in printed
    assert kept("warned") == "a new line\n" and golden._renewed("warned") == ""


def test_the_texts_of_tests_are_of_tests_that_ask_for_them():
    asking = {
        (path.stem, each.name)
        for path in TESTS.rglob("test_*.py")
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.FunctionDef)
        and "as_kept" in [argument.arg for argument in each.args.args]
    }
    kept = {(path.parent.name, path.stem) for path in TEXTS.rglob("*.txt")}
    assert kept <= asking, f"remove {kept - asking}"


def kept_for(path, texts, parameters="", **options):
    """The fixture `as_kept` as a test has it, given some texts."""
    as_kept = AsKept(path, parameters, **options)
    for text in texts:
        as_kept(text)


def test_a_text_is_the_one_that_is_kept_for_the_test(tmp_path):
    path = tmp_path / "test_file" / "test_it.txt"
    kept_for(path, ["one 1.00", "one 1.00", "two\n\n3"], renews=set())
    assert sections(path) == {"": "one 1.00\n", "2": "two\n\n3\n"}
    kept_for(path, ["one 1.01", "two\n3"])
    kept_for(path, ["one 1.00", "two\n3"], "[of a parameter]")
    for wrong in (
        ["two"],
        ["one 2.00"],
        ["one 1.00", "one 2.00"],
        ["one 1.00", "b", "c"],
    ):
        with pytest.raises(AssertionError):
            kept_for(path, wrong)
    renews = set()
    kept_for(path, ["three"], "[a]", renews=renews)
    kept_for(path, ["three"], "[b]", renews=renews)
    kept_for(path, ["four"], "[c]", renews=renews)
    assert sections(path) == {"": "three\n", "[c]": "four\n"}
    with pytest.raises(AssertionError):
        kept_for(path, ["three"], "[c]")


def test_texts_of_cases_that_do_not_run_stay_as_they_are(tmp_path):
    path = tmp_path / "test_it.txt"
    path.write_text("three\n=== [c]\nfour\n")
    kept_for(path, ["five"], "[a]", renews=set(), is_whole=False)
    assert sections(path) == {"": "three\n", "[a]": "five\n", "[c]": "four\n"}
    kept_for(path, ["three"], "[a]", renews=set(), is_whole=False)
    assert sections(path) == {"": "three\n", "[c]": "four\n"}
