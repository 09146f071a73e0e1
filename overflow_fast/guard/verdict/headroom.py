"""The headroom of values over the steps: warnings of what runs out of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ... import _C
from ...base.text import as_lines, bits_left
from ..config import GuardConfig
from ..monitors.magnitudes import Headroom, Saturation, Underflow
from ..watching.watch import ModelWatch
from .entry_headroom import headroom_of, where_of
from .headroom_table import HeadroomHistory, HeadroomTable, UnderflowCounts
from .roles import GRADIENTS
from .saturation import SaturationWatch

_log = logging.getLogger("overflow_fast")
_FEW_NAMES = 3  # entries in a warning; chosen
# The kinds of the totals.
_TOTALS = {
    _C.Role.GRADIENT: "gradient",
    _C.Role.GRAD_OUTPUT: "gradient",
    _C.Role.OUTPUT: "activation",
}
_WIDER = (
    "What to try: bfloat16 or float32 (`overflow_fast.keep_in_fp32`), which hold "
    "magnitudes up to 3.4e38."
)


class HeadroomTracker:
    """Warns of values that run out of headroom, and counts underflow when it is due.

    Args:
        config: The guard's, whose monitors `Headroom`, `Underflow` and `Saturation` say
            what is asked for.
        watches: The watched models.
    """

    def __init__(self, config: GuardConfig, watches: Sequence[ModelWatch]) -> None:
        headroom, underflow = config.monitor(Headroom), config.monitor(Underflow)
        saturation = config.monitor(Saturation)
        bits = None if headroom is None else headroom.bits
        self._watches = watches
        self._or_before = " or the one before" if config.verdicts_are_late else ""
        self._every = None if underflow is None else underflow.every
        self._bits = bits
        self._warned: dict[str, float] = {}
        share = None if saturation is None else saturation.share
        self._saturation = SaturationWatch(share)
        self._counted: dict[str, UnderflowCounts] = {}
        self._totals: dict[str, UnderflowCounts] = {}
        self._least = math.inf
        self._num_watched = 0
        if bits is not None:
            for watch in watches:
                watch.recorder.set_low_headroom(bits)
        self._request_counts()

    def _request_counts(self) -> None:
        """Makes the next watched step count underflow, if it is due."""
        if self._every is not None:
            is_due = self._num_watched % self._every == 0
            for watch in self._watches:
                watch.recorder.counts_underflow = is_due

    def end_step(self, step: int, has_scaler: bool, is_bad: bool) -> None:
        """Reads the counts of a step, warns, and begins the next.

        Incurs a CPU-GPU sync if something was counted.

        Args:
            step: The step's number.
            has_scaler: True if gradients are scaled up to the end of their dtype.
            is_bad: True if there is a report of the step already.
        """
        peaks = (watch.recorder.least_headroom() for watch in self._watches)
        bits = (bits_left(peak.limit, peak.abs_max) for peak in peaks if peak)
        self._least = min(bits, default=math.inf)
        if any(watch.recorder.is_headroom_spent for watch in self._watches):
            self._least = 0.0
        if any(watch.recorder.has_counts for watch in self._watches):
            self._take_counts(step, has_scaler)
        self._num_watched += 1
        self._request_counts()
        if self._bits is not None and not is_bad:
            self._warn(step, self._short(has_scaler))
        for watch in self._watches:
            watch.recorder.begin_headroom()

    def _take_counts(self, step: int, has_scaler: bool) -> None:
        totals = dict.fromkeys(_TOTALS.values(), UnderflowCounts(0, 0, 0))
        saturated: list[tuple[str, _C.Underflow]] = []
        is_due = any(watch.recorder.counts_underflow for watch in self._watches)
        for watch in self._watches:
            for each in watch.recorder.take_underflow():
                counts = UnderflowCounts(each.numel, each.num_zero, each.num_subnormal)
                where = where_of(watch, each.place)
                if is_due:
                    self._counted[where] = counts
                kind = _TOTALS.get(each.place.label.role)
                if kind is not None:
                    totals[kind] += counts
                is_scaled = has_scaler and each.place.kind in GRADIENTS
                if each.num_limit and not is_scaled:
                    saturated.append((where, each))
        self._saturation.note(step, saturated)
        if is_due:
            self._totals = totals

    def table(self) -> HeadroomTable:
        """The headroom of every entry."""
        rows = [
            self._row(watch, history)
            for watch in self._watches
            for history in watch.recorder.headroom()
        ]
        return HeadroomTable(sorted(rows, key=lambda row: (row.bits, row.where)))

    def metrics(self) -> dict[str, float]:
        """The least headroom of the last step, and the shares that underflowed."""
        values = {} if math.isinf(self._least) else {"headroom_bits": self._least}
        for kind, counts in self._totals.items():
            if counts.numel:
                values[f"{kind}_zeros"] = counts.zeros / counts.numel
                values[f"{kind}_subnormals"] = counts.subnormals / counts.numel
        return values

    def _row(self, watch: ModelWatch, found: _C.HeadroomHistory) -> HeadroomHistory:
        last = headroom_of(watch, found.last)
        counted = self._counted.get(last.where)
        return HeadroomHistory(
            **vars(last), highest=found.highest, recent=found.recent, underflow=counted
        )

    def _short(self, has_scaler: bool) -> list[HeadroomHistory]:
        """Lists what is short of room, unless warned of and not halved since."""
        short: dict[tuple[float, str], HeadroomHistory] = {}
        for watch in self._watches:
            for history in watch.recorder.low_headroom():
                if has_scaler and history.last.place.kind in GRADIENTS:
                    continue
                row = self._row(watch, history)
                if row.bits <= self._warned.get(row.where, math.inf) / 2:
                    self._warned[row.where] = row.bits
                    # A module may return what one within it returned, before it.
                    short.setdefault((row.abs_max, row.dtype), row)
        return sorted(short.values(), key=lambda row: row.bits)

    def _warn(self, step: int, short: Sequence[HeadroomHistory]) -> None:
        if not short:
            return
        more = len(short) - _FEW_NAMES
        sentences = [
            f"Step {step}{self._or_before} is finite, but close to an overflow:",
            *(f"{_short_text(row)}." for row in short[:_FEW_NAMES]),
            *([f"{more} more: see `guard.headroom()`."] if more > 0 else []),
            *([_WIDER] if any(row.dtype == "float16" for row in short) else []),
        ]
        _log.warning("%s", as_lines(sentences))


def _short_text(row: HeadroomHistory) -> str:
    text = (
        f"{row.where} could grow {row.growth} before {row.dtype} overflows (its "
        f"largest magnitude is {row.abs_max:.3g}, {row.dtype}'s maximum is "
        f"{row.limit:.5g})"
    )
    if math.isinf(row.steps_left):
        return text
    return (
        f"{text}, {row.trend:.2f} bits fewer with each of the last {len(row.recent)} "
        f"steps: it would overflow in about {math.ceil(row.steps_left)}"
    )
