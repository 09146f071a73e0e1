"""The parts of a flight record: its entries and its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

# The most severe comes first.
_ACTIONS = ("raise", "skip", "warn", "spike")


@dataclass(frozen=True)
class RecordEntry:
    """A tensor that was looked at in many steps.

    Attributes:
        model: Which of the guard's models it is of.
        module: The qualified name of the module; "" for the root, or for none.
        class_name: The module's class, or "".
        kind: "output", "grad_output", "weight", "buffer", "gradient",
            "optimizer_state", or "recorded" for a loss or what `record()` was given;
            "unknown" where its line was damaged.
        label: Which tensor of the module, such as `output[0]` or `weight`.
        dtype: Its dtype, such as "float16".
        limit: The largest finite number of the dtype.
        numel: How many elements it had when it was first seen.
    """

    model: int
    module: str
    class_name: str
    kind: str
    label: str
    dtype: str
    limit: float
    numel: int


@dataclass(frozen=True)
class RecordStep:
    """A step, or several older ones that share a line.

    Attributes:
        first: The number of the first step.
        last: The number of the last one.
        count: How many watched steps these are.
        time: When the last one ended, in seconds since 1970.
        seconds: How long they took; None in a loop that calls `check()` alone.
        guard_seconds: How much of it the guard took, or None.
        learning_rate: The highest; None if it was not known.
        actions: How often the guard did "raise", "skip" or "warn", and how many finite
            steps had a "spike".
        num_skipped: How many optimizer steps were skipped, by whomever.
        loss: The largest magnitude of the loss (a stat has no sign): what
            `guard.record(loss=...)` was given, else what the model returned as its
            loss; None if there was none.
        loss_scale: The largest scale of a GradScaler, or None.
        grad_norm: The largest that `guard.record(grad_norm=...)` was given, or None.
    """

    first: int
    last: int
    count: int
    time: float
    seconds: float | None
    guard_seconds: float | None
    learning_rate: float | None
    actions: dict[str, int] = field(default_factory=dict)
    num_skipped: int = 0
    loss: float | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None

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
