"""Changes of torch calls, as data that every rank can apply to its own replay."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ... import _C
from ...base.text import dtype_name
from ...base.torch_ops import has
from ...torch_internals.tensor_internals import pytree
from ..bounds import least_divisor
from ..replayer import Patch
from ..torch_calls import Key, TorchCall, TorchCalls, Value, tensors_among
from ..wider import CAST_METHODS, cast_all
from .patterns import Found, computed, matched
from .rules import RULES
from .written import short_text

# What is held for calls that are still to come, at most: what one layer's pattern reads
# is let go of with the layer, but a line may run where no pattern of it follows.
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class RuleChange:
    """A rule for the calls of one expression.

    Attributes:
        key: The key of the calls.
        rule: The rule's place in `RULES`.
        dtype: The dtype that numbers are chosen by.
        number: One of several numbers that are tried.
        dim: The dimensions along which a maximum is subtracted.
        reads: The keys of the calls whose inputs it reads.
    """

    key: Key
    rule: int
    dtype: torch.dtype
    number: float = 0.0
    dim: Any = None
    reads: frozenset[Key] = frozenset()

    def found(self, call: TorchCall) -> Found | None:
        """The expression in place of a call of its key; None for the call itself."""
        rule = RULES[self.rule]
        return matched(rule, call, self.dtype, self.number, self.dim, is_chosen=True)


@dataclass(frozen=True)
class InWider:
    """Calls in a wider dtype, with those behind them until a result fits again.

    Attributes:
        roots: The keys of the first calls.
        ends: The keys of the calls whose results are cast back.
        stops: Those of calls whose results were in that dtype as the program is.
        narrow: The dtype that it stands for: of half precision float32 does, and of
            float32 float64.
    """

    roots: frozenset[Key]
    ends: frozenset[Key] = frozenset()
    stops: frozenset[Key] = frozenset()
    narrow: torch.dtype = torch.float16

    @property
    def wide(self) -> torch.dtype:
        """The wider dtype."""
        return torch.float64 if self.narrow is torch.float32 else torch.float32


Change = RuleChange | InWider


@dataclass(frozen=True)
class CallPatch(Patch):
    """The replay computes something else in place of some torch calls.

    Attributes:
        changes: The changes; of each key one.
        num_applied: How often each was made in runs of this process, by its place.
        num_idle: How often of these it was the call itself that was computed.
        moved: The largest change of a result that is finite without it, relative to
            the largest of the call, in the calls that it was made for, by its place.
        near_zero: The calls behind the first change that divide by what is near 0, each
            in words, with its magnitude.
        needs_wide: The keys of calls that divide by what is near 0 in the dtype that a
            wider one stands for.
    """

    changes: tuple[Change, ...]
    num_applied: collections.Counter[int] = field(
        default_factory=collections.Counter, compare=False
    )
    num_idle: collections.Counter[int] = field(
        default_factory=collections.Counter, compare=False
    )
    moved: dict[int, float] = field(default_factory=dict, compare=False)
    near_zero: dict[str, float] = field(default_factory=dict, compare=False)
    needs_wide: set[Key] = field(default_factory=set, compare=False)

    @contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Patch`."""
        with ChangedCalls(self):
            yield

    @property
    def is_applied(self) -> bool:
        """True if each change was made, and not all of them left all as it was."""
        are_made = all(self.num_applied[i] for i in range(len(self.changes)))
        return are_made and self.num_idle != self.num_applied

    @property
    def leaves_finite(self) -> bool:
        """True if each change left each result as it was that is finite without it."""
        return len(self.moved) == len(self.changes) and not any(self.moved.values())


