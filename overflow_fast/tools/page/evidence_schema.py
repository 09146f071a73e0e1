"""The schemas of evidence that pages show: docs/formats.md.

A field that a page does not show is left out here. Of those it shows none is required:
older reports lack some.
"""

from __future__ import annotations

from ...guard.files.schema import (
    UNSET,
    Count,
    Number,
    StepNumber,
    Struct,
    UnsetType,
    field,
)


class Marker(Struct):
    """`overflow_fast.json`."""

    step: StepNumber


class OpTensor(Struct):
    """A tensor of the operation that failed."""

    name: str = ""
    dtype: str = ""
    shape: list[Count] = field(default_factory=list)
    abs_min: Number | None = None
    abs_max: Number | None = None
    num_nan: Count | None = None
    num_inf: Count | None = None


class SavedOp(Struct):
    """The operation that failed."""

    name: str = ""
    file: str | None = None
    line: Count | None = None
    code: str = ""
    called_from: str = ""
    inputs: list[OpTensor] = field(default_factory=list)
    outputs: list[OpTensor] = field(default_factory=list)


class SavedRemedy(Struct):
    """A change that was tried on the step."""

    text: str = ""
    code: str = ""
    tried: bool = True
    why: str = ""
    is_finite: bool = False
    is_recommended: bool = True
    outcome: str = ""
    loss: Number | None = None
    file: str = ""
    line: Count = 0


class SavedExplanation(Struct):
    """`explanation.json`, or the explanation of a report."""

    cause: str | UnsetType = UNSET
    phase: str = ""
    module: str | UnsetType = UNSET
    tensor: str = ""
    op: SavedOp | None = None
    sample: Count | None = None
    num_samples: Count = 0
    dataset_index: StepNumber | None = None
    sample_outlier: str = ""
    rank: Count | None = None
    chain: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    remedies: list[SavedRemedy] = field(default_factory=list)


class SavedFirst(Struct):
    """The first bad entry of a verdict."""

    kind: str = ""
    fqn: str = ""
    class_name: str = ""
    label: str = ""


class SavedVerdict(Struct):
    """Verdict on the frames of a step."""

    first: SavedFirst | None = None
    source: str | None = None
    maker: str | None = None


class SavedReport(Struct):
    """`report.json`."""

    summary: str = ""
    sentences: list[str] | UnsetType = UNSET
    verdict: SavedVerdict | None = None
    explanation: SavedExplanation | None = None
    not_covered: list[str] | None = None
    frames: list[str] | None = None
    evidence: str | None = None
    page: str | None = None
