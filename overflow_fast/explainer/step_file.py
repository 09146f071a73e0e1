"""A step on disk, `replay.pt`: what `torch.save` writes, read with `weights_only=True`.

It holds tensors, dicts, lists, tuples and plain values alone, so that reading it runs
no code of the step's types. What was of another type is one of these, and what cannot
be written is None: `was` and `lost` say so, by places in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict
from torch import nn

from ..base.digests import digest_of
from ..base.tensor_copies import host_copy
from ..base.tensors import has_memory, is_readable
from ..base.text import dtype_name
from ..guard.files.fields import Index, meaning
from ..guard.files.json_text import SCHEMA
from ..guard.files.reading import FileError, open_regular
from ..guard.files.schema import Head, convert
from ..guard.kept_calls.ambient import Ambient
from ..guard.report.findings import Artifact
from ..guard.undo.random import plain_state
from .calls import Call, ModelCall
from .named_tensors import names_of

STEP = "replay.pt"


class UnreadableStepError(FileError):
    """Raised where a folder's step cannot be explained."""


class SavedAmbient(Struct, kw_only=True):
    """Random states, autocast and training mode."""

    random: Annotated[
        dict[str, Any],
        meaning(
            'the states of generators: of devices by their names, "python", "numpy"'
        ),
    ]
    training: Annotated[bool, meaning("whether the model was in training mode")]
    autocast: Annotated[
        list[tuple[str, bool, Any]],
        meaning("of each type of device, whether autocast was on, and its dtype"),
    ]
    caches: Annotated[bool, meaning("whether autocast kept casts of weights")]


class SavedCall(Struct, kw_only=True):
    """A call of the step."""

    is_of_model: Annotated[
        bool, meaning("whether it is of the model, and not of a loss")
    ]
    batch: Annotated[
        Any, meaning("what it was given: tensors in dicts, lists and tuples")
    ]
    ambient: Annotated[SavedAmbient, meaning("what else it depended on")]
    returns_loss: Annotated[bool, meaning("whether it returned a loss")]
    held: Annotated[
        dict[int, Any],
        meaning("the gradients that its outputs were given, by their places"),
    ]
    is_alone: Annotated[bool, meaning("whether it ran without autograd")] = False
    lost: Annotated[
        dict[str, str],
        meaning(
            "the types of what could not be saved, and is None, by places such as "
            "`[0]['x']`"
        ),
    ] = {}
    was: Annotated[
        dict[str, tuple[str, str]],
        meaning("the type of what is read as another, and that, by places"),
    ] = {}


class SavedStepFile(Struct, tag_field="kind", tag="replay", kw_only=True):
    """`replay.pt`: the step itself."""

    schema: Annotated[int, meaning("the version of the format")]
    torch: Annotated[str, meaning("the release of torch")]
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


def step_file(
    models: Mapping[str, nn.Module],
    calls: Sequence[Call],
    start: Sequence[tuple[torch.Tensor, torch.Tensor]],
    most: int,
) -> list[Artifact]:
    """Makes the file of a step: its batches, random states and digests of weights.

    Incurs a CPU-GPU sync.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        start: Buffers and what was in them when the step began.
        most: How many bytes of tensors may be written.

    Returns:
        The file; nothing if it would have more bytes.
    """
    before = {id(buffer): value for buffer, value in start}
    saved = [_saved(each) for each in calls]
    num_bytes = sum(num for _, num in saved)
    if num_bytes > most:
        return []
    step = SavedStepFile(
        schema=SCHEMA,
        torch=str(torch.__version__),  # of a type of its own
        prefixes=list(models),
        calls=[],
        weights={
            name: identity_of(before.get(id(tensor), tensor))
            for _, name, tensor in names_of(models)
        },
    )
    content = {**asdict(step), "kind": "replay", "calls": [call for call, _ in saved]}
    return [Artifact(STEP, content, num_bytes)]


def read_step(path: Path) -> SavedStepFile:
    """Reads the file of a step; its tensors are on the CPU.

    Raises:
        UnreadableStepError: If it is missing, broken, or of a newer schema.
    """
    try:
        with open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        convert(content, Head).check_schema(SCHEMA)
        return convert(content, SavedStepFile)
    except FileNotFoundError:
        raise UnreadableStepError(
            f"{path} is missing: a guard writes it with evidence=, if it kept the "
            "step's calls (explain=False and sync='lagged' keep none)"
        ) from None
    except (OSError, FileError) as error:
        raise UnreadableStepError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # torch's advice is to load what runs code
        raise UnreadableStepError(
            f"{path} cannot be read: it is damaged, or was not written by a guard"
        ) from error


def identity_of(tensor: torch.Tensor) -> tuple[str, list[int], int]:
    """Identifies a weight: dtype, shape, digest."""
    digest = int(digest_of(tensor)) if has_memory(tensor) and tensor.numel() else 0
    return dtype_name(tensor.dtype), list(tensor.shape), digest


def _saved(call: Call) -> tuple[dict[str, Any], int]:
    """A call as dicts, and how many bytes its tensors have."""
    batch = _PlainBatch(call.batch)
    held = {place: host_copy(each) for place, each in call.held.items()}
    saved = SavedCall(
        is_of_model=isinstance(call, ModelCall),
        batch=batch.value,
        ambient=_ambient(call.ambient),
        returns_loss=call.returns_loss,
        held=held,
        is_alone=call.has_backward is False,
        lost=batch.lost,
        was=batch.was,
    )
    num_bytes = batch.num_bytes + sum(each.nbytes for each in held.values())
    return {**asdict(saved), "ambient": asdict(saved.ambient)}, num_bytes


def _ambient(ambient: Ambient) -> SavedAmbient:
    states = ambient.random.states
    numpys = {n: plain_state(states[n]) for n in states if n == "numpy"}
    return SavedAmbient(
        random={**states, **numpys},
        training=ambient.training,
        autocast=list(ambient.autocast),
        caches=ambient.caches,
    )


class _PlainBatch:
    """A batch in plain containers, with copies of its tensors on the CPU.

    Attributes:
        value: The batch.
        lost: See `SavedCall`, as `was`.
        num_bytes: How many bytes its tensors have.
    """

    def __init__(self, batch: Any) -> None:
        self.lost: dict[str, str] = {}
        self.was: dict[str, tuple[str, str]] = {}
        self.num_bytes = 0
        self.value = self._plain(batch, "")

    def _plain(self, value: Any, at: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor) and is_readable(value):
            copy = host_copy(value)
            self.num_bytes += copy.nbytes
            is_wanted = value.requires_grad and value.is_floating_point()
            return copy.requires_grad_(is_wanted)
        if kind in (bool, type(None)):
            return value
        for plain, read in _PLAIN.items():
            if isinstance(value, plain):
                self._note_kind(at, kind, plain)
                return read(value)
        if isinstance(value, Mapping):
            self._note_kind(at, kind, dict)
            items = [(self._plain(k, at), k, each) for k, each in value.items()]
            return {k: self._plain(each, f"{at}[{own!r}]") for k, own, each in items}
        if isinstance(value, (list, tuple)):
            sequence = list if isinstance(value, list) else tuple
            self._note_kind(at, kind, sequence)
            return sequence(self._plain(e, f"{at}[{i}]") for i, e in enumerate(value))
        self.lost[at] = kind.__name__
        return None

    def _note_kind(self, at: str, kind: type[Any], plain: type[Any]) -> None:
        if kind is not plain:
            self.was[at] = kind.__name__, plain.__name__


# By these an instance of a subclass, such as an enum, is read without code of its own.
_PLAIN: dict[type[Any], Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
