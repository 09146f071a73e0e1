"""The schemas of a recording's lines, docs/formats.md, and of msprobe's dump.json."""

from __future__ import annotations

import math
from typing import Annotated, Any

from ...guard.files.schema import (
    UNSET,
    Count,
    Index,
    Lines,
    Meta,
    Number,
    Struct,
    Time,
    UnsetType,
    field,
)
from .summary import WIDTH

_MOST = 2**62  # elements; numbers beyond have no float, either
_Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class HeadLine(Struct, tag_field="kind", tag="recording"):
    """The first line."""

    schema: int
    rank: Index
    time: Time = 0.0
    world_size: Annotated[int, Meta(ge=1, le=2**31)] = 1
    versions: dict[str, str] = field(default_factory=dict)


class RowLine(Struct, tag_field="kind", tag="row"):
    """A tensor at its place in a step."""

    step: Count
    order: Count
    phase: str
    module: str
    role: str
    dtype: str
    shape: _Shape
    class_name: str = ""
    call: Count = 0
    path: str = ""
    caller: str = ""
    is_leaf: bool = True
    requires_grad: bool | None = None
    low: Number = "nan"
    high: Number = "nan"
    squares: Number = 0.0
    num_nan: Count = 0
    num_inf: Count = 0
    magnitudes: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    fingerprint: bytes | None = None
    same: Count | None = None
    why: str = ""
    file: str = ""
    part: tuple[_Shape, _Shape, _Shape] | None = None
    local: _Shape | None = None

    def __post_init__(self) -> None:
        """Checks what would send a reader elsewhere, or round in a circle."""
        if math.prod(self.shape) > _MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")
        if self.same is not None and self.same >= self.order:
            raise ValueError("a tensor cannot be the same as a later one")
        if self.file and self.file != self.file.replace("\\", "/").rpartition("/")[2]:
            raise ValueError("a file of tensors must lie beside its recording")
        print_ = self.fingerprint
        if print_ is not None and len(print_) not in (4 * WIDTH, 8 * WIDTH):
            raise ValueError(f"a fingerprint has {len(print_)} bytes")
        if self.part is not None:
            shape, offset, _ = self.part
            if math.prod(shape) > _MOST:
                raise ValueError(f"no tensor has the shape {shape}")
            local = self.shape if self.local is None else self.local
            ends = [begin + size for begin, size in zip(offset, local, strict=False)]
            is_within = all(e <= s for e, s in zip(ends, shape, strict=False))
            if not len(shape) == len(offset) == len(local) or not is_within:
                raise ValueError("a part must lie in its tensor")


class RecordedStepLine(Struct, tag_field="kind", tag="step"):
    """The end of a step: settings and random states."""

    step: Count
    devices: list[str] | UnsetType = UNSET
    dtypes: dict[str, Count] | UnsetType = UNSET
    autocast: dict[str, str] | UnsetType = UNSET
    matmul_precision: str | UnsetType = UNSET
    tf32: bool | UnsetType = UNSET
    deterministic: bool | UnsetType = UNSET
    threads: Count | UnsetType = UNSET
    training: bool | UnsetType = UNSET
    dropout: list[str] | UnsetType = UNSET
    compiled: list[str] | UnsetType = UNSET
    settings: dict[str, dict[str, str]] | UnsetType = UNSET
    random: dict[str, str] | UnsetType = UNSET
    has_drawn: bool | UnsetType = UNSET
    drawn: list[str] | UnsetType = UNSET
    had_gradients: bool | UnsetType = UNSET
    failures: list[str] | UnsetType = UNSET
    raised: str | UnsetType = UNSET
    rows: Count | UnsetType = UNSET


LINES = Lines(HeadLine, RowLine, RecordedStepLine)


# Of msprobe, as far as it is read.


class Dump(Struct):
    """`dump.json`: calls by their names; their arguments may nest in any way."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)


class DumpedTensor(Struct):
    """A tensor, as a call's description has it."""

    dtype: str
    shape: _Shape
    data_name: str | None = None

    def __post_init__(self) -> None:
        """Checks that a tensor may have this shape."""
        if math.prod(self.shape) > _MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")
