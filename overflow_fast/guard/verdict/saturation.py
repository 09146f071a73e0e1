"""Values at the largest number of their dtype: overflows that leave no inf."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...scanner.text import as_lines

_log = logging.getLogger("overflow_fast")
_LEAST = 16  # values: scaled formats put their largest value there on purpose
_MORE = 2.0  # times the share that was warned of; chosen, not measured
_FEW = 3


@dataclass(frozen=True)
class SaturatedEntry:
    """The values of an entry that equal the largest number of its dtype.

    Attributes:
        where: The entry.
        dtype: Its dtype, such as "float8_e4m3fn".
        limit: The largest number of the dtype.
        numel: The number of its values.
        num_limit: The number of those of that magnitude.
        num_positive: The number of those of them that are positive.
    """

    where: str
    dtype: str
    limit: float
    numel: int
    num_limit: int
    num_positive: int

    @property
    def share(self) -> float:
        """The share of the values at the end of the dtype."""
        return self.num_limit / self.numel

    @property
    def may_be_mask(self) -> bool:
        """True if all are negative in float16: a mask is filled with that number."""
        return self.dtype == "float16" and self.num_positive == 0


class SaturationWatch:
    """Warns of entries that saturate, once each, and again when the share doubles.

    Args:
        share: The share of an entry's values from which on it warns; None for never.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._warned: dict[str, float] = {}
        self.largest = 0.0

    def note(self, step: int, found: list[SaturatedEntry]) -> None:
        """Reads the counts of a step, and warns.

        Args:
            step: The step's number.
            found: The entries whose values were counted.
        """
        self.largest = max((each.share for each in found), default=0.0)
        new = [each for each in found if self._is_news(each)]
        for each in new:
            self._warned[each.where] = each.share
        if not new:
            return
        more = len(new) - _FEW
        _log.warning(
            "%s",
            as_lines(
                [
                    f"Step {step} is finite, but casts may have cut values off:",
                    *(_text(each) for each in new[:_FEW]),
                    *([f"{more} more entries."] if more > 0 else []),
                    "Casts to float8, and devices in saturation mode, give the largest "
                    "number in place of inf.",
                ]
            ),
        )

    def _is_news(self, found: SaturatedEntry) -> bool:
        is_much = self._share is not None and found.share >= self._share
        is_news = found.share >= _MORE * self._warned.get(found.where, 0.0)
        is_few = found.num_limit < _LEAST
        return is_much and is_news and not is_few and not found.may_be_mask


def _text(found: SaturatedEntry) -> str:
    return (
        f"{found.share:.1%} of the {found.numel} values of {found.where} are "
        f"{found.limit:g}, the largest number of {found.dtype}."
    )
