"""Rows of a recording: what was known of one tensor at one place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .places_of import Place
from .shards import Part
from .summary import Summary

if TYPE_CHECKING:
    from .recording_schema import RowLine

SCHEMA = 1  # of recordings


@dataclass
class Row:
    """A tensor at its place in a step.

    Attributes:
        place: Where it was.
        order: Its number in the step, from 0.
        dtype: Its dtype, such as "bfloat16".
        shape: Its shape; of a part that ranks share, that of the whole.
        summary: Its numbers; None if it has those of `same`, or was not read.
        same: The order of an earlier row with the same tensor, or None.
        part: Its place in a tensor that ranks share, or None.
        why: Why there are no numbers, or "".
        file: The file that has the tensor, or "".
        local: The shape of this rank's part.
    """

    place: Place
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Summary | None = None
    same: int | None = None
    part: Part | None = None
    why: str = ""
    file: str = ""
    local: tuple[int, ...] = ()

    @property
    def local_numel(self) -> int:
        """How many elements this rank's part has."""
        return math.prod(self.local)

    def to_plain(self) -> dict[str, Any]:
        """The row as JSON, without what is empty."""
        plain: dict[str, Any] = {"order": self.order, **dataclasses.asdict(self.place)}
        plain |= {"dtype": self.dtype, "shape": list(self.shape)}
        plain["local"] = None if self.part is None else list(self.local)
        plain |= {"same": self.same, "why": self.why, "file": self.file}
        plain["part"] = None if self.part is None else self.part.to_plain()
        if self.summary is not None:
            plain |= self.summary.to_plain()
        empty = (None, "")
        return {k: v for k, v in plain.items() if k == "module" or v not in empty}

    @classmethod
    def of_line(cls, line: RowLine) -> Row:
        """Makes one of a line of a recording."""
        names = [field.name for field in dataclasses.fields(Place)]
        return cls(
            Place(**{name: getattr(line, name) for name in names}),
            line.order,
            line.dtype,
            line.shape,
            None if line.fingerprint is None else Summary.of_line(line),
            line.same,
            None if line.part is None else Part(*line.part),
            line.why,
            line.file,
            line.shape if line.local is None else line.local,
        )
