"""The schema of a step on disk, `replay.json`."""

from __future__ import annotations

from typing import Annotated, Any

from ..guard.files.schema import UNSET, Index, Meta, Number, Struct, UnsetType, field

_Word = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Value(Struct):
    """A value of a batch: one field is set, besides `requires_grad` and `was`.

    `was` names its type where it is made as another one here.
    """

    tensor: str | UnsetType = UNSET
    requires_grad: bool = False
    value: bool | int | float | str | UnsetType | None = UNSET
    number: Number | UnsetType = field(default=UNSET, name="float")
    by_key: dict[str, Value] | UnsetType = field(default=UNSET, name="dict")
    listed: list[Value] | UnsetType = field(default=UNSET, name="list")
    tupled: list[Value] | UnsetType = field(default=UNSET, name="tuple")
    lost: str | UnsetType = UNSET
    pairs: list[tuple[Value, Value]] | UnsetType = field(default=UNSET, name="items")
    named: dict[str, Value] | UnsetType = UNSET
    was: str = ""

    def __post_init__(self) -> None:
        """Checks that it is one value."""
        several = (
            *(self.tensor, self.value, self.number, self.by_key, self.listed),
            *(self.tupled, self.lost, self.pairs, self.named),
        )
        if sum(each is not UNSET for each in several) != 1:
            raise ValueError("a value must be of one kind")


class SavedAmbient(Struct):
    """Random states, autocast and training mode."""

    random: list[tuple[str, str]]
    python: tuple[_Word, Annotated[list[_Word], Meta(max_length=1000)], float | None]
    training: bool
    autocast: list[tuple[str, bool, str]]
    caches: bool
    numpy: dict[str, Any] = field(default_factory=dict)


class SavedCall(Struct):
    """A call of the step. `is_alone` where it ran without autograd."""

    is_of_model: bool
    batch: Value
    ambient: SavedAmbient
    returns_loss: bool
    held: dict[str, str]
    is_alone: bool = False


class SavedStepFile(Struct):
    """The step. Weights are dtype, shape and digest."""

    schema: int
    torch: str
    prefixes: Annotated[list[str], Meta(min_length=1)]
    calls: Annotated[list[SavedCall], Meta(min_length=1)]
    weights: dict[str, tuple[str, list[Index], int]]
