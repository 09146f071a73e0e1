"""The schema of a log's lines: docs/formats.md."""

from __future__ import annotations

from ..files.schema import Count, Index, Lines, Number, StepNumber, Struct, Time, field


class LogLine(Struct, kw_only=True):
    """The fields of a line of any kind."""

    run: str = ""
    time: Time = 0.0
    rank: Index | None = None
    step: StepNumber | None = None
    action: str | None = None
    is_clean: bool | None = None
    host: str | None = None


class RunLine(LogLine, tag_field="kind", tag="run", kw_only=True):
    """The first line of a run."""

    run: str
    models: list[str] = field(default_factory=list)
    policy: str = "unknown"


class StepLine(LogLine, tag_field="kind", tag="step", kw_only=True):
    """A step that was judged."""

    step: StepNumber
    is_clean: bool
    num_skipped: Count = 0
    headroom_bits: Number | None = None
    headroom_at: str | None = None
    first: str | None = None
    device: str | None = None
    cause: str | None = None


class SpikeLine(LogLine, tag_field="kind", tag="spike", kw_only=True):
    """A number of a finite step that is far above its last ones."""

    step: StepNumber
    what: str
    value: Number
    median: Number
    score: Number
    count: Count


class OtherLine(LogLine, kw_only=True):
    """A line of a kind that this version does not know."""

    kind: str


LINES = Lines(RunLine, StepLine, SpikeLine, other=OtherLine)
