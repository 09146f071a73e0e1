"""The lines of a log: docs/formats.md."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Struct, UnsetType

from ..files.fields import Count, Index, Number, StepNumber, Time, meaning


class OfRun(Struct, kw_only=True):
    """A run, in the first line of a log and of a flight record."""

    schema: Annotated[int | UnsetType, meaning("the version of the format")] = UNSET
    run: Annotated[
        str | UnsetType, meaning("the id of the run, which all its files have")
    ] = UNSET
    time: Annotated[
        Time | UnsetType, meaning("when it began, in seconds since 1970")
    ] = UNSET
    started: Annotated[str | UnsetType, meaning("the same as text, in UTC")] = UNSET
    host: Annotated[str | UnsetType, meaning("the name of the machine")] = UNSET
    pid: Annotated[Count | UnsetType, meaning("the process")] = UNSET
    script: Annotated[
        str | UnsetType, meaning("the program's file or package; empty in a console")
    ] = UNSET
    rank: Annotated[Index | UnsetType, meaning("the rank of this process")] = UNSET
    world_size: Annotated[Index | UnsetType, meaning("how many ranks there are")] = (
        UNSET
    )
    overflow_fast: Annotated[str | UnsetType, meaning("the release that wrote it")] = (
        UNSET
    )
    torch: Annotated[str | UnsetType, meaning("the release of torch")] = UNSET
    python: Annotated[str | UnsetType, meaning("that of Python")] = UNSET
    models: Annotated[
        list[str] | UnsetType, meaning("the classes of the watched models")
    ] = UNSET
    dtypes: Annotated[
        list[str] | UnsetType, meaning("the dtypes of their parameters")
    ] = UNSET
    policy: Annotated[str | UnsetType, meaning("`on_overflow`, or `callable`")] = UNSET


class RunLine(OfRun, tag_field="kind", tag="run", kw_only=True):
    """The first line in each file, and for each run."""

    run: Annotated[str, meaning("its id, which all its files have")]


class LogLine(Struct, kw_only=True):
    """The fields of any line but that of a run."""

    run: Annotated[str, meaning("the id of the run")] = ""
    time: Annotated[Time, meaning("when it was written, in seconds since 1970")] = 0.0
    step: Annotated[StepNumber, meaning("the number of the step")]


class StepLine(LogLine, tag_field="kind", tag="step", kw_only=True):
    """A step, or a request, that was judged."""

    is_clean: Annotated[bool, meaning("false if it was not finite")]
    action: Annotated[
        str | None,
        meaning('`"raise"`, `"warn"`, `"skip"`, what else skipped it, or null'),
    ] = None
    num_skipped: Annotated[
        Count, meaning("how many steps the guard has skipped so far")
    ] = 0
    num_left_out: Annotated[Count, meaning("how many were not judged so far")] = 0
    guard_share: Annotated[
        Number, meaning("the guard's share of the time of a step")
    ] = 0.0
    headroom_bits: Annotated[
        Number | None, meaning("bits left of the entry that has fewest")
    ] = None
    headroom_at: Annotated[str | None, meaning("that entry")] = None
    first: Annotated[
        str | None,
        meaning(
            "of a bad step: the first bad entry, `module: entry`; the root is "
            "`the model`"
        ),
    ] = None
    origin: Annotated[
        str | None, meaning("of a bad step: whether a module made it")
    ] = None
    source: Annotated[str | None, meaning("of a bad step: what it was read from")] = (
        None
    )
    maker: Annotated[str | None, meaning("of a bad step: what may have made it")] = None
    rank: Annotated[Index | None, meaning("of a bad step: the rank that found it")] = (
        None
    )
    host: Annotated[str | None, meaning("of a bad step: the machine of that rank")] = (
        None
    )
    device: Annotated[str | None, meaning("of a bad step: its device")] = None
    cause: Annotated[str | None, meaning("of a bad step that was explained")] = None


class SpikeLine(LogLine, tag_field="kind", tag="spike", kw_only=True):
    """A number of a finite step that is far above its last ones."""

    action: Annotated[str | None, meaning('`"skip"` or null')] = None
    what: Annotated[str, meaning('`"loss"`, `"grad_norm"` or `"largest gradient"`')]
    value: Annotated[Number, meaning("the number")]
    median: Annotated[Number, meaning("that of its last values")]
    score: Annotated[Number, meaning("robust deviations above it")]
    count: Annotated[Count, meaning("how many values it is compared with, at most 200")]


class NoticeLine(LogLine, tag_field="kind", tag="notice", kw_only=True):
    """A clause of a monitor of your own about a finite step."""

    action: Annotated[str | None, meaning('`"skip"` or null')] = None
    monitor: Annotated[str, meaning("its class")] = ""
    text: Annotated[str, meaning("the clause")] = ""


KINDS = (RunLine, StepLine, SpikeLine, NoticeLine)
