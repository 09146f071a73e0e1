"""A step of a flight record: its numbers, and how those of several become one.

What is declared here of a number is all that reading, folding, pages and `read_record`
need; its value is set in `written_lines.step_line()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from ..files.fields import (
    Count,
    Number,
    Seconds,
    StepNumber,
    Time,
    documented,
    fields_of,
    meaning,
    said_of,
)
from ..files.json_text import to_plain


def _oldest(values: Sequence[Any]) -> Any:
    return values[0]


def _newest(values: Sequence[Any]) -> Any:
    return values[-1]


def _sum(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _most(values: Sequence[Any]) -> Any:
    known = [float(value) for value in values if value is not None]
    return to_plain(max(known, default=None))


def _sums(values: Sequence[Any]) -> Any:
    found: dict[str, int] = {}
    for each in values:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def _of_step(text: str, folded: Callable[[Sequence[Any]], Any], **more: Any) -> Meta:
    """Describes a field of a step's line; see `meaning()`.

    Args:
        text: What it is.
        folded: Makes the value of a line out of those of several, the oldest first.
        **more: `drawn`: the words of a sparkline of pages, if it has them.
            `since`: see `meaning()`.
    """
    return meaning(text, folded=folded, **more)


class OfSteps(Struct, kw_only=True):
    """The numbers of a step in its line, or of several older ones that share one."""

    first: Annotated[StepNumber, _of_step("the number of the first step", _oldest)]
    last: Annotated[StepNumber, _of_step("the number of the last one", _newest)]
    count: Annotated[Count, _of_step("how many watched steps these are", _sum)]
    time: Annotated[
        Time, _of_step("when the last one ended, in seconds since 1970", _newest)
    ]
    seconds: Annotated[
        Seconds | None,
        _of_step("how long they took; None in a loop that calls `check()` alone", _sum),
    ] = None
    guard_seconds: Annotated[
        Seconds | None, _of_step("how much of it the guard took, or None", _sum)
    ] = None
    learning_rate: Annotated[
        Number | None,
        _of_step(
            "the highest of the first group; None if it is not known, or on a device",
            _most,
            drawn="learning rate",
        ),
    ] = None
    actions: Annotated[
        dict[str, Count],
        _of_step(
            'how often the guard did "raise", "skip" or "warn", and how many finite '
            'steps had a "spike"',
            _sums,
        ),
    ] = {}
    num_skipped: Annotated[
        Count, _of_step("how many optimizer steps were skipped, by whomever", _sum)
    ] = field(name="skipped", default=0)


def folded_numbers(lines: Sequence[OfSteps]) -> dict[str, Any]:
    """The numbers of a line that stands for several, the oldest first."""
    return {
        name: said_of(each, "folded")([getattr(line, name) for line in lines])
        for name, each in fields_of(OfSteps).items()
    }


# The most severe comes first.
_ACTIONS = ("raise", "skip", "warn", "spike")


@documented
class RecordStep(OfSteps, kw_only=True):
    """A step, or several older ones that share a line."""

    loss: Annotated[
        float | None,
        meaning(
            "the largest magnitude of the loss (a stat has no sign): what "
            "`guard.record(loss=...)` was given, else what the model returned as its "
            "loss; None if there was none",
            drawn="loss",
        ),
    ] = None
    loss_scale: Annotated[
        float | None,
        meaning("the largest scale of a GradScaler, or None", drawn="loss scale"),
    ] = None
    grad_norm: Annotated[
        float | None,
        meaning(
            "the largest that `guard.record(grad_norm=...)` was given, or None",
            drawn="gradient norm",
        ),
    ] = None

    @property
    def action(self) -> str | None:
        """The most severe of the actions, or None."""
        return next((each for each in _ACTIONS if each in self.actions), None)

    @property
    def guard_share(self) -> float | None:
        """The guard's share of the time, or None if that was not measured."""
        if not self.seconds or self.guard_seconds is None:
            return None
        return self.guard_seconds / self.seconds
