"""The first operation within a module whose result differs between two models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.modules import named_modules
from ...base.text import dtype_name
from ...base.torch_ops import base_of, has
from ...base.tree import find, tensors_in
from ...explainer.op_trace import ModuleStack, OpCall, OpTrace
from ...explainer.users_lines import Sites, code_at
from ..precision.layers import expected_error
from .judged_rows import FLAGGED, coarser, epsilon
from .summary import Summary, estimated, fetch, summarize, values_of

_MAX_OPS = 5000  # of one module's call; chosen, not measured
_ROUNDINGS = 3  # of its inputs, weights and result, as `_LEAF` of judged_rows.py


@dataclass
class _Op:
    """An operation of a trace.

    Attributes:
        name: Its name.
        sites: The lines that led to it.
        results: Its results' summaries and dtypes; none of memory nobody has written.
        reads: The operations whose results it was given, by their places.
        fills: Whether it was given a number at the end of its result's dtype.
    """

    name: str
    sites: Sites
    results: list[tuple[Summary, str]]
    reads: frozenset[int] = frozenset()
    fills: bool = False

    @property
    def text(self) -> str:
        """Its name, its line and the line's text."""
        file, line, code = code_at(self.sites)
        return f"{self.name} at {file}:{line} `{code}`" if file else self.name


class _Ops:
    """Summarizes the results of the operations of a trace."""

    def __init__(self) -> None:
        self.found: list[_Op] = []
        self._made: dict[int, int] = {}  # the last that returned a tensor, by its id

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and summarizes its results; see `OpObserver`."""
        given = {self._made.get(id(tensor), -1) for tensor in op.arguments}
        output = op.run()
        if len(self.found) < _MAX_OPS:
            results = [] if op.is_empty else _summaries(output)
            place, made = len(self.found), tensors_in(output)
            fills = any(_is_end(n, t) for _, n in find(op.args, (float,)) for t in made)
            self.found.append(
                _Op(str(op.func), modules.lines(), results, frozenset(given), fills)
            )
            self._made.update((id(tensor), place) for tensor in made)
        return output

    def on_module(self, name: str, values: Any, is_given: bool) -> None:
        """See `OpObserver`."""


def _is_end(number: float, tensor: torch.Tensor) -> bool:
    """True for the largest number of a tensor's dtype, as fill values are."""
    if not tensor.dtype.is_floating_point:
        return False
    return math.isclose(abs(number), torch.finfo(tensor.dtype).max, rel_tol=1e-3)


def _summaries(output: Any) -> list[tuple[Summary, str]]:
    found = []
    for each in tensors_in(output):
        if each.dtype.is_floating_point:
            values = values_of(each)
            if not isinstance(values, str):
                numbers = fetch([summarize(values)])[0]
                found.append((numbers, dtype_name(each.dtype)))
    return found


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
    """Names the first operation that differs, or "" if none does or it is not known.

    What a fill value that follows the dtype alone makes different, as finfo.min does,
    is no difference, nor what is computed from that, until values are not finite.
    """
    worst, filled = 0.0, set[int]()
    for place, (mine, its) in enumerate(zip(ops, others, strict=False)):
        if mine.name != its.name:
            if any(has(base_of(each.name), "same") for each in (mine, its)):
                return ""
            return f"{mine.text}, where the reference runs {its.text}"
        for (own, dtype), (other, its_dtype) in zip(
            mine.results, its.results, strict=False
        ):
            kind = coarser(dtype, its_dtype)
            step = epsilon(kind) and expected_error(getattr(torch, kind), _ROUNDINGS)
            relative = estimated(own, other).relative
            if relative >= FLAGGED * max(step, worst, 2e-7):
                is_finite = (own.num_nan, own.num_inf) == (other.num_nan, other.num_inf)
                follows = (mine.fills and its.fills) or bool(filled & mine.reads)
                if not (follows and is_finite):
                    return mine.text
                filled.add(place)
                continue
            worst = max(worst, relative)
    return ""
