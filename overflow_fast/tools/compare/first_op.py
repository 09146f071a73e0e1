"""The first operation within a module whose result differs between two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.modules import named_modules
from ...base.text import dtype_name
from ...base.torch_ops import base_of, has
from ...base.tree import tensors_in
from ...explainer.op_call import OpCall
from ...explainer.op_trace import ModuleStack, OpObserver, OpTrace
from ...explainer.users_lines import Sites, code_at
from ..precision.layers import expected_error
from .judged_rows import FLAGGED, coarser, epsilon
from .summary import Summary, distance, fetch, summarize, values_of

_MAX_OPS = 5000  # of one module's call; chosen, not measured
_ROUNDINGS = 3  # of its inputs, weights and result, as `_LEAF` of judged_rows.py
_NEAR_END = 0.999  # of a dtype's largest number: a fill value, as of masks


@dataclass
class _Op:
    """An operation of a trace.

    Attributes:
        name: Its name.
        sites: The lines that led to it.
        results: Its results' summaries and dtypes; none of memory nobody has written.
    """

    name: str
    sites: Sites
    results: list[tuple[Summary, str]]

    @property
    def text(self) -> str:
        """Its name, its line and the line's text."""
        file, line, code = code_at(self.sites)
        return f"{self.name} at {file}:{line} `{code}`" if file else self.name


class _Ops(OpObserver):
    """Summarizes the results of the operations of a trace."""

    def __init__(self) -> None:
        self.found: list[_Op] = []

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and summarizes its results; see `OpObserver`."""
        output = op.run()
        if len(self.found) < _MAX_OPS:
            results = [] if op.is_empty else list(_summaries(output))
            self.found.append(_Op(str(op.func), modules.lines(), results))
        return output


def _summaries(output: Any) -> Iterator[tuple[Summary, str]]:
    """The summaries of floats, without fill values that follow the dtype."""
    for each in tensors_in(output):
        values = values_of(each) if each.dtype.is_floating_point else ""
        if not isinstance(values, str):
            most = _NEAR_END * torch.finfo(each.dtype).max
            is_fill = values.isfinite() & (values.abs() >= most)
            numbers = summarize(values.where(~is_fill, 0))
            yield fetch([numbers])[0], dtype_name(each.dtype)


def ops_within(
    model: nn.Module, module: str, call: int, run: Callable[[], Any]
) -> list[_Op]:
    """Runs a step, and records the operations of one call of a module.

    Args:
        model: The model.
        module: The module's name.
        call: Which of its calls.
        run: Runs the step.
    """
    owner = [each for name, each in named_modules(model) if name == module][-1]
    ops, calls = _Ops(), [0]
    trace = OpTrace({}, ops)

    def begin(*_: object) -> None:
        if calls[0] == call:
            trace.__enter__()
        calls[0] += 1

    def end(*_: object) -> None:
        if calls[0] == call + 1:
            trace.__exit__(None, None, None)
            calls[0] += 1 << 30

    with (
        owner.register_forward_pre_hook(begin),
        owner.register_forward_hook(end, prepend=True, always_call=True),
    ):
        run()
    return ops.found


def first_difference(ops: list[_Op], others: list[_Op]) -> str:
    """Names the first operation that differs, or "" if none does or it is not known."""
    worst = 2e-7  # of fingerprints
    for mine, its in zip(ops, others, strict=False):
        if mine.name != its.name:
            if any(has(base_of(each.name), "same") for each in (mine, its)):
                return ""
            return f"{mine.text}, where the reference runs {its.text}"
        for (own, dtype), (other, its_dtype) in zip(
            mine.results, its.results, strict=False
        ):
            kind = coarser(dtype, its_dtype)
            step = epsilon(kind) and expected_error(getattr(torch, kind), _ROUNDINGS)
            relative = distance(own, other)
            if relative >= FLAGGED * max(step, worst):
                return mine.text
            worst = max(worst, relative)
    return ""
