"""The choice of a bad step's tensors to keep, as copies that can be saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ...base.tensor_copies import host_copy
from ...base.tensors import PLAIN
from ...base.text import dtype_name
from ...base.tree import CALL_DEPTH, Walk, path_text, type_name
from ...scanner import ops
from ..watching.inputs import numpy_types

_NUMBERS = (bool, int, float, complex, str, bytes)


class _Reason(str):
    """Stands for a value that cannot be saved."""


def choose(
    name: str, values: object, room: int, left_out: list[str]
) -> dict[str, torch.Tensor]:
    """Copies tensors that can be saved and fit; non-finite ones come first.

    Incurs a CPU-GPU sync for each tensor on a device.

    Args:
        name: The name of the values, for `left_out`.
        values: Tensors and others, in any nesting.
        room: How many bytes they may have.
        left_out: Gets a line for each value that is not among them.

    Returns:
        The copies, by their paths in the nesting.
    """
    chosen: dict[str, torch.Tensor] = {}
    for path, value in _by_need(list(_flat(values)), room):
        try:
            why = _why_not(value, room)
            if not why:
                chosen[path.lstrip(".") or "value"] = host_copy(value)
                room -= value.nbytes
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            left_out.append(f"{name}{path}: {why}")
    return chosen


def _by_need(named: list[tuple[str, Any]], room: int) -> Iterator[tuple[str, Any]]:
    """Orders values: non-finite ones come first where there is no room for all."""
    is_short = sum(_num_bytes(value) for _, value in named) > room
    bad = [is_short and _is_plain(value) and _is_bad(value) for _, value in named]
    yield from itertools.compress(named, bad)
    yield from itertools.compress(named, (not each for each in bad))


def _is_bad(tensor: torch.Tensor) -> bool:
    try:
        return ops.are_nonfinite([tensor])[0]
    except Exception:
        return False


def _is_plain(value: Any) -> bool:
    is_tensor = type(value) in PLAIN
    return is_tensor and value.layout is torch.strided and not value.is_meta


def _num_bytes(value: Any) -> int:
    return int(value.nbytes) if _is_plain(value) else 0


def _why_not(value: Any, room: int) -> str:
    """Returns why a value cannot be saved, or ""."""
    if isinstance(value, _Reason):
        return str(value)
    if not isinstance(value, torch.Tensor):
        return f"{value!r:.200}"
    if type(value) not in PLAIN:
        return f"a {type(value).__name__}"
    if not _is_plain(value):
        layout = value.layout if value.layout is not torch.strided else "torch.meta"
        return f"its layout is {layout}"
    if value.nbytes and not value.untyped_storage().nbytes():
        return "its memory has been freed"
    if not _is_savable(value.dtype):
        return f"safetensors cannot hold {dtype_name(value.dtype)}"
    return f"{value.nbytes} bytes are too many" if value.nbytes > room else ""


def _is_savable(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"empty": torch.empty(0, dtype=dtype)})
    except Exception:
        return False
    return True


def _flat(values: object) -> Iterator[tuple[str, Any]]:
    """Yields what was found, and the reason for what held nothing to save."""
    walk = Walk((torch.Tensor, *_NUMBERS, *numpy_types()), CALL_DEPTH + 1)
    walk.visit(values)
    yield from ((path_text(path), value) for path, value in walk.found)
    for path, kind in walk.opaque:
        yield path_text(path), _Reason(f"a {type_name(kind)} is not opened")
    for path, kind in walk.unknown:
        yield path_text(path), _Reason(f"no tensor was found in a {type_name(kind)}")
