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
    settings: Annotated[
        dict[str, dict[str, str]],
        meaning(
            "by name: `the run`, torch's settings and the dtypes of weights; a module, "
            "its plain attributes as Python writes them; `module #call`, the plain "
            "arguments of a call; `the optimizer`, `the optimizer, group 2`, `the "
            "optimizer 2`, the class and the settings of optimizers that stepped the "
            "model, and how many of its parameters that require gradients they lack"
        ),
    ] = {}
    tf32: Annotated[bool, meaning("whether float32 may be rounded to TF32")] = False
    compiled: Annotated[list[str], meaning("compiled modules with others inside")] = []
    random: Annotated[dict[str, str], meaning("a digest of each generator")] = {}
    drawn: Annotated[list[str], meaning("the generators that were drawn from")] = []
    had_gradients: Annotated[
        bool, meaning("whether parameters had gradients when the first backward began")
    ] = False
    failures: Annotated[list[str], meaning("what could not be recorded")] = []
    raised: Annotated[str, meaning("the exception that ended the step")] = ""
    rows: Annotated[Count, meaning("how many rows it has")]


KINDS = (HeadLine, RowLine, RecordedStepLine)


def decoder() -> Lines:
    """Returns what decodes the lines of a recording."""
    return Lines(*KINDS)
