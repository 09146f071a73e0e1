"""Writes a step to disk, from which another process can explain it."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base.tensors import digest_of, has_memory, host_copy, is_readable
from ..base.text import dtype_name
from ..guard.files.json_text import SCHEMA, dumps
from ..guard.kept_calls.ambient import Ambient
from ..guard.report.findings import Artifact
from .calls import Call, ModelCall
from .named_tensors import names_of
from .saved_random import plain_states
from .step_schema import SavedAmbient, SavedCall, SavedStepFile, SavedValue

STEP, TENSORS = "replay.json", "replay.safetensors"


def saved_step(
    models: Mapping[str, nn.Module],
    calls: Sequence[Call],
    start: Sequence[tuple[torch.Tensor, torch.Tensor]],
    most: int,
) -> list[Artifact]:
    """Makes the files of a step: its batches, random states and digests of weights.

    Incurs a CPU-GPU sync.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        start: Buffers and what was in them when the step began.
        most: How many bytes of tensors may be written.
    """
    before = {id(buffer): value for buffer, value in start}
    tensors: dict[str, torch.Tensor] = {}
    step = SavedStepFile(
        schema=SCHEMA,
        torch=torch.__version__,
        python=platform.python_version(),
        prefixes=list(models),
        calls=[_call(each, tensors) for each in calls],
        weights={
            name: identity_of(before.get(id(tensor), tensor))
            for _, name, tensor in names_of(models)
        },
    )
    if sum(tensor.nbytes for tensor in tensors.values()) > most:
        return []
    return [Artifact(STEP, dumps(step)), Artifact(TENSORS, tensors=tensors)]


def _call(call: Call, tensors: dict[str, torch.Tensor]) -> SavedCall:
    def put(tensor: torch.Tensor) -> str:
        name = f"tensor{len(tensors)}"
        tensors[name] = host_copy(tensor)
        return name

    return SavedCall(
        is_of_model=isinstance(call, ModelCall),
        batch=_plain(call.batch, put),
        ambient=_ambient(call.ambient, put),
        returns_loss=call.returns_loss,
        is_alone=call.has_backward is False,
        held={str(place): put(held) for place, held in call.held.items()},
    )


def _ambient(ambient: Ambient, put: Callable[[torch.Tensor], str]) -> SavedAmbient:
    return SavedAmbient(
        **plain_states(ambient.random, put),
        training=ambient.training,
        autocast=[
            (type, is_on, dtype_name(dtype)) for type, is_on, dtype in ambient.autocast
        ],
        caches=ambient.caches,
    )


def _plain(value: Any, put: Callable[[torch.Tensor], str]) -> SavedValue:
    """A batch as JSON; of a tensor its name, of what cannot be saved its type.

    No code of the value's type runs when it is read: what comes back as another type
    has the name of its own one.
    """
    return SavedValue(**_fields_of(value, put))


def _fields_of(value: Any, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not is_readable(value):
            return {"lost": kind.__name__}
        is_wanted = value.requires_grad and value.is_floating_point()
        return {"tensor": put(value), "requires_grad": is_wanted}
    was = {} if kind in _PLAIN else {"was": kind.__name__}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": value, **was}  # JSON has it as a string
    if isinstance(value, str) and not _is_unicode(value):
        return {"lost": kind.__name__}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value, **was}
    if isinstance(value, Mapping):
        pairs = [(_plain(k, put), _plain(each, put)) for k, each in value.items()]
        if all(type(key) is str and _is_unicode(key) for key in value):
            named = zip(value, (each for _, each in pairs), strict=True)
            return {"by_key": dict(named), **was}
        return {"pairs": pairs, **was}
    if kind in (list, tuple):  # others would come back as another type
        name = "listed" if kind is list else "tupled"
        return {name: [_plain(each, put) for each in value]}
    fields = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        each = zip(fields, value, strict=False)
        return {"named": {k: _plain(v, put) for k, v in each}, "was": kind.__name__}
    return {"lost": kind.__name__}


_PLAIN = (type(None), bool, int, float, str, dict)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def identity_of(tensor: torch.Tensor) -> tuple[str, list[int], int]:
    """Identifies a weight: dtype, shape, digest."""
    digest = int(digest_of(tensor)) if has_memory(tensor) and tensor.numel() else 0
    return dtype_name(tensor.dtype), list(tensor.shape), digest