class ChangedCalls(TorchCalls):
    """Makes changes of torch calls while it is entered.

    Args:
        patch: The changes.
    """

    def __init__(self, patch: CallPatch) -> None:
        super().__init__()
        self._patch = patch
        self._by_key: dict[Key | None, tuple[int, RuleChange]] = {}
        self._wider: list[tuple[int, InWider]] = []
        self._reads: set[Key] = set()
        self._held: collections.deque[tuple[Value, int]] = collections.deque()
        self._num_bytes = 0
        self._wide: Any = WeakIdKeyDictionary()
        # To make the key of each call takes longer than to look at its name.
        self._names: set[str] = set()
        for place, change in enumerate(patch.changes):
            if isinstance(change, InWider):
                keys = set(change.roots)
                self._wider.append((place, change))
            else:
                keys = {change.key, *change.reads}
                self._by_key[change.key] = place, change
                self._reads |= change.reads
            self._names |= {name for name, _ in keys}

    def run(self, call: TorchCall, args: Any, kwargs: Any) -> Any:
        """Runs a call, or what a change puts in its place."""
        key = call.key if call.name in self._names else None
        if key in self._reads:
            self._hold(call.inputs)
        place, change = self._by_key.get(key, (0, None))
        with _C.OwnCode(change is not None):  # which reads no tensor
            found = None if change is None else change.found(call)
        if found is not None and all(map(_is_known, found.inputs())):
            self._patch.num_applied[place] += 1
            plain = _plain(call, args, kwargs)
            result = _instead(found, call, args, kwargs)
            self._patch.num_idle[place] += found.is_idle
            moved = _moved(plain, result)
            if moved is not None:
                self._patch.moved[place] = max(moved, self._patch.moved.get(place, 0.0))
            for each in found.calls:
                for value in (*each.inputs, *each.results):
                    value.release()
            return result
        is_root = any(key in wide.roots for _, wide in self._wider)
        if self._patch.num_applied or is_root:
            self._note_divisor(call)
        for place, wide in self._wider:
            if key in wide.roots or self._has_wide(args, kwargs):
                return self._run_wider(place, wide, call, args, kwargs)
        return call.func(*args, **kwargs)

    def _note_divisor(self, call: TorchCall) -> None:
        """Notes a divisor near 0, which may be 0 for other weights and batches."""
        if not has(call.plain_name, "divides"):
            return
        by = call.operands[1]
        values = by.tensor if isinstance(by, Value) and not is_bounded(by) else None
        if values is None or not values.is_floating_point() or not values.numel():
            return
        with _C.Hidden(), torch.no_grad():
            values = values.abs()
            # What divides by 0 is left out afterwards.
            least = float(values.where(values > 0, torch.inf).min())
        if any(least < least_divisor(wide.narrow) for _, wide in self._wider):
            self._patch.needs_wide.add(call.key)
        if least < least_divisor(values.dtype):
            text = f"`{short_text(call)}` ({call.sites[0].text})"
            text = (
                f"{text} divides by {least:.3g}, near 0 for {dtype_name(values.dtype)}"
            )
            self._patch.near_zero[text] = least

    def _hold(self, values: list[Value]) -> None:
        for value in values:
            num_bytes = value.hold()
            self._held.append((value, num_bytes))
            self._num_bytes += num_bytes
        while self._num_bytes > _MOST_BYTES and len(self._held) > len(values):
            value, num_bytes = self._held.popleft()
            value.release()
            self._num_bytes -= num_bytes

    def _has_wide(self, args: Any, kwargs: Any) -> bool:
        return any(each in self._wide for each in tensors_among((args, kwargs)))

    def _run_wider(
        self, place: int, change: InWider, call: TorchCall, args: Any, kwargs: Any
    ) -> Any:
        if call.is_in_place:
            return call.func(*args, **kwargs)
        self._patch.num_applied[place] += call.key in change.roots
        is_cast = call.func is getattr(torch.Tensor, CAST_METHODS[change.narrow])
        wider = getattr(torch.Tensor, CAST_METHODS[change.wide])
        func = wider if is_cast else call.func
        casts = {change.narrow: change.wide}
        args, kwargs = cast_all((args, kwargs), casts)
        result = func(*args, **kwargs)  # autocast, which stays on, may cast again
        if any(result is each for each in tensors_among((args, kwargs))):
            result = result.view_as(result)  # what is known of it is of this one alone
        return pytree.tree_map(lambda each: self._back(each, change, call), result)

    def _back(self, each: Any, change: InWider, call: TorchCall) -> Any:
        if not isinstance(each, torch.Tensor) or each.dtype != change.wide:
            return each
        if call.key in change.ends:
            return each.to(change.narrow)
        if call.key in change.stops:
            return each
        self._wide[each] = True
        return each


def is_bounded(value: Value) -> bool:
    """True for what the code itself keeps from 0, such as `x.clamp(min=1e-30)`."""
    made = value.call
    if made is None or made.plain_name not in ("add", "clamp"):
        return False
    numbers = (e for e in made.operands[1:] if isinstance(e, (int, float)))
    return any(each > 0 for each in numbers)


def _plain(call: TorchCall, args: Any, kwargs: Any) -> Any:
    """The result of a call as it is, or None where it may be made once alone."""
    if call.is_in_place or has(call.name, "random"):
        return None
    with torch.no_grad():
        return call.func(*args, **kwargs)


@torch.no_grad()
def _moved(plain: Any, changed: Any) -> float | None:
    """The largest difference of results that were finite, by the largest of them."""
    are_tensors = isinstance(plain, torch.Tensor) and isinstance(changed, torch.Tensor)
    if not are_tensors or plain.shape != changed.shape or plain.is_complex():
        return None
    if plain.dtype is torch.bool:  # a mask has no size
        return None
    plain, changed = plain.double(), changed.double()
    are_finite = plain.isfinite() & changed.isfinite()
    plain, changed = plain[are_finite], changed[are_finite]
    size = float(plain.abs().max()) if plain.numel() else 0.0
    return float((changed - plain).abs().max()) / size if size else None


def _is_known(given: Any) -> bool:
    value = given.value
    return not isinstance(value, Value) or value.is_as_it_was


def _instead(found: Found, call: TorchCall, args: Any, kwargs: Any) -> Any:
    if not call.is_in_place:
        return computed(found, call, args, kwargs)
    out = kwargs.get("out")
    target = args[0] if out is None else out
    for value in call.inputs:
        if value.tensor is target:
            value.keep_copy()
    kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    new = computed(found, call, args, kwargs)
    if (
        new is not None and new is not target
    ):  # it was not written to by the call itself
        target.copy_(new)
    return None if call.name == "__setitem__" else target
