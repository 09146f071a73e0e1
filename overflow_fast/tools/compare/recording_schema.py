"""The lines of a recording: docs/formats.md.

A file has a step of a rank: a line with its settings, and a row for each tensor.
"""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ...base.modules import tensor_name
from ...guard.files.fields import Count, Index, Time, meaning
from .shards import Shape, Shard
from .summary import Summary

SCHEMA = 1  # of recordings
MOST = 2**62  # elements; numbers beyond have no float, either

STATE, FORWARD, BACKWARD = "state", "forward", "backward"  # the phases of a step


class FirstLine(Struct, tag_field="kind", tag="recording", kw_only=True):
    """The first line: a step of a rank, its settings and random states."""

    schema: Annotated[int, meaning("the version of the format")]
    time: Annotated[Time, meaning("when it ended, in seconds since 1970")] = 0.0
    step: Annotated[Count, meaning("the number of the step")]
    rank: Annotated[Index, meaning("the rank of this process")]
    world_size: Annotated[
        int, Meta(ge=1, le=2**31), meaning("how many ranks there are")
    ] = 1
    class_name: Annotated[str | UnsetType, meaning("the class of the model")] = field(
        name="class", default=UNSET
    )
    settings: Annotated[
        dict[str, dict[str, str]],
        meaning(
            "by name: `the run`, versions, torch's settings and the dtypes of weights; "
            "a module, its plain attributes as Python writes them, its parameters that "
            "are tied or frozen; `module #call`, the plain "
            "arguments of a call; `the optimizer`, `the optimizer, group 2`, `the "
            "optimizer 2`, the class and the settings of optimizers that stepped the "
            "model, and how many of its parameters that require gradients they lack"
        ),
    ] = {}
    tf32: Annotated[bool, meaning("whether float32 may be rounded to TF32")] = False
    compiled: Annotated[list[str], meaning("compiled modules with others inside")] = []
    random: Annotated[dict[str, str], meaning("a digest of each generator")] = {}
    drawn: Annotated[list[str], meaning("the generators that were drawn from")] = []
    failures: Annotated[list[str], meaning("what could not be recorded")] = []
    raised: Annotated[str, meaning("the exception that ended the step")] = ""
    rows: Annotated[Count, meaning("how many rows follow")]


class RowLine(Summary, tag_field="kind", tag="row", kw_only=True, omit_defaults=True):
    """A tensor at its place in a step; fields that have their default are left out.

    Gradients are named for what they belong to: "output_gradient", "input_gradient",
    "accumulated_gradient" (a parameter's, as backward leaves it, before clipping or an
    all-reduce) and "parameter_gradient" (as the optimizer finds it).
    """

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
    part: Annotated[
        Shard | None,
        meaning(
            "of a part of a DTensor: the whole shape, the offset, and its number among "
            "summed parts"
        ),
    ] = None

    @property
    def key(self) -> tuple[str, int, str, str]:
        """The place in the step: the same in each run of the same model."""
        return self.module, self.call, self.role, self.path

    @property
    def forward_key(self) -> tuple[str, int, str, str]:
        """The key of the forward's tensor whose gradient this is."""
        role = self.role.removesuffix("_gradient")
        return self.module, self.call, role, self.path

    @property
    def is_computed(self) -> bool:
        """True for what the model makes: no weight of its own, nor what it is given."""
        is_given = self.role == "input" and not self.module
        return self.phase != STATE and not is_given

    @property
    def is_of_call(self) -> bool:
        """True for all but parameters and buffers, and gradients of those."""
        return not self.role.startswith(("parameter", "buffer", "accumulated"))

    @property
    def fqn(self) -> str:
        """The qualified name of a parameter or buffer."""
        return tensor_name(self.module, self.path)

    def __str__(self) -> str:
        """The place as comparisons write it, such as `h.0.attn #1: output[0]`.

        Each role is named behind the colon, and calls have numbers: a comparison lists
        a parameter, its gradient and every call of its module beside one another.
        """
        role = self.role.replace("_", " ")
        call = f" #{self.call}" if self.call else ""
        if not self.is_of_call:
            return f"{self.fqn}{call}: {role}"
        return f"{self.module or 'the model'}{call}: {role}{self.path}"

    def __post_init__(self) -> None:
        """Checks what would send a reader round in a circle, or out of a tensor."""
        self.check()
        if math.prod(self.shape) > MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")
        if self.same is not None and self.same >= self.order:
            raise ValueError("a tensor cannot be the same as a later one")
        if self.part is not None:
            shape, offset, _ = self.part
            if math.prod(shape) > MOST:
                raise ValueError(f"no tensor has the shape {shape}")
            local = self.shape if self.local is None else self.local
            ends = [begin + size for begin, size in zip(offset, local, strict=False)]
            is_within = all(e <= s for e, s in zip(ends, shape, strict=False))
            if not len(shape) == len(offset) == len(local) or not is_within:
                raise ValueError("a part must lie in its tensor")


KINDS = (FirstLine, RowLine)
