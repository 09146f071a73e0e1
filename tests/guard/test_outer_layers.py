"""An alarm stands where what explains it cannot be imported any more, or fails."""

import json
import sys

import pytest
import torch
from guarding import INF, assert_same, batches, make, state_of, train_step

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer.step_explainer import StepExplainer
from overflow_fast.guard import outer

pytestmark = pytest.mark.explains

OUTER = {
    name: f"overflow_fast.{place.partition(':')[0]}"
    for name, place in outer._PLACES.items()
}


@pytest.fixture
def gone(monkeypatch):
    """The outer layers cannot be imported: their files are gone, or others."""
    for module in OUTER.values():
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def failing(monkeypatch):
    """The explainer can be imported, and fails whatever it is asked."""

    def fail(*_):
        raise OSError(5, "Input/output error")

    for name in ("explain", "offer", "look_again"):
        monkeypatch.setattr(StepExplainer, name, fail)


def bad_step(model, optimizer):
    (x, y), *_ = batches(1)
    x[0, 0] = INF
    return train_step(model, optimizer, (x, y))


@pytest.fixture(params=["gone", "failing"])
def broken(request):
    request.getfixturevalue(request.param)
    return {"gone": "explainer could not be loaded", "failing": "OSError"}[
        request.param
    ]


@pytest.mark.parametrize("watch", [("activations", "loss"), "tripwire"])
def test_a_step_is_skipped_bit_for_bit(model, optimizer, broken, watch):
    before = state_of(model, optimizer)
    with OverflowGuard(model, optimizer, "skip", watch=watch) as guard:
        bad_step(model, optimizer)
    assert_same(state_of(model, optimizer), before)
    report = guard.last_report
    assert (report.action, guard.num_skipped, report.verdict.is_clean) == (
        *("skip", 1),
        False,
    )
    assert guard.coverage().failures == 0
    said = " ".join(str(report).split())
    assert said.count(broken) == 1 + (watch == "tripwire")
    assert report.explanation.cause == "unknown"


def test_a_step_raises(model, optimizer, broken):
    with OverflowGuard(model, optimizer), pytest.raises(NonFiniteError, match=broken):
        bad_step(model, optimizer)


def test_the_policy_is_asked(model, optimizer, broken):
    asked = []

    def policy(report):
        asked.append(report.explanation.notes)
        return "skip"

    with OverflowGuard(model, optimizer, policy) as guard:
        bad_step(model, optimizer)
    ((note,),) = asked
    assert broken in note and guard.num_skipped == 1


def test_log_and_evidence_are_written(model, optimizer, broken, tmp_path):
    log, evidence = tmp_path / "log.jsonl", tmp_path / "evidence"
    with OverflowGuard(model, optimizer, "skip", log=log, evidence=evidence) as guard:
        bad_step(model, optimizer)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (bad,) = [each for each in lines if each.get("is_clean") is False]
    assert (bad["action"], bad["cause"]) == ("skip", "unknown")
    (report,) = evidence.rglob("report.txt")
    assert broken in report.read_text()
    assert json.loads(report.with_suffix(".json").read_text())["step"] == 0
    assert guard.last_report.evidence == str(report.parent)


def test_it_is_tried_again_at_the_next_bad_step(model, optimizer, monkeypatch):
    with OverflowGuard(model, optimizer, "skip", explain=True) as guard:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, OUTER["explainer"], None)
            bad_step(model, optimizer)
        assert guard.last_report.explanation.cause == "unknown"
        bad_step(model, optimizer)
        assert guard.last_report.explanation.cause == "bad data"


def test_what_the_program_asks_for_itself_says_what_is_missing(gone, tmp_path, as_kept):
    model, optimizer = make()
    with OverflowGuard(model, optimizer) as guard:
        as_kept.error(ImportError, guard.self_test, torch.ones(4, 8))
        as_kept.error(ImportError, guard.to_html, tmp_path / "run.html")


def test_only_what_is_in_the_table_can_be_asked_for():
    with pytest.raises(KeyError):
        outer.outer("pages")
