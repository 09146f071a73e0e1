"""Computes an operation again in float64."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..torch_internals.replay_internals import attention_by_definition, schema_names
from ..tree import mapped, tensors_in

_MAX_NUMEL = 2**27  # of all arguments together, which are copied
_HALF_TO_FLOAT = {"_softmax", "_log_softmax"}


class Call(Protocol):
    """A call of an operation; `kept` has what it overwrote."""

    func: Any
    args: Any
    kwargs: Any
    base: str
    kept: dict[int, torch.Tensor]

    def read(self, floats: bool = True) -> list[torch.Tensor]:
        """The tensors whose values it reads."""

    @property
    def is_constant(self) -> bool:
        """Tells whether it makes a tensor of a number of Python."""

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""


def in_float64(op: Call) -> tuple[Any, dict[int, torch.Tensor]]:
    """Runs it in float64: its output, and what it writes to, by what it wrote to."""
    if not str(op.func).startswith(("aten.", "prims.")):
        raise NotImplementedError("an operation of an extension")
    arguments = tensors_in((op.args, op.kwargs))
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in arguments):
        raise NotImplementedError("a tensor subclass")
    if sum(tensor.numel() for tensor in arguments) > _MAX_NUMEL:
        raise NotImplementedError("too large")
    if torch.Tag.nondeterministic_seeded in op.func.tags:
        raise NotImplementedError("it draws random numbers")
    written: dict[int, torch.Tensor] = {}

    def widened(value: Any) -> Any:
        wide = _widened(op, value)
        if id(value) in op.kept:
            wide = written.setdefault(id(value), wide)
        return wide

    kinds = torch.Tensor, torch.dtype
    args, kwargs = mapped((op.args, op.kwargs), widened, kinds=kinds)
    if op.base in _HALF_TO_FLOAT:
        args = (*args[:2], False)
    if op.base.startswith("_scaled_dot_product") and "backward" not in op.base:
        return _attention(op, args, kwargs), {}
    return op.func(*args, **kwargs), written


def _widened(op: Call, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    value = op.kept.get(id(value), value).detach()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value.clone()


def _attention(op: Call, args: Any, kwargs: Any) -> Any:
    """Fused attention by its definition."""
    names = schema_names(op.func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask", given.get("attn_bias"))
    return attention_by_definition(
        *(given["query"], given["key"], given["value"]),
        attn_mask=mask,
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
    )
