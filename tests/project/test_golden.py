"""The whole texts that a user reads are those that are kept in golden files."""

import golden
import golden_text
import pytest
import quoted_words
from answers.families import FAILURES
from golden import ALONE, CASES, NAMES, said
from golden_text import FOLDER, kept, path_of
from pages import without_numbers

from overflow_fast.guard.report.causes import CAUSES

MOST_QUOTES = 745  # fewer is better: lower it
RENEW = "run `python tests/support/golden.py` and look at the differences"
# The others import a trainer, start processes, compile, or are one of many of a kind.
FAST = {*CASES, *ALONE[::8]} - {"trainer_of_transformers"}


def test_each_run_has_a_file_and_each_file_a_run():
    assert sorted(FOLDER.iterdir()) == sorted(map(path_of, NAMES)), RENEW
    assert len(NAMES) >= 100


def test_each_cause_that_a_single_process_has_is_among_them():
    texts = "".join(map(kept, NAMES))
    shown = {each.causes[0] for name, each in FAILURES.items() if name in ALONE}
    assert shown | {"left-over gradients", "unknown"} <= set(CAUSES)
    for cause in shown:
        assert cause in texts, cause


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in NAMES],
)
def test_a_run_still_says_what_its_file_has(name):
    assert without_numbers(said(name)) == without_numbers(kept(name)), RENEW


def test_renewing_prints_what_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(golden_text, "FOLDER", tmp_path)
    monkeypatch.setattr(golden, "said", lambda name: "a new line\n")
    path_of("warned").write_text("an old line\n")
    print(golden._renewed("warned"))
    printed = capsys.readouterr().out
    assert "-an old line\n+a new line" in printed
    assert kept("warned") == "a new line\n" and golden._renewed("warned") == ""


def test_few_asserts_quote_sentences():
    """A better word is to cost a look at the golden files, and no day in the tests."""
    found = quoted_words.count()
    assert sum(found.values()) <= MOST_QUOTES, list(found.items())[:20]


def test_an_assert_that_quotes_a_sentence_is_found(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text("assert 'a word or two' in text\nassert x == 'three words alone'\n")
    assert quoted_words.quoting(path) == [1]
