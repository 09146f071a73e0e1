"""Compares a replay with the step that it is to be.

1. `ReplayCheck` watches a replay as the step was watched, and compares the extremes of
   each call and of each gradient of a call's outputs: the first that differs is named.
2. `SameStep` is of the program's own lines, which may not be the step: see
   `loss_call.py`. It compares the inputs and the random states of the models' forwards,
   and the loss and the graph of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _C
from ..base.modules import Handles
from ..base.tensors import is_readable
from ..base.tree import CALL_DEPTH, tensors_in
from ..base.types import TensorPath
from ..guard.record.columns import unpacked
from ..guard.record.record_lines import EXTREMES
from ..guard.report.gist import told_apart
from ..guard.undo.random import RandomStates
from ..guard.undo.tensors import is_same_bits
from ..guard.verdict.bad_frames import collect
from ..guard.verdict.entry_headroom import path_of
from ..guard.watching.watch import ModelWatch
from ..torch_internals.compiler import has_compiled
from .calls import Call, ModelCall
from .replayer import Observer
from .tensor_kinds import is_float

_RTOL = 1e-3  # of a loss whose kernels are not deterministic
_MOST_NODES = 100_000  # of a graph that is compared; chosen, not measured
_KINDS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


class Extremes(NamedTuple):
    """The extremes of an entry in a step, named as the columns of a row are.

    Attributes:
        num_tensors: How many tensors they are of.
        abs_min: The smallest magnitude; nan where there is a nan.
        abs_max: The largest magnitude; nan where there is a nan.
        num_nan: The number of nans.
        num_inf: The number of infs.
    """

    num_tensors: int
    abs_min: float
    abs_max: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class Difference:
    """The first entry, in execution order, whose extremes differ.

    Attributes:
        path: Where it is.
        step: Its extremes in the step.
        replay: Those in the replay.
    """

    path: TensorPath
    step: Extremes
    replay: Extremes

    def __str__(self) -> str:
        """The difference as a clause."""
        return f"{self.path.of_module()} is the first that differs: {self._what()}"

    def _what(self) -> str:
        step, replay = self.step, self.replay
        for kind in ("nan", "inf"):
            numbers = (getattr(step, f"num_{kind}"), getattr(replay, f"num_{kind}"))
            if numbers[0] != numbers[1]:
                return f"{numbers[0]} {kind} in the step, {numbers[1]} in the replay"
        extreme = "smallest" if step.abs_max == replay.abs_max else "largest"
        name = "abs_min" if extreme == "smallest" else "abs_max"
        values = told_apart(getattr(step, name), getattr(replay, name))
        return f"{extreme} magnitude {values[0]} in the step, {values[1]} in the replay"


_Key = tuple[TensorPath, str]  # and the dtype


class ReplayCheck(Observer):
    """Watches a replay as the step was watched, and compares their extremes.

    Calls are compared, and the gradients of their outputs. Gradients of parameters are
    not: what clips, unscales and reduces them runs after what is replayed.

    Args:
        watches: The watches of the step, whose recorders note their rows.
        make_watches: Makes watches alike.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        make_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._step = _stats_of(watches)
        self._replay = {kind: dict[_Key, Extremes]() for kind in _KINDS}
        self._make_watches = make_watches

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within. Its own errors leave it without a comparison."""
        watches = self._attached()
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                for watch in watches:
                    watch.frames.send()
                    watch.frames.receive(is_lagged=False)
                self._replay = _stats_of(watches)
                collect(watches)  # what was bad, and held for evidence, is let go
                for watch in watches:
                    watch.end_judgement(is_lagged=False)
            for watch in watches:
                watch.detach()

    def _attached(self) -> list[ModelWatch]:
        if not any(self._step.values()):
            return []
        watches = []
        with contextlib.suppress(Exception):
            watches = self._make_watches()
            for watch in watches:
                watch.recorder.note_row()
                watch.attach()
        return watches

    def difference(self) -> Difference | None:
        """The first value that differs from the step's, in execution order."""
        forward = self._differing(_C.FrameKind.FORWARD)
        if any(forward):
            return next(filter(None, forward))
        backward = self._differing(_C.FrameKind.BACKWARD)
        # If the first differs, so may what the two backwards began with.
        is_given_alike = bool(backward) and backward[0] is None
        return next(filter(None, backward), None) if is_given_alike else None

    def has_same_gradients(self) -> bool:
        """True if outputs of modules were given the gradients of the step."""
        backward = self._differing(_C.FrameKind.BACKWARD)
        return bool(backward) and not any(backward)

    def _differing(self, kind: _C.FrameKind) -> list[Difference | None]:
        """For each entry of both: how it differs, or None."""
        step = self._step[kind]
        return [
            None
            if _are_same(step[key], stats)
            else Difference(key[0], step[key], stats)
            for key, stats in self._replay[kind].items()
            if key in step and step[key].num_tensors == stats.num_tensors
        ]


