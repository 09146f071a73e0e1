"""The advice of a precision run, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...base.modules import is_within
from ...base.text import as_lines, counted, either, printable, some
from .layer_judge import power_text
from .layers import DTYPES, Layer

_MOST_ROWS = 8  # of a table in a terminal; chosen
_MOST_NAMES = 4  # in a cell of it; chosen


@dataclass(frozen=True)
class PrecisionCheck:
    """A run of the whole model in half precision, against the float32 run.

    Attributes:
        dtype: Autocast's dtype: "float16" or "bfloat16".
        kept: The names that `keep_in_fp32` kept in float32.
        loss_scale: The loss scale of the run; 1.0 for bfloat16.
        failure: Why it did not pass, or ''.
        finite: Whether loss and gradients (outputs, without a loss) were finite.
        loss: The mean loss over the batches, or None.
        loss_difference: The relative difference of the losses to those in float32; of
            the outputs in L2, where there is no loss; None if the run raised.
        gradient_difference: The relative L2 difference of the gradients, or None.
        widened: The names that were added because a run before this one failed.
        runs: How many runs this took.
    """

    dtype: str
    kept: list[str]
    loss_scale: float
    failure: str = ""
    finite: bool = False
    loss: float | None = None
    loss_difference: float | None = None
    gradient_difference: float | None = None
    widened: list[str] = field(default_factory=list)
    runs: int = 1

    @property
    def passed(self) -> bool:
        """True if it was finite and within the thresholds."""
        return not self.failure


@dataclass(frozen=True)
class PrecisionAdvice:
    """Which modules can run in which dtype; printed, it is a page of text.

    Attributes:
        rows: One `Layer` for each, in the order in which they first returned.
        float32: The names of all layers that are in neither of the next two.
        bfloat16: The names that may run in bfloat16; empty if its check has not passed.
        float16: The names that may run in float16; empty if its check has not passed.
        dtype: The dtype of the passed check that keeps the fewest modules (bfloat16,
            which needs no loss scale, where both keep as many); "float32" if none has
            passed.
        code: The line that keeps modules in float32 under autocast to `dtype`; '' if
            none has to be kept, or no check has passed.
        codes: The same by dtype, for each check that has passed.
        checks: The last check with each list.
        loss: The mean loss in float32, or None.
        loss_scale: The power of two for float16's gradients that the check used, or
            the one that was derived from the gradients; None without gradients.
        not_seen: The layers that the batches did not call: nothing is known of them.
        notes: What else to know, in sentences.
    """

    rows: list[Layer]
    float32: list[str]
    bfloat16: list[str]
    float16: list[str]
    dtype: str
    code: str
    codes: dict[str, str]
    checks: list[PrecisionCheck]
    loss: float | None
    loss_scale: float | None
    not_seen: list[str]
    notes: list[str]

    def __str__(self) -> str:
        """The verdict, the checks and the worst layers, in about 24 lines."""
        sentences = [self._verdict(), *map(self._check_text, self.checks)]
        if self.not_seen:
            sentences.append(f"Not seen in these batches: {_few(self.not_seen)}.")
        lines = as_lines([*sentences, *self.notes]).splitlines()
        return "\n".join([*lines, *self._table()])

    def _verdict(self) -> str:
        count = counted(len(self.rows), "layer")
        if self.dtype == "float32":
            return f"Stay in float32: no check has passed ({count} looked at)."
        if not self.code:
            return f"Use autocast to {self.dtype}: all {count} may run in it."
        return f"Use autocast to {self.dtype} with: `{self.code}`"

    def _check_text(self, check: PrecisionCheck) -> str:
        parts = [f"{check.dtype}: {'passed' if check.passed else 'failed'}"]
        if check.failure:
            parts.append(f" ({check.failure})")
        parts.append(f"; {len(check.kept)} of {len(self.rows)} layers in float32")
        what = "outputs differ" if check.loss is None else "loss differs"
        if check.finite and check.loss_difference is not None:
            parts.append(f"; {what} by {check.loss_difference:.2%}")
            if check.gradient_difference is not None:
                parts.append(f", gradients by {check.gradient_difference:.2%}")
        if check.loss_scale != 1.0:
            parts.append(f"; loss scale {power_text(check.loss_scale)}")
        if check.widened:
            parts.append(f"; added after a failed run: {_few(check.widened)}")
        return "".join(parts) + "."

    def _table(self) -> list[str]:
        worst = sorted(self.rows, key=_badness)[:_MOST_ROWS]
        lines = [
            "  float16  error, in multiples of rounding's",
            "bits left  float16 bfloat16  layer",
        ]
        for row in worst:
            ratios = " ".join(f"{_ratio_text(row, name):>8}" for name in DTYPES)
            lines.append(f"{row.bits['float16']:9.1f} {ratios}  {_layer_text(row)}")
        if len(self.rows) > len(worst):
            lines.append(f"... and {len(self.rows) - len(worst)} more in .rows")
        return lines


def _badness(row: Layer) -> tuple[int, float]:
    """Sorts what can run nowhere first, then by float16's error."""
    return len(row.runs_in), -row.ratios.get("float16", 0.0)


def _ratio_text(row: Layer, name: str) -> str:
    ratio = row.ratios.get(name)
    if ratio is None:
        return "-"
    return f"{ratio:.1f}" if ratio < 1e5 else "inf" if math.isinf(ratio) else ">1e5"


def _layer_text(row: Layer) -> str:
    name = row.name or "the model"
    reason = next((f": {why}" for why in row.reasons.values()), "")
    where = f" not {either(list(row.reasons))}" if row.reasons else ""
    return printable(f"{name} ({row.class_name}){where}{reason}")


def _few(names: list[str]) -> str:
    return some((name or "the model" for name in names), _MOST_NAMES)


def is_kept(name: str, kept: Iterable[str]) -> bool:
    """True if a module is one of a list, or within one."""
    return any(name == each or is_within(name, each) for each in kept)
