"""The fields of evidence's files, docs/formats.md.

A report is written as its dataclasses are, so they declare most; here is what
`to_dict()` adds, or writes in another way.
"""

from __future__ import annotations

from typing import Any

from ...guard.files.fields import ABSENT, StepNumber, Written, written
from ...guard.files.schema import written_as
from ...guard.report.explanation import Explanation
from ...guard.report.remedy import Remedy
from ...guard.report.report import Report
from ...guard.verdict.verdict import BadEntry, Verdict


class Marker(Written, kind="evidence"):
    """`overflow_fast.json`: the folder is of a bad step."""

    schema: int = written("the version of the format", ABSENT)
    run: str = written("the id of the run", ABSENT)
    step: StepNumber = written("the number of the step")


class _First(Written, of=written_as(BadEntry)):
    place: str = written("the name of its module, or of the tensor", ABSENT)


class _Remedy(Written, of=written_as(Remedy)):
    outcome: str = written("what became of the step with it, in words", "")
    is_recommended: bool = written("whether it helps, and breaks nothing", True)


_VERDICT = written_as(Verdict, BadEntry=_First)
_EXPLANATION = written_as(Explanation, Remedy=_Remedy, Sample=int)


class SavedExplanation(Written, kind="explanation", of=_EXPLANATION):
    """`explanation.json`, and the explanation of a report."""

    schema: int = written("the version of the format", ABSENT)
    dataset_index: StepNumber | None = written("of `sample`: that in the dataset", None)
    sample_outlier: str = written(
        "of `sample`: how much larger its values are than the others', in words", ""
    )


_REPORT = written_as(Report, Verdict=_VERDICT, Explanation=SavedExplanation)


class SavedReport(Written, kind="report", of=_REPORT):
    """`report.json`."""

    schema: int = written("the version of the format", ABSENT)
    summary: str = written("its text without the frames", "")
    sentences: list[str] = written(
        "its sentences, without the explanation and the cost", ABSENT
    )


KINDS: tuple[Any, ...] = (Marker, SavedReport, SavedExplanation)
