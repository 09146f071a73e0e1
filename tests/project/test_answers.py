"""The collection of failures: its truths hold, and the guard misleads in none."""

import functools
import json
import re
from pathlib import Path

import pytest
from answers.failure import PHASES
from answers.families import FAILURES
from answers.judge import judge
from answers.remedied import can_be_remedied, followed
from answers.tools import Answer
from answers.verify import problems
from processes import python

from overflow_fast.guard.report.causes import BAD_DATA, BAD_WEIGHTS, CAUSES

ALL = list(FAILURES.values())
ALONE = [each for each in ALL if each.ranks == 1 and each.kind != "compiled"]
FEW = ALONE[:: len(ALONE) // 9]


def first_of_each(failures, kind_of):
    """The first failure of each kind."""
    found = {}
    for failure in failures:
        for kind in kind_of(failure):
            found.setdefault(kind, failure)
    return list(dict.fromkeys(each.name for each in found.values()))


# Each cause, each phase, and each kind: compiled, on ranks, transient, unwritten. One
# that is compiled only where no other shows its cause: it takes ten times as long.
EAGER_FIRST = sorted(ALL, key=lambda f: f.kind == "compiled")
ASKED = first_of_each(EAGER_FIRST, lambda f: [*f.causes, f.phase, f.kind])
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNNER = BENCHMARKS / "answers" / "run.py"
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*")


def names(failures):
    return [each.name for each in failures]


def kept_rows(result):
    """The rows of a result that is kept with the sources."""
    path = BENCHMARKS / "results" / "raw" / f"{result}.json"
    return json.loads(path.read_text())["rows"]


@pytest.mark.day
@pytest.mark.parametrize("failure", ALL, ids=names(ALL))
def test_a_truth_is_whole(failure):
    assert SOURCE.fullmatch(failure.source)
    assert failure.phase in PHASES and set(failure.causes) <= CAUSES.keys()
    assert not failure.op or all("." in op for op in failure.ops)
    has_name = failure.cause in (BAD_DATA.name, BAD_WEIGHTS.name)
    assert has_name == bool(failure.tensor) or failure.kind == "transient"


def test_the_classes_are_all_there():
    assert len(ALL) >= 60
    assert sum(each.phase == "backward" for each in ALL) >= 12
    assert sum(each.kind in ("compiled", "ranks") for each in ALL) >= 8
    assert sum(each.kind in ("transient", "unwritten") for each in ALL) >= 7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(each, marks=[] if each in FEW else pytest.mark.slow)
        for each in ALONE
    ],
    ids=names(ALONE),
)
def test_an_experiment_finds_the_truth(failure):
    assert problems(failure) == []


def test_an_answer_is_judged_by_what_it_names():
    failure = FAILURES["gates_that_sum_to_zero"]
    right = Answer("forward", "undefined", "aten.div.Tensor", "moe.router")
    assert not judge(failure, right, "ours").misleads
    near = judge(failure, Answer(module="moe"), "ours")
    assert near.module and not near.misleads
    assert judge(failure, Answer(op="aten.mul", module="head"), "ours").misleads
    assert judge(failure, Answer(cause="bad data"), "ours").misleads
    concluded = judge(failure, Answer(cause="bad data", module="moe"), "transformers")
    assert concluded.cause is None and not concluded.misleads
    assert not judge(failure, Answer(text="no alarm"), "ours").misleads


def assert_right(rows, failures, tools):
    """The guard answers each of the failures, misleads in none, and is mostly right."""
    assert {(r["failure"], r["tool"]) for r in rows} == {
        (name, tool) for name in failures for tool in tools
    }
    assert [(r["failure"], r.get("text")) for r in rows if r["misleads"]] == []
    with_loss = [row for row in rows if row["tool"] == "ours-run"]
    alone = [row for row in with_loss if FAILURES[row["failure"]].ranks == 1]
    assert sum(row["cause"] is True for row in alone) >= 0.9 * len(alone)


# What it says of a loss in `guard.run` is kept whole, of each failure: see test_golden.
@pytest.mark.slow
def test_the_guard_misleads_in_none():
    asked = ("--tools", "ours", "--json", "--only", ",".join(ASKED))
    done = python(str(RUNNER), *asked)
    assert done.returncode == 0, done.stderr
    assert_right(json.loads(done.stdout), ASKED, ["ours"])


def test_the_kept_answers_are_of_all_failures_and_mislead_in_none():
    rows = [row for row in kept_rows("answers-cpu") if row["tool"].startswith("ours")]
    assert_right(rows, FAILURES, ["ours", "ours-run"])


CURABLE = [each for each in ALL if can_be_remedied(each)]
# Each cause in each phase: the guard's remedies for them are of different kinds.
CURED = first_of_each(CURABLE, lambda f: [(c, f.phase) for c in f.causes])
remedied = functools.cache(followed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_recommended_remedies_help():
    found = {name: remedied(FAILURES[name]) for name in CURED}
    wrong = [e for all in found.values() for e in all if e.is_finite is False]
    assert wrong == []
    assert sum(map(bool, found.values())) >= 0.7 * len(CURED)


# Of an optimizer's step the guard tries settings, and no lines of code.
IN_THE_MODEL = [each for each in CURABLE if each.phase != "optimizer"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("failure", IN_THE_MODEL[::8], ids=names(IN_THE_MODEL[::8]))
def test_a_recommended_remedy_helps(failure):
    found = remedied(failure)
    assert found and not any(each.is_finite is False for each in found), found


def test_the_kept_remedies_are_of_all_failures_and_help():
    rows = {row["failure"]: row for row in kept_rows("remedies-cpu")}
    assert sorted(rows) == sorted(names(ALONE))
    assert [
        name
        for name, row in rows.items()
        if row["finite"] + row["in_words"] != row["recommended"] + row["nearest"]
    ] == []
    assert sum(row["in_words"] for row in rows.values()) <= 3
    has_one = [rows[each.name]["recommended"] > 0 for each in CURABLE]
    assert sum(has_one) >= 0.7 * len(CURABLE)
