"""The fields of a step on disk, `replay.json`: docs/formats.md."""

from __future__ import annotations

from typing import Annotated, Any

from ..guard.files.fields import ABSENT, Bounds, Index, Number, Written, written

_Word = Annotated[int, Bounds(ge=0, le=2**32 - 1)]


class SavedValue(Written):
    """A value of a batch: one field is set, besides `requires_grad` and `was`."""

    tensor: str = written("of a tensor: its name in `replay.safetensors`", ABSENT)
    requires_grad: bool = written("whether it required gradients", False)
    value: bool | int | float | str | None = written("null, or what it is", ABSENT)
    number: Number = written("a float that is not finite", ABSENT, name="float")
    by_key: dict[str, Any] = written("values by keys of text", ABSENT, name="dict")
    listed: list[Any] = written("values", ABSENT, name="list")
    tupled: list[Any] = written("values", ABSENT, name="tuple")
    lost: str = written("the type of one that could not be saved", ABSENT)
    pairs: list[tuple[Any, Any]] = written(
        "pairs of values, the key of each first", ABSENT, name="items"
    )
    named: dict[str, Any] = written("the values of a named tuple", ABSENT)
    was: str = written("the type of one that is read as another", "")

    def __post_init__(self) -> None:
        """Checks that it is one value."""
        from ..guard.files.schema import UNSET

        several: tuple[Any, ...] = (
            *(self.tensor, self.value, self.number, self.by_key, self.listed),
            *(self.tupled, self.lost, self.pairs, self.named),
        )
        if sum(each is not UNSET for each in several) != 1:
            raise ValueError("a value must be of one kind")


class SavedAmbient(Written):
    """Random states, autocast and training mode."""

    random: list[tuple[str, str]] = written(
        "of each device but the CPU, which is empty, the name of its state's tensor"
    )
    python: tuple[
        _Word, Annotated[list[_Word], Bounds(max_length=1000)], float | None
    ] = written("the state of Python's generator")
    training: bool = written("whether the model was in training mode")
    autocast: list[tuple[str, bool, str]] = written(
        "of each type of device, whether autocast was on, and its dtype"
    )
    caches: bool = written("whether autocast kept casts of weights")
    numpy: dict[str, Any] = written("the state of NumPy's generator", {})


class SavedCall(Written):
    """A call of the step."""

    is_of_model: bool = written("whether it is of the model, and not of a loss")
    batch: SavedValue = written("what it was given")
    ambient: SavedAmbient = written("what else it depended on")
    returns_loss: bool = written("whether it returned a loss")
    held: dict[str, str] = written(
        "the names of the gradients that its outputs were given, by their places"
    )
    is_alone: bool = written("whether it ran without autograd", False)


class SavedStepFile(Written, kind="replay"):
    """`replay.json`: the step itself."""

    schema: int = written("the version of the format")
    torch: str = written("the release of torch")
    python: str = written("that of Python", ABSENT)
    prefixes: Annotated[list[str], Bounds(min_length=1)] = written(
        "what the names of each model's modules begin with"
    )
    calls: Annotated[list[SavedCall], Bounds(min_length=1)] = written(
        "the calls of the step, in order"
    )
    weights: dict[str, tuple[str, list[Index], int]] = written(
        "dtype, shape and digest of each weight and buffer"
    )


KINDS = (SavedStepFile,)
