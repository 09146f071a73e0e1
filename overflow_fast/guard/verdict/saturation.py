"""Values at the largest number of their dtype: overflows that leave no inf."""

from __future__ import annotations

import logging

import torch

from ... import _C
from ...base.text import as_lines

_log = logging.getLogger("overflow_fast")
# Values: scaled formats put their largest value there on purpose. With a larger number
# small tensors that are cut off go unseen.
_LEAST = 16
# Times the share that was warned of; chosen. A smaller factor repeats warnings.
_MORE = 2.0
_FEW = 3  # entries in a warning; chosen


class SaturationWatch:
    """Warns of entries that saturate, once each, and again when the share doubles.

    Args:
        share: The share of an entry's values from which on it warns; None for never.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._warned: dict[str, float] = {}

    def note(self, step: int, found: list[tuple[str, _C.Underflow]]) -> None:
        """Reads the counts of a step, and warns.

        Args:
            step: The step's number.
            found: The entries whose values were counted, by where they are.
        """
        new = [each for each in found if self._is_news(*each)]
        for where, counts in new:
            self._warned[where] = _share(counts)
        if not new:
            return
        more = len(new) - _FEW
        _log.warning(
            "%s",
            as_lines(
                [
                    f"Step {step} is finite, but casts may have cut values off:",
                    *(_text(*each) for each in new[:_FEW]),
                    *([f"{more} more entries."] if more > 0 else []),
                    "Casts to float8, and devices in saturation mode, give the largest "
                    "number in place of inf.",
                ]
            ),
        )

    def _is_news(self, where: str, counts: _C.Underflow) -> bool:
        share = _share(counts)
        is_much = self._share is not None and share >= self._share
        is_news = share >= _MORE * self._warned.get(where, 0.0)
        # A mask in float16 is filled with its lowest number.
        may_be_mask = counts.dtype == "float16" and counts.num_positive == 0
        return is_much and is_news and counts.num_limit >= _LEAST and not may_be_mask


def _share(counts: _C.Underflow) -> float:
    """The share of the values at the largest number of their dtype."""
    return counts.num_limit / counts.numel


def _text(where: str, counts: _C.Underflow) -> str:
    limit = torch.finfo(getattr(torch, counts.dtype)).max
    return (
        f"{_share(counts):.1%} of the {counts.numel} values of {where} are "
        f"{limit:g}, the largest number of {counts.dtype}."
    )
