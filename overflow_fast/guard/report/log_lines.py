"""The lines of a log: docs/formats.md."""

from __future__ import annotations

from ..files.fields import ABSENT, Count, Index, Number, StepNumber, Time, Written
from ..files.fields import written as field


class OfRun(Written):
    """A run, in the first line of a log and of a flight record."""

    schema: int = field("the version of the format", ABSENT)
    run: str = field("the id of the run, which all its files have", ABSENT)
    time: Time = field("when it began, in seconds since 1970", ABSENT)
    started: str = field("the same as text, in UTC", ABSENT)
    host: str = field("the name of the machine", ABSENT)
    pid: Count = field("the process", ABSENT)
    script: str = field("the program's file or package; empty in a console", ABSENT)
    rank: Index = field("the rank of this process", ABSENT)
    world_size: Index = field("how many ranks there are", ABSENT)
    overflow_fast: str = field("the release that wrote it", ABSENT)
    torch: str = field("the release of torch", ABSENT)
    python: str = field("that of Python", ABSENT)
    models: list[str] = field("the classes of the watched models", ABSENT)
    dtypes: list[str] = field("the dtypes of their parameters", ABSENT)
    policy: str = field("`on_overflow`, or `callable`", ABSENT)


class RunLine(OfRun, kind="run"):
    """The first line in each file, and for each run."""

    run: str = field("its id, which all its files have")


class LogLine(Written):
    """The fields of any line but that of a run."""

    run: str = field("the id of the run", "")
    time: Time = field("when it was written, in seconds since 1970", 0.0)
    step: StepNumber = field("the number of the step")


class StepLine(LogLine, kind="step"):
    """A step that was judged."""

    is_clean: bool = field("false if it was not finite")
    action: str | None = field(
        '`"raise"`, `"warn"`, `"skip"`, what else skipped it, or null', None
    )
    num_skipped: Count = field("how many steps the guard has skipped so far", 0)
    num_left_out: Count = field("how many were not judged so far", 0)
    guard_share: Number = field("the guard's share of the time of a step", 0.0)
    headroom_bits: Number | None = field("bits left of the entry that has fewest", None)
    headroom_at: str | None = field("that entry", None)
    first: str | None = field(
        "of a bad step: the first bad entry, `module: entry`; the root is `the model`",
        None,
    )
    origin: str | None = field("of a bad step: whether a module made it", None)
    source: str | None = field("of a bad step: what it was read from", None)
    maker: str | None = field("of a bad step: what may have made it", None)
    rank: Index | None = field("of a bad step: the rank that found it", None)
    host: str | None = field("of a bad step: the machine of that rank", None)
    device: str | None = field("of a bad step: its device", None)
    cause: str | None = field("of a bad step that was explained", None)


class SpikeLine(LogLine, kind="spike"):
    """A number of a finite step that is far above its last ones."""

    action: str | None = field('`"skip"` or null', None)
    what: str = field('`"loss"`, `"grad_norm"` or `"largest gradient"`')
    value: Number = field("the number")
    median: Number = field("that of its last values")
    score: Number = field("robust deviations above it")
    count: Count = field("how many values it is compared with, at most 200")


class NoticeLine(LogLine, kind="notice"):
    """A clause of a monitor of your own about a finite step."""

    action: str | None = field('`"skip"` or null', None)
    monitor: str = field("its class", "")
    text: str = field("the clause", "")


KINDS = (RunLine, StepLine, SpikeLine, NoticeLine)
