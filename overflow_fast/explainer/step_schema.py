"""The fields of a step on disk, `replay.json`: docs/formats.md."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, field

from ..guard.files.fields import Index, Number, meaning

_Word = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class SavedValue(Struct, kw_only=True, omit_defaults=True):
    """A value of a batch: one field is set, besides `requires_grad` and `was`."""

    tensor: Annotated[
        str | UnsetType, meaning("of a tensor: its name in `replay.safetensors`")
    ] = UNSET
    requires_grad: Annotated[bool, meaning("whether it required gradients")] = False
    value: Annotated[
        bool | int | float | str | UnsetType | None, meaning("null, or what it is")
    ] = UNSET
    number: Annotated[Number | UnsetType, meaning("a float that is not finite")] = (
        field(name="float", default=UNSET)
    )
    by_key: Annotated[dict[str, Any] | UnsetType, meaning("values by keys of text")] = (
        field(name="dict", default=UNSET)
    )
    listed: Annotated[list[Any] | UnsetType, meaning("values")] = field(
        name="list", default=UNSET
    )
    tupled: Annotated[list[Any] | UnsetType, meaning("values")] = field(
        name="tuple", default=UNSET
    )
    lost: Annotated[
        str | UnsetType, meaning("the type of one that could not be saved")
    ] = UNSET
    pairs: Annotated[
        list[tuple[Any, Any]] | UnsetType,
        meaning("pairs of values, the key of each first"),
    ] = field(name="items", default=UNSET)
    named: Annotated[
        dict[str, Any] | UnsetType, meaning("the values of a named tuple")
    ] = UNSET
    was: Annotated[str, meaning("the type of one that is read as another")] = ""

    def __post_init__(self) -> None:
        """Checks that it is one value."""
        several: tuple[Any, ...] = (
            *(self.tensor, self.value, self.number, self.by_key, self.listed),
            *(self.tupled, self.lost, self.pairs, self.named),
        )
        if sum(each is not UNSET for each in several) != 1:
            raise ValueError("a value must be of one kind")


class SavedAmbient(Struct, kw_only=True):
    """Random states, autocast and training mode."""

    random: Annotated[
        list[tuple[str, str]],
        meaning(
            "of each device but the CPU, which is empty, the name of its state's tensor"
        ),
    ]
    python: Annotated[
        tuple[_Word, Annotated[list[_Word], Meta(max_length=1000)], float | None],
        meaning("the state of Python's generator"),
    ]
    training: Annotated[bool, meaning("whether the model was in training mode")]
    autocast: Annotated[
        list[tuple[str, bool, str]],
        meaning("of each type of device, whether autocast was on, and its dtype"),
    ]
    caches: Annotated[bool, meaning("whether autocast kept casts of weights")]
    numpy: Annotated[dict[str, Any], meaning("the state of NumPy's generator")] = {}


class SavedCall(Struct, kw_only=True):
    """A call of the step."""

    is_of_model: Annotated[
        bool, meaning("whether it is of the model, and not of a loss")
    ]
    batch: Annotated[SavedValue, meaning("what it was given")]
    ambient: Annotated[SavedAmbient, meaning("what else it depended on")]
    returns_loss: Annotated[bool, meaning("whether it returned a loss")]
    held: Annotated[
        dict[str, str],
        meaning(
            "the names of the gradients that its outputs were given, by their places"
        ),
    ]
    is_alone: Annotated[bool, meaning("whether it ran without autograd")] = False


class SavedStepFile(Struct, tag_field="kind", tag="replay", kw_only=True):
    """`replay.json`: the step itself."""

    schema: Annotated[int, meaning("the version of the format")]
    torch: Annotated[str, meaning("the release of torch")]
    python: Annotated[str | UnsetType, meaning("that of Python")] = UNSET
    prefixes: Annotated[
        list[str],
        Meta(min_length=1),
        meaning("what the names of each model's modules begin with"),
    ]
    calls: Annotated[
        list[SavedCall],
        Meta(min_length=1),
        meaning("the calls of the step, in order"),
    ]
    weights: Annotated[
        dict[str, tuple[str, list[Index], int]],
        meaning("dtype, shape and digest of each weight and buffer"),
    ]


KINDS = (SavedStepFile,)
