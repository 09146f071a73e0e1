"""The fields of a recording's lines: docs/formats.md."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ...guard.files.fields import Count, Index, Number, Time, meaning
from ...guard.files.schema import Lines
from .summary import WIDTH

MOST = 2**62  # elements; numbers beyond have no float, either
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class HeadLine(Struct, tag_field="kind", tag="recording", kw_only=True):
    """The first line."""

    schema: Annotated[int, meaning("the version of the format")]
    time: Annotated[Time, meaning("when it began, in seconds since 1970")] = 0.0
    tensors: Annotated[
        bool | UnsetType, meaning("whether the tensors themselves are kept")
    ] = UNSET
    class_name: Annotated[str | UnsetType, meaning("the class of the model")] = field(
        name="class", default=UNSET
    )
    host: Annotated[str | UnsetType, meaning("the name of the machine")] = UNSET
    pid: Annotated[Count | UnsetType, meaning("the process")] = UNSET
    rank: Annotated[Index, meaning("the rank of this process")]
    world_size: Annotated[
        int, Meta(ge=1, le=2**31), meaning("how many ranks there are")
    ] = 1
    versions: Annotated[dict[str, str], meaning("releases of torch and others")] = {}


class RowLine(Struct, tag_field="kind", tag="row", kw_only=True, omit_defaults=True):
    """A tensor at its place in a step; fields that have their default are left out."""

    step: Annotated[Count, meaning("the number of the step")]
    order: Annotated[Count, meaning("its number in the step, from 0")]
    phase: Annotated[str, meaning('`"state"`, `"forward"` or `"backward"`')]
    module: Annotated[str, meaning("the name of the module")]
    class_name: Annotated[str, meaning("its class")] = ""
    call: Annotated[Count, meaning("which call of it in the step, from 0")] = 0
    role: Annotated[
        str, meaning("`parameter`, `input`, `output`, a gradient below, ...")
    ]
    path: Annotated[str, meaning("where it is in that")] = ""
    caller: Annotated[str, meaning("the module that called this one")] = ""
    is_leaf: Annotated[bool, meaning("false for a module with others inside")] = True
    dtype: Annotated[str, meaning("its dtype")]
    shape: Annotated[Shape, meaning("its shape; of a part, that of the whole")]
    local: Annotated[Shape | None, meaning("the shape of this rank's part")] = None
    requires_grad: Annotated[bool | None, meaning("whether it required gradients")] = (
        None
    )
    same: Annotated[
        Count | None, meaning("`order` of the row with the same tensor")
    ] = None
    why: Annotated[str, meaning("why it was not read")] = ""
    file: Annotated[str, meaning("the file that has the tensor as `order`")] = ""
    part: Annotated[
        tuple[Shape, Shape, Shape] | None,
        meaning(
            "of a part of a DTensor: the whole shape, the offset, and its number among "
            "summed parts"
        ),
    ] = None
    low: Annotated[Number, meaning("the least value, or nan if there is none")] = "nan"
    high: Annotated[Number, meaning("the greatest value")] = "nan"
    squares: Annotated[Number, meaning("the sum of squares")] = 0.0
    num_nan: Annotated[Count, meaning("how many elements are nan")] = 0
    num_inf: Annotated[Count, meaning("how many are inf or -inf")] = 0
    fingerprint: Annotated[bytes | None, meaning("251 sums, in base64")] = None
    magnitudes: Annotated[
        tuple[Count, ...],
        Meta(max_length=64),
        meaning(
            "of a parameter's gradient: of every n-th value, at most 2,048, how many "
            "are no larger than 2^-62, 2^-60, ... 2^16, and how many there are"
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Checks what would send a reader elsewhere, or round in a circle."""
        if math.prod(self.shape) > MOST:
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
            if math.prod(shape) > MOST:
                raise ValueError(f"no tensor has the shape {shape}")
            local = self.shape if self.local is None else self.local
            ends = [begin + size for begin, size in zip(offset, local, strict=False)]
            is_within = all(e <= s for e, s in zip(ends, shape, strict=False))
            if not len(shape) == len(offset) == len(local) or not is_within:
                raise ValueError("a part must lie in its tensor")


class RecordedStepLine(Struct, tag_field="kind", tag="step", kw_only=True):
    """The end of a step: settings and random states."""

    step: Annotated[Count, meaning("the number of the step")]
    devices: Annotated[list[str] | UnsetType, meaning("those of the parameters")] = (
        UNSET
    )
    dtypes: Annotated[
        dict[str, Count] | UnsetType, meaning("those of the parameters, counted")
    ] = UNSET
    autocast: Annotated[
        dict[str, str] | UnsetType, meaning("the dtype of each device's autocast")
    ] = UNSET
    matmul_precision: Annotated[str | UnsetType, meaning("torch's setting")] = UNSET
    tf32: Annotated[bool | UnsetType, meaning("torch's setting")] = UNSET
    deterministic: Annotated[bool | UnsetType, meaning("torch's setting")] = UNSET
    threads: Annotated[Count | UnsetType, meaning("how many torch uses")] = UNSET
    training: Annotated[bool | UnsetType, meaning("whether the model trains")] = UNSET
    dropout: Annotated[list[str] | UnsetType, meaning("the modules that drop out")] = (
        UNSET
    )
    compiled: Annotated[
        list[str] | UnsetType, meaning("compiled modules with others inside")
    ] = UNSET
    settings: Annotated[
        dict[str, dict[str, str]] | UnsetType,
        meaning(
            "plain attributes by module and arguments by `module #call`, as Python "
            "writes them; as `the optimizer`, `the optimizer, group 2`, `the optimizer "
            "2` the class and plain settings of the optimizers that stepped the model, "
            "and how many of its parameters that require gradients they lack; only "
            "those that changed since the last step"
        ),
    ] = UNSET
    random: Annotated[
        dict[str, str] | UnsetType, meaning("a digest of each generator")
    ] = UNSET
    had_gradients: Annotated[
        bool | UnsetType,
        meaning("whether parameters had gradients when the first backward began"),
    ] = UNSET
    has_drawn: Annotated[
        bool | UnsetType, meaning("whether a generator was drawn from")
    ] = UNSET
    drawn: Annotated[list[str] | UnsetType, meaning("those generators")] = UNSET
    failures: Annotated[
        list[str] | UnsetType, meaning("what could not be recorded")
    ] = UNSET
    raised: Annotated[str | UnsetType, meaning("the exception that ended the step")] = (
        UNSET
    )
    rows: Annotated[Count | UnsetType, meaning("how many rows it has")] = UNSET


KINDS = (HeadLine, RowLine, RecordedStepLine)


def decoder() -> Lines:
    """Returns what decodes the lines of a recording."""
    return Lines(*KINDS)
