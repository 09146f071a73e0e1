"""Which numbers an operation has read for some of those that it has written.

Both are places in memory, so that views are no matter. Of an operation that computes
each element by itself they are known. Any other is run again in float64, on numbers a
little off: what the gradient of the results reaches is what they were made of.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.torch_ops import op_of
from ..base.tree import tensors_in
from ..guard.report.gist import told_number
from .float64 import computed
from .memory import TapedTensor
from .op_call import OpCall
from .tensor_kinds import is_float

_LARGEST = 2**23  # elements that an operation may have read and written; chosen


@dataclass(frozen=True, eq=False)
class Numbers:
    """Some of the numbers that an operation has read or written.

    Attributes:
        tensor: The tensor that they are in.
        at: Their places in its memory.
    """

    tensor: TapedTensor
    at: torch.Tensor

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The numbers, in float64."""
        return self.tensor.whole[self.at].double()

    @property
    def is_zero(self) -> bool:
        """True if all are 0."""
        return not bool(self.values.any())

    @property
    def mask(self) -> torch.Tensor:
        """Where they are in their tensor."""
        return self.within(*self.tensor[3:])

    @property
    def is_one(self) -> bool:
        """True if all are the same."""
        return bool((self.values == self.values[0]).all())

    @property
    def spoken(self) -> str:
        """The number, or how many they are."""
        one = told_number(float(self.values[0]))
        return one if self.is_one else f"{len(self.at)} numbers"

    def within(
        self, size: torch.Size, stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Where they are in a tensor of the same memory."""
        memory = torch.zeros_like(self.tensor.whole, dtype=torch.bool)
        memory[self.at] = True
        return memory.as_strided(size, stride, offset)

    def of(self, which: torch.Tensor) -> Numbers:
        """Some of them."""
        return Numbers(self.tensor, self.at[which])


def chooses(op: OpCall) -> bool:
    """True if a mask tells which of several numbers it returns."""
    return not {"condition", "mask"}.isdisjoint(op_of(op.base).parameters)


def is_each(op: OpCall) -> bool:
    """True if it computes each element of those at the same place."""
    is_dropout = op.base == "native_dropout"
    return (torch.Tag.pointwise in op.func.tags or is_dropout) and not chooses(op)


def _places(tensor: TapedTensor) -> torch.Tensor:
    """The places in memory of all its elements."""
    return tensor.of(torch.arange(tensor.whole.numel(), device=tensor.device))


def writers_of(numbers: Numbers, reader: OpCall) -> list[tuple[OpCall | None, Numbers]]:
    """The writers of some numbers that an operation reads, each with its own.

    None stands for what nobody is known to have written.
    """
    tensor, found = numbers.tensor, list[tuple[OpCall | None, Numbers]]()
    left = numbers.within(tensor.whole.shape, (1,), 0)
    for maker in reversed(reader.read_from):
        if not maker.is_held:
            break  # it may have written them
        for own in maker.results:
            if own.memory == tensor.memory and own.dtype == tensor.dtype:
                at = _places(own)[own.of(left)]
                if len(at):
                    found.append((maker, Numbers(own, at)))
                    left[at] = False
    rest = left.nonzero().flatten()
    return [*found, (None, Numbers(tensor, rest))] if len(rest) else found


def read_for(op: OpCall, made: Numbers) -> list[Numbers] | None:
    """The numbers that an operation has read for some that it has written.

    Returns:
        Those of each tensor, in the order of arguments; of an operation that computes
        each element by itself in the order of the results. None if it is not known.
    """
    if op.is_constant:
        return []
    if sum(each.contents.numel for each in op.taped) > _LARGEST:
        return None
    floats = {i: each for i, each in op.given.items() if each.is_float}
    if is_each(op):
        size = made.tensor.size
        places = [_places(each).broadcast_to(size) for each in floats.values()]
        at = [each[made.mask] for each in places]
        return [Numbers(*pair) for pair in zip(floats.values(), at, strict=True)]
    try:
        gradients = _gradients(op, floats, made)
    except Exception:
        return None  # it has none, or it is random
    found = [(floats[i], each != 0) for i, each in gradients.items()]
    return [Numbers(t, _places(t)[m]) for t, m in found if bool(m.any())]


def _gradients(
    op: OpCall, floats: dict[int, TapedTensor], made: Numbers
) -> dict[int, torch.Tensor]:
    """The gradients of some results of an operation that is run again in float64.

    At numbers a little off: at 0 a square and a product of zeros have no gradient, and
    at equal numbers a deviation has none. The gradient of a maximum reaches all numbers
    that are equal to it.
    """
    is_exact = op.base.removeprefix("a") in ("max", "min")
    own = torch.Generator(made.tensor.device).manual_seed(0)

    def off(tensor: torch.Tensor) -> torch.Tensor:
        factors = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=own)
        if is_exact:
            return tensor.requires_grad_()
        return (tensor * (1 + 1e-9 * factors) + 1e-60 * factors).requires_grad_()

    args = op.args[:2] if op.base == "embedding" else op.args  # no padding is left out
    with torch.inference_mode(False), torch.enable_grad():
        inputs = {i: off(each.value.double()) for i, each in floats.items()}

        def wide(value: torch.Tensor) -> torch.Tensor:
            known = inputs.get(id(value))
            return (op.given[id(value)].value if known is None else known).clone()

        output = computed(op.func, op.base, args, op.kwargs, wide)
        results = [each for each in tensors_in(output) if is_float(each)]
        place = next(i for i, e in enumerate(op.results) if e is made.tensor)
        some = results[place][made.mask]
        weights = torch.empty_like(some).uniform_(0.5, 1.5, generator=own)
        if not some.requires_grad:
            return {}
        total, leaves = (some * weights).sum(), [*inputs.values()]
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    pairs = zip(inputs, found, strict=True)
    return {i: each for i, each in pairs if each is not None}


def index_text(mask: torch.Tensor) -> str | None:
    """Where a mask is set, such as "[9, :]"; "" for all, None if no index tells."""
    if bool(mask.all()):
        return ""
    axes = [[*{*each.tolist()}] for each in mask.nonzero().unbind(1)]
    texts, num = list[str](), 1
    for places, size in zip(axes, mask.shape, strict=True):
        if len(places) not in (1, size):
            return None
        texts.append(str(places[0]) if len(places) == 1 else ":")
        num *= len(places)
    return f"[{', '.join(texts)}]" if num == int(mask.sum()) else None
