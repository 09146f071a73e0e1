"""Finds whose value became a nan that has spread since: its bits tell.

A nan keeps the bits of the value that it was made of, below the exponent, and passes
them on through additions and multiplications, as those of clipping by a norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# The integer type, the bits of the exponent, and the bit that marks a quiet nan.
_LAYOUTS = {
    torch.float32: (torch.int32, 0x7F800000, 0x00400000, 0x007FFFFF),
    torch.float64: (torch.int64, 0x7FF0 << 48, 0x0008 << 48, 0x000F_FFFF_FFFF_FFFF),
}


def gradient_of_payload(
    bad: Mapping[str, torch.Tensor], clean: Mapping[str, torch.Tensor]
) -> tuple[str, str]:
    """Finds the one gradient in which a bit of the exponent has flipped.

    Args:
        bad: The gradients that hold nan, by name.
        clean: Those of a replay that is finite.

    Returns:
        Its name and a sentence; two empty texts if the bits do not tell, as most often:
        exactly one value of all has to have the nan's bits.
    """
    payloads = {_payload(tensor) for tensor in bad.values()}
    if len(payloads) != 1 or None in payloads:
        return "", ""
    payload = payloads.pop()
    assert payload is not None
    places = [
        (name, int(index))
        for name, tensor in clean.items()
        for index in _places(tensor, payload)
    ]
    if len(places) != 1:
        return "", ""
    name, index = places[0]
    value = float(clean[name].flatten()[index])
    return name, (
        f"the nan in all gradients has the bits of one value alone: {value:.6g}, the "
        f"replayed gradient of {name} at {index}, with its exponent set to ones"
    )


def _payload(tensor: torch.Tensor) -> int | None:
    """The bits that all elements share, if they are one and the same nan."""
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None or tensor.layout is not torch.strided or not tensor.numel():
        return None
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer)
    first = bits.flatten()[0]
    if not bool(tensor.isnan().all()) or not bool((bits == first).all()):
        return None
    payload = int(first) & mantissa & ~quiet
    return payload or None  # a nan of no value, as of 0 / 0


def _places(tensor: torch.Tensor, payload: int) -> list[int]:
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        return []
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer).flatten()
    same = (bits & (mantissa & ~quiet)) == payload
    return same.nonzero().flatten().tolist()[:2]
