"""Operations of a trace again in float64: one of them, or several after another.

1. `computed()` runs one operation with tensors that the caller widens: by the rule that
   the result must be that of the same operation, else it raises.
2. `in_float64()` is that for an operation that has just run, of what it was given. Of
   one that is too large, `part_of()` makes the part that makes one bad value.
3. `Float64Run` is that for operations that a table holds. What one of them returns or
   writes to is what the next one reads, in float64 and by its place in memory, so that
   views are views. What none has written is as it was before the first.

The whole step in float64 is no matter of operations: see `remedies/true_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..base.tensors import PLAIN, real_parts
from ..base.torch_ops import draws, has, op_of
from ..base.tree import mapped, tensors_in
from ..scanner.ops import scan
from ..torch_internals.replaying import attention_by_definition, schema_names
from .bounds import is_near
from .memory import TapedTensor
from .op_call import OpCall
from .tensor_kinds import as_plain, is_float

# Of all arguments of an operation together, which are copied to float64: larger ones
# may end the run for want of memory, and of smaller ones a part may be computed where
# all could be.
_MAX_NUMEL = 2**27


def computed(
    func: Any,
    base: str,
    args: Any,
    kwargs: Any,
    wide: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Runs an operation in float64, and returns its results.

    Args:
        func: The operation.
        base: Its name without namespace and overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        wide: Returns the float64 values of a tensor among them.

    Raises:
        NotImplementedError: If that is not the same operation.
    """
    require_repeatable(func, args, kwargs)

    def widened(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        return wide(value)

    kinds = torch.Tensor, torch.dtype
    args, kwargs = mapped((args, kwargs), widened, kinds=kinds)
    names = schema_names(func)
    if "half_to_float" in names:  # as `_softmax` has
        args = (*args[:2], False)
    if base.startswith("_scaled_dot_product") and "backward" not in base:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return attention_by_definition(
            *(given["query"], given["key"], given["value"]),
            attn_mask=given.get("attn_mask", given.get("attn_bias")),
            is_causal=given.get("is_causal", False),
            scale=given.get("scale"),
        )
    return func(*args, **kwargs)


def with_inputs_times(op: OpCall, factor: float) -> Any:
    """Runs an operation in its own dtype with its inputs times a number.

    Returns:
        Its output.
    """
    require_repeatable(op.func, op.args, op.kwargs)

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        value = as_plain(op.before(tensor)).detach()
        return value * factor if is_float(value) else value.clone()

    args, kwargs = mapped((op.args, op.kwargs), scaled, kinds=(torch.Tensor,))
    return op.func(*args, **kwargs)


def require_repeatable(func: Any, args: Any, kwargs: Any) -> None:
    """Raises NotImplementedError for an operation that may do otherwise again."""
    if not str(func).startswith(("aten.", "prims.")):
        raise NotImplementedError("an operation of an extension")
    if draws(func, args, kwargs):
        raise NotImplementedError("it draws random numbers")


def in_float64(op: OpCall) -> tuple[Any, dict[int, torch.Tensor]]:
    """Runs it in float64: its output, and what it writes to, by what it wrote to."""
    written: dict[int, torch.Tensor] = {}

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        before = op.before(tensor)
        value = as_plain(before).detach()
        if value.is_complex():
            found = value.to(torch.complex128)
        else:
            found = value.double() if value.is_floating_point() else value.clone()
        return found if before is tensor else written.setdefault(id(tensor), found)

    return computed(op.func, op.base, op.args, op.kwargs, wide), written


_Cut = Mapping[int, int]  # the place that is left of an axis, by axis


def is_large(op: OpCall) -> bool:
    """True if the arguments of an operation are too large to be copied."""
    arguments = [*map(as_plain, tensors_in((op.args, op.kwargs)))]
    if any(type(t) not in PLAIN for t in arguments):
        raise NotImplementedError("a tensor subclass")
    return sum(tensor.numel() for tensor in arguments) > _MAX_NUMEL


def part_of(
    op: OpCall, bad: torch.Tensor, index: tuple[int, ...]
) -> tuple[OpCall, torch.Tensor, tuple[int, ...]]:
    """The part of a large operation that makes one bad value, or its row.

    That it is the same computation is found by experiment: it is run as it was, and
    must return that part of the result.

    Args:
        op: The operation, which has run.
        bad: A tensor that it returned, which is not finite.
        index: A place in it.

    Returns:
        The operation with parts of its arguments, which has run as well, and `bad` and
        `index` there.

    Raises:
        NotImplementedError: If there is no such part, or it is too large as well.
    """
    require_repeatable(op.func, op.args, op.kwargs)
    results = [t for t in op.returned if is_float(t)]
    place = next((i for i, each in enumerate(results) if each is bad), None)
    if op.written or place is None:
        raise NotImplementedError("too large")
    for axes, cuts in _cuts(op, bad, index):
        part = _cut(op, cuts)
        if is_large(part):
            continue
        try:
            again = part.run()
        except (RuntimeError, IndexError):
            continue
        own = [t for t in tensors_in(again) if is_float(t)][place]
        bad_part = _narrowed(bad, dict(zip(axes, index, strict=False)))
        if is_near(real_parts(own), real_parts(bad_part)):
            inner = [0 if axis in axes else i for axis, i in enumerate(index)]
            return part, own, tuple(inner)
    raise NotImplementedError("too large")


def _cut(op: OpCall, cuts: Sequence[_Cut]) -> OpCall:
    left = iter(cuts)

    def part(value: Any) -> Any:
        is_cut = isinstance(value, torch.Tensor)
        return _narrowed(value, next(left)) if is_cut else value

    args = tuple(map(part, op.args))
    return OpCall(op.func, args, {k: part(value) for k, value in op.kwargs.items()})


def _cuts(
    op: OpCall, bad: torch.Tensor, index: tuple[int, ...]
) -> Iterator[tuple[Sequence[int], Sequence[_Cut]]]:
    """Yields axes of the result to cut, from the first on, and each argument's cut."""
    values = *op.args, *op.kwargs.values()
    given = [each for each in values if isinstance(each, torch.Tensor)]
    every = range(len(index))

    def broadcast(tensor: torch.Tensor) -> _Cut:
        places = zip(tensor.shape, index[len(index) - tensor.dim() :], strict=True)
        return {axis: i for axis, (n, i) in enumerate(places) if n > 1}

    def rows(tensor: torch.Tensor, axes: Sequence[int]) -> _Cut:
        sizes = zip(tensor.shape, bad.shape, strict=False)
        return {i: index[i] for i, (n, m) in enumerate(sizes) if i in axes and n == m}

    if torch.Tag.pointwise in op.func.tags:
        yield every, [*map(broadcast, given)]
    elif has(op.base, "product"):
        *batch, row, column = index
        left = dict(enumerate([*batch, row]))
        right = {**dict(enumerate(batch)), len(index) - 1: column}
        yield every, [*map(broadcast, given[:-2]), left, right]
    for axes in (every[:-1], every[:1]):
        cuts = [rows(tensor, axes) for tensor in given]
        yield axes, cuts
        yield axes, [*cuts[:1], *({} for _ in cuts[1:])]


def _narrowed(tensor: torch.Tensor, places: _Cut) -> torch.Tensor:
    for axis, place in places.items():
        tensor = tensor.narrow(axis, place, 1)
    return tensor


class Float64Run:
    """Runs operations in float64, one after another.

    Args:
        nudged: The operations whose results of exactly 0 and 1 are moved by the least
            that float64 can.
        times: Numbers that operations before them have made are multiplied by others
            between these two; none for these numbers themselves.

    Attributes:
        failed: The operations that have no float64: their results stay as they were.
    """

    def __init__(
        self, nudged: Sequence[OpCall] = (), times: Sequence[float] = ()
    ) -> None:
        self._nudged, self._times = nudged, times
        self._memory: dict[int, torch.Tensor] = {}  # what they have written
        self.failed: list[OpCall] = []

    def run(self, ops: Sequence[OpCall]) -> Float64Run:
        """Runs further operations; returns itself."""
        for op in ops:
            try:
                self._run(op)
            except Exception:
                self.failed.append(op)
                for own in op.results:
                    self._memory.pop(own.memory, None)
        return self

    def value(self, own: TapedTensor) -> torch.Tensor | None:
        """The value of a result now, or None."""
        memory = self._memory.get(own.memory)
        return None if memory is None else own.of(memory)

    def _run(self, op: OpCall) -> None:
        read, written = set[int](), {each.memory for each in op.results}

        def wide(value: torch.Tensor) -> torch.Tensor:
            tensor = op.given[id(value)]
            read.add(tensor.memory)
            if not tensor.is_float:
                return tensor.value.clone()
            memory = self._memory.get(tensor.memory)
            if memory is None:
                memory = tensor.wide
                if self._times and tensor.contents.is_made:
                    memory = _spread(memory, self._times, len(self._memory))
                    self._memory[tensor.memory] = memory
                elif tensor.memory in written:
                    memory = self._memory[tensor.memory] = memory.clone()
            return tensor.of(memory)

        output = computed(op.func, op.base, op.args, op.kwargs, wide)
        found = [t for t in tensors_in(output) if is_float(t)]
        for own, result in zip(op.results, found, strict=False):
            if own.memory not in read:
                self._put(own, result)
        if any(op is each for each in self._nudged):
            own = op.results[0]
            _nudge(own.of(self._memory[own.memory]), impossible(op))

    def _put(self, own: TapedTensor, result: torch.Tensor) -> None:
        if result.shape != own.size:
            raise ValueError("its float64 result has another shape")
        storage, numel = result.untyped_storage(), own.contents.numel
        is_alike = result.stride() == own.stride and own.offset == 0
        if is_alike and result.is_contiguous() and storage.nbytes() == 8 * numel:
            self._memory[own.memory] = result.view(-1)
            return
        memory = torch.zeros_like(own.whole, dtype=torch.float64)
        own.of(memory).copy_(result)
        self._memory[own.memory] = memory


def _spread(values: torch.Tensor, times: Sequence[float], place: int) -> torch.Tensor:
    """Numbers times others, which differ by place and tensor; of 0, the least ones."""
    own = torch.Generator(values.device).manual_seed(place)
    factors = torch.empty_like(values).uniform_(*times, generator=own)
    least = torch.finfo(torch.float32).smallest_normal
    return values.where(values != 0, least) * factors


def impossible(op: OpCall) -> list[float]:
    """The magnitudes in a result that no function of finite numbers comes to.

    Such as 0 of an `exp`: it is what rounding makes of a small number.
    """
    values = op_of(op.base).never  # the least and the largest, which it comes near to
    if not values:
        return []
    read = [each.value for each in op.given.values() if each.is_float]
    own, *given = scan([op.results[0].value, *read])
    if any(each.has_nan or each.has_inf or each.not_scanned for each in given):
        return []
    return [value for value in values if value in (own.abs_min, own.abs_max)]


def _nudge(values: torch.Tensor, numbers: Sequence[float]) -> None:
    info = torch.finfo(torch.float64)
    if 0.0 in numbers:
        values[values == 0] = info.smallest_normal
    if 1.0 in numbers:
        values[values.abs() == 1] *= 1 - info.eps / 2
