"""The schema of msprobe's dump.json, as far as it is read."""

from __future__ import annotations

import math
from typing import Annotated, Any

from ..files.schema import Count, Meta, Struct, field

_MOST = 2**62  # elements; numbers beyond have no float, either


class Dump(Struct):
    """`dump.json`: calls by their names; their arguments may nest in any way."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)


class DumpedTensor(Struct):
    """A tensor, as a call's description has it."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    data_name: str | None = None

    def __post_init__(self) -> None:
        """Checks that a tensor may have this shape."""
        if math.prod(self.shape) > _MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")
