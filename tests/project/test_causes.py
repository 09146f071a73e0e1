"""The page of causes is what its generator writes, and what the guard says today."""

import importlib.util
import json
import re

import pytest
import torch
from answers.families import FAILURES
from pages import ROOT

from overflow_fast.explainer.remedies import attempts
from overflow_fast.guard.report.causes import CAUSES, RANGE_OVERFLOW, Cause
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.op import Op, TensorSummary
from overflow_fast.guard.report.report import Report
from overflow_fast.guard.verdict.verdict import BadEntry, Verdict
from overflow_fast.tools.page.incidents import Incident

pytestmark = pytest.mark.day  # a contract: all of its cases


def tool(name):
    """A script of docs/tools."""
    path = ROOT / f"docs/tools/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


causes, tables = tool("causes"), tool("tables")

TEXT = causes.PAGE.read_text()
SHOWN = causes.shown(TEXT)


def test_every_failure_has_a_reason_and_a_place():
    shown = {each.causes[0] for each in FAILURES.values()}
    assert shown <= {each.name for each in causes.with_help()}
    assert SHOWN.keys() == FAILURES.keys()
    for each in FAILURES.values():
        assert len(re.split(r"\.\s+", each.build.__doc__.strip())) >= 2, each.name


def test_the_page_is_what_its_generator_writes():
    assert causes.page(causes.said()) == TEXT, "run python docs/tools/causes.py"


# A cause is one row of one table.


@pytest.fixture
def invented(monkeypatch):
    """A cause that is added to the table, and to nothing else."""
    cause = Cause(
        "cosmic ray",
        meaning="a bit of memory was flipped",
        help="Use memory that corrects errors.",
        sections=("It does not happen again",),
        remedies=("samples",),
        is_overflow=True,
        names_maker=False,
        translations={"zh": "宇宙射线", "ko": "우주선"},
    )
    monkeypatch.setitem(CAUSES, cause.name, cause)
    return cause


def report_with(cause):
    made = TensorSummary((2,), 1.0, 2.0, dtype="float16", numel=2, num_inf=1)
    found = Explanation("forward", cause.name, "fc", Op("aten.mm", outputs=[made]))
    first = BadEntry(
        *("output", "fc", "Linear", "output"),
        **{"dtype": "float16", "numel": 2, "num_inf": 1, "signs": "-"},
    )
    return Report(3, "skip", Verdict(first=first), explanation=found)


def test_an_invented_cause_is_in_the_report_and_its_json(invented, as_kept):
    report = report_with(invented)
    as_kept(report.explanation)
    assert report.explanation.is_overflow and not report.explanation.names_maker
    as_json = json.loads(report.to_json())
    assert as_json["explanation"]["cause"] == "cosmic ray"


def test_an_invented_cause_is_on_the_page(invented):
    vague, known = (
        Incident.of(report_with(each)) for each in (invented, RANGE_OVERFLOW)
    )
    assert known.headline.startswith("Cause: range overflow")
    assert not vague.headline.startswith("Cause")


def test_an_invented_cause_is_in_the_tables_of_each_language(invented):
    for language in ("zh", "ko"):
        assert (
            invented.translations[language] in tables.TABLES[f"sections {language}"]()
        )
    assert invented.sections[0] in tables.TABLES["sections"]().splitlines()[-1]
    row = f"| `cosmic ray (float16)` | {invented.meaning} |"
    assert row in tables.TABLES["causes"]()
    assert f"## Cosmic ray\n\n{invented.help}" in causes.page(SHOWN)


def test_an_invented_cause_has_its_remedies(invented):
    class Failure:
        found = Explanation(cause=invented.name)
        op = object()  # an operation made the value
        half = torch.float16

    makes = [makes for applies, makes in attempts._ATTEMPTS if applies(Failure())]
    assert makes[0] is attempts.select_trials
    assert attempts.wider_trials in makes
