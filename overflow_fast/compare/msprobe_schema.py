"""The schema of msprobe's dump.json, as far as it is read."""

from __future__ import annotations

from typing import Annotated, Any

from ..files.schema import Count, Meta, Struct, field


class Dump(Struct):
    """`dump.json`: calls by their names; their arguments may nest in any way."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)


class Facts(Struct):
    """Facts of a tensor."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    data_name: str | None = None
