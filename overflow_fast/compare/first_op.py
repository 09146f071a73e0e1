"""The first operation within a module whose result differs between two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.names import named_modules
from ..precision.recast import expected_error
from ..replay.places import Frames, code_at, users_frames
from ..torch_internals.replay_internals import TorchDispatchMode
from ..tree import tensors_in
from .judged_rows import coarser, epsilon
from .measures import estimated
from .summary import Summary, fetch, summarize, values_of
from .yardstick import FLAGGED

_MAX_OPS = 5000
_ROUNDINGS = 3


@dataclass
class _Op:
    name: str
    frames: Frames
    results: list[tuple[Summary, str]]

    @property
    def text(self) -> str:
        """Its name, its line and the line's text."""
        file, line, code = code_at(self.frames)
        return f"{self.name} at {file}:{line} `{code}`" if file else self.name


class _Ops(TorchDispatchMode):
    """Summarizes the results of all operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if len(self.found) < _MAX_OPS:
            self.found.append(_Op(str(func), users_frames(), _summaries(output)))
        return output


def _summaries(output: Any) -> list[tuple[Summary, str]]:
    found = []
    for each in tensors_in(output):
        if each.dtype.is_floating_point:
            values = values_of(each)
            if not isinstance(values, str):
                numbers = fetch([summarize(values)])[0]
                found.append((numbers, str(each.dtype)[6:]))
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
    mode, calls = _Ops(), [0]

    def begin(*_: object) -> None:
        if calls[0] == call:
            mode.__enter__()  # type: ignore[no-untyped-call]
        calls[0] += 1

    def end(*_: object) -> None:
        if calls[0] == call + 1:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            calls[0] += 1 << 30

    handles = [
        owner.register_forward_pre_hook(begin),
        owner.register_forward_hook(end, prepend=True, always_call=True),
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return mode.found


def first_difference(ops: list[_Op], others: list[_Op]) -> str:
    """Names the first operation that differs, or "" if none does or it is not known."""
    worst = 0.0
    for mine, its in zip(ops, others, strict=False):
        if mine.name != its.name:
            if {mine.name, its.name} & _CASTS:
                return ""
            return f"{mine.text}, where the reference runs {its.text}"
        for (own, dtype), (other, its_dtype) in zip(
            mine.results, its.results, strict=False
        ):
            kind = coarser(dtype, its_dtype)
            step = epsilon(kind) and expected_error(getattr(torch, kind), _ROUNDINGS)
            relative = estimated(own, other).relative
            if relative >= FLAGGED * max(step, worst, 2e-7):
                return mine.text
            worst = max(worst, relative)
    return ""


_CASTS = {"aten._to_copy.default", "aten.detach.default", "aten.clone.default"}