def _stats_of(
    watches: Sequence[ModelWatch],
) -> dict[_C.FrameKind, dict[_Key, Extremes]]:
    """The extremes that recorders have noted, by their place, in execution order."""
    found = {kind: dict[_Key, Extremes]() for kind in _KINDS}
    for watch in watches:
        row = watch.recorder.running_row()
        columns = watch.recorder.row_columns(0)[: row.num_entries]
        for column, stats in zip(columns, _rows(row), strict=True):
            own = found.get(column.place.kind)
            if own is not None and stats.num_tensors:
                own[path_of(watch, column.place), column.dtype] = stats
    return found


def _rows(row: _C.StepRow) -> Iterator[Extremes]:
    columns: list[Any] = [
        unpacked(getattr(row, name), row.num_entries, name not in EXTREMES)
        for name in Extremes._fields
    ]
    return map(Extremes, *columns)


def _are_same(one: Extremes, other: Extremes) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


class UncertainError(Exception):
    """Raised where lines cannot be run as they ran in the step."""


class SameStep(Observer):
    """Compares the forwards and the loss of a replay with those of the step.

    Attributes:
        num_forwards: How many forwards it has made.
        is_given_alike: They are the step's, with the same inputs and random states.
        has_same_graph: The loss was computed by the same operations of autograd, or
            that of the step is not held.
        has_same_loss: The loss is the same.
        at_first: The random states at the first forward; None if there was none.
    """

    def __init__(
        self, call: Call, forwards: Sequence[ModelCall], loss: torch.Tensor | None
    ) -> None:
        self._call, self._forwards, self._loss = call, forwards, loss
        self._forget()

    def _forget(self) -> None:
        self.num_forwards = self._depth = 0
        self.is_given_alike = True
        self.has_same_graph = self.has_same_loss = False
        self.at_first: RandomStates | None = None

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Sees the outermost forwards, and keeps optimizers from stepping."""
        self._forget()
        handles = Handles()
        for model in models.values():
            before = model.register_forward_pre_hook(
                self._before, prepend=True, with_kwargs=True
            )
            handles += [
                before,
                model.register_forward_hook(self._after, always_call=True),
            ]
        with handles, without_optimizer_steps():
            yield

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        self.num_forwards += 1
        if self.num_forwards > len(self._forwards):
            self.is_given_alike = False
            return
        kept = self._forwards[self.num_forwards - 1]
        if self.num_forwards == 1:
            self.at_first = kept.ambient.random.of_now()
        with _C.Hidden():
            now, then = (
                tensors_in(e, CALL_DEPTH) for e in ((args, kwargs), kept.batch)
            )
            is_alike = len(now) == len(then) and all(map(_is_same, now, then))
        self.is_given_alike &= is_alike and not kept.ambient.random.drawn()

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def on_output(self, call: Call, output: Any) -> None:
        """Compares the loss."""
        if call.function is not self._call.function:
            self._forget()  # a call that was made before those lines
            return
        self.is_given_alike &= self.num_forwards == len(self._forwards)
        if self._loss is None:
            self.has_same_graph = True
        elif isinstance(output, torch.Tensor):
            self.has_same_graph = has_compiled() or _is_same_graph(output, self._loss)
            with _C.Hidden():
                self.has_same_loss = _is_same(output, self._loss)


@contextlib.contextmanager
def without_optimizer_steps() -> Iterator[None]:
    """Raises UncertainError where an optimizer is about to step within."""

    def refuse(optimizer: object, args: object, kwargs: object) -> None:
        raise UncertainError("the lines make a step")

    with register_optimizer_step_pre_hook(refuse):
        yield


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    one, other = one.detach(), other.detach()
    if not (is_float(one) and is_readable(one) and is_readable(other)):
        return is_same_bits(one, other)
    return torch.allclose(one, other, rtol=_RTOL, atol=0.0, equal_nan=True)


def _is_same_graph(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors were computed by the same nodes, of the same parameters."""
    waiting: list[tuple[Any, Any]] = [(one.grad_fn, other.grad_fn)]
    seen: dict[Any, Any] = {}
    while waiting and len(seen) < _MOST_NODES:
        a, b = waiting.pop()
        if a is None or b is None or a in seen:
            if a is not b and seen.get(a) is not b:
                return False
            continue
        seen[a] = b
        own, others = a.next_functions, b.next_functions
        of = getattr(a, "variable", None)
        is_same_leaf = of is getattr(b, "variable", None)  # or a tensor made anew
        is_alike = [i for _, i in own] == [
            i for _, i in others
        ] and a.name() == b.name()
        if not is_alike or not (is_same_leaf or not isinstance(of, nn.Parameter)):
            return False
        waiting += [(x, y) for (x, _), (y, _) in zip(own, others, strict=True)]
    return not waiting
