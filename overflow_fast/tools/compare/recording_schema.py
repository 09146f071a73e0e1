"""The fields of a recording's lines, docs/formats.md, and of msprobe's dump.json."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from ...guard.files.fields import (
    ABSENT,
    Bounds,
    Count,
    Index,
    Number,
    Time,
    Written,
    written,
)
from .summary import WIDTH

if TYPE_CHECKING:
    from ...guard.files.schema import Lines

_MOST = 2**62  # elements; numbers beyond have no float, either
_Shape = Annotated[tuple[Count, ...], Bounds(max_length=64)]


class HeadLine(Written, kind="recording"):
    """The first line."""

    schema: int = written("the version of the format")
    time: Time = written("when it began, in seconds since 1970", 0.0)
    tensors: bool = written("whether the tensors themselves are kept", ABSENT)
    class_name: str = written("the class of the model", ABSENT, name="class")
    host: str = written("the name of the machine", ABSENT)
    pid: Count = written("the process", ABSENT)
    rank: Index = written("the rank of this process")
    world_size: Annotated[int, Bounds(ge=1, le=2**31)] = written(
        "how many ranks there are", 1
    )
    versions: dict[str, str] = written("releases of torch and others", {})


class RowLine(Written, kind="row"):
    """A tensor at its place in a step; fields that are empty are left out."""

    step: Count = written("the number of the step")
    order: Count = written("its number in the step, from 0")
    phase: str = written('`"state"`, `"forward"` or `"backward"`')
    module: str = written("the name of the module")
    class_name: str = written("its class", "")
    call: Count = written("which call of it in the step, from 0", 0)
    role: str = written("`parameter`, `input`, `output`, a gradient below, ...")
    path: str = written("where it is in that", "")
    caller: str = written("the module that called this one", "")
    is_leaf: bool = written("false for a module with others inside", True)
    dtype: str = written("its dtype")
    shape: _Shape = written("its shape; of a part, that of the whole")
    local: _Shape | None = written("the shape of this rank's part", None)
    requires_grad: bool | None = written("whether it required gradients", None)
    same: Count | None = written("`order` of the row with the same tensor", None)
    why: str = written("why it was not read", "")
    file: str = written("the file that has the tensor as `order`", "")
    part: tuple[_Shape, _Shape, _Shape] | None = written(
        "of a part of a DTensor: the whole shape, the offset, and its number among "
        "summed parts",
        None,
    )
    low: Number = written("the least value, or nan if there is none", "nan")
    high: Number = written("the greatest value", "nan")
    squares: Number = written("the sum of squares", 0.0)
    num_nan: Count = written("how many elements are nan", 0)
    num_inf: Count = written("how many are inf or -inf", 0)
    fingerprint: bytes | None = written("251 sums, in base64", None)
    magnitudes: Annotated[tuple[Count, ...], Bounds(max_length=64)] = written(
        "of a parameter's gradient: of every n-th value, at most 2,048, how many are "
        "no larger than 2^-62, 2^-60, ... 2^16, and how many there are",
        (),
    )

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


class RecordedStepLine(Written, kind="step"):
    """The end of a step: settings and random states."""

    step: Count = written("the number of the step")
    devices: list[str] = written("those of the parameters", ABSENT)
    dtypes: dict[str, Count] = written("those of the parameters, counted", ABSENT)
    autocast: dict[str, str] = written("the dtype of each device's autocast", ABSENT)
    matmul_precision: str = written("torch's setting", ABSENT)
    tf32: bool = written("torch's setting", ABSENT)
    deterministic: bool = written("torch's setting", ABSENT)
    threads: Count = written("how many torch uses", ABSENT)
    training: bool = written("whether the model trains", ABSENT)
    dropout: list[str] = written("the modules that drop out", ABSENT)
    compiled: list[str] = written("compiled modules with others inside", ABSENT)
    settings: dict[str, dict[str, str]] = written(
        "plain attributes by module and arguments by `module #call`, as Python writes "
        "them; as `the optimizer`, `the optimizer, group 2`, `the optimizer 2` the "
        "class and plain settings of the optimizers that stepped the model, and how "
        "many of its parameters that require gradients they lack; only those that "
        "changed since the last step",
        ABSENT,
    )
    random: dict[str, str] = written("a digest of each generator", ABSENT)
    had_gradients: bool = written(
        "whether parameters had gradients when the first backward began", ABSENT
    )
    has_drawn: bool = written("whether a generator was drawn from", ABSENT)
    drawn: list[str] = written("those generators", ABSENT)
    failures: list[str] = written("what could not be recorded", ABSENT)
    raised: str = written("the exception that ended the step", ABSENT)
    rows: Count = written("how many rows it has", ABSENT)


KINDS = (HeadLine, RowLine, RecordedStepLine)


def decoder() -> Lines:
    """Returns what decodes the lines of a recording; needs msgspec."""
    from ...guard.files.schema import Lines

    return Lines(*KINDS)


# Of msprobe, as far as it is read.


class Dump(Written):
    """`dump.json`: calls by their names; their arguments may nest in any way."""

    data: dict[str, dict[str, Any]] = written("calls, by their names", {})


class DumpedTensor(Written):
    """A tensor, as a call's description has it."""

    dtype: str = written("its dtype")
    shape: _Shape = written("its shape")
    data_name: str | None = written("its file", None)

    def __post_init__(self) -> None:
        """Checks that a tensor may have this shape."""
        if math.prod(self.shape) > _MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")
