"""How far a value is from the largest number of its dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ... import _C
from ...base.text import bits_left, rounded
from ...base.tree import entry_label
from ...base.types import TensorPath
from ..watching.watch import ModelWatch
from .roles import FORWARDS, kind_of

_CALLS = (*FORWARDS, _C.FrameKind.BACKWARD)


@dataclass(frozen=True)
class EntryHeadroom:
    """The distance of a magnitude from the largest number of its dtype.

    Attributes:
        where: The entry that has the magnitude.
        abs_max: The largest magnitude.
        limit: The largest finite number of the dtype.
        dtype: The dtype, such as "float16".
    """

    where: str
    abs_max: float
    limit: float
    dtype: str

    @property
    def bits(self) -> float:
        """The number of times that it could double: log2(limit / abs_max)."""
        return bits_left(self.limit, self.abs_max)

    @property
    def growth(self) -> str:
        """The headroom as a factor, with its bits: "111-fold (6.8 bits)"."""
        return growth_text(self.bits)


def growth_text(bits: float) -> str:
    """Writes headroom in bits as a factor, with the bits: "111-fold (6.8 bits)"."""
    return f"{rounded(2.0 ** min(bits, 1023.0))}-fold ({bits:.1f} bits)"


def headroom_of(watch: ModelWatch, peak: _C.Peak) -> EntryHeadroom:
    """Makes the headroom of a recorder's peak."""
    where = where_of(watch, peak.place)
    return EntryHeadroom(where, peak.abs_max, peak.limit, peak.dtype)


def least_headroom(watches: Sequence[ModelWatch]) -> EntryHeadroom | None:
    """Returns the least headroom of a step, or None if nothing was checked."""
    found = [(watch, watch.recorder.least_headroom()) for watch in watches]
    peaks = [(watch, peak) for watch, peak in found if peak is not None]
    nearest = max(peaks, key=lambda each: each[1].abs_max / each[1].limit, default=None)
    return None if nearest is None else headroom_of(*nearest)


def where_of(watch: ModelWatch, place: _C.Place) -> str:
    """Names the place of an entry: see `EntryHeadroom.where`."""
    path = path_of(watch, place)
    return path.of_module() if place.kind in _CALLS else path.in_words()


def path_of(watch: ModelWatch, place: _C.Place) -> TensorPath:
    """Returns the path of an entry of a watch's recorder."""
    role, label = kind_of(place.label.role), entry_label(place)
    if place.kind in _CALLS:
        return TensorPath.from_label(watch.name_at(place.module), role, label)
    if place.kind == _C.FrameKind.RECORDED:
        return TensorPath("", role, label)
    return TensorPath.from_fqn(role, label)
