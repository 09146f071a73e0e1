"""The padding of a forward: places that nothing it returns elsewhere reads.

What it returns there nobody uses, and half precision may move that far where all else
stays near. Which of a mask's two values is padding is found by experiment: with other
inputs there, in float32, what is returned elsewhere stays the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..calls import Call
from ..replayer import Patch

_MOST = 2  # masks that are tried, each with both values: a forward in float32 each


class Padding(NamedTuple):
    """Where a forward's outputs are read, as a mask that it is given tells.

    Attributes:
        places: True there.
        where: The same in words.
    """

    places: torch.Tensor
    where: str

    def read(self, output: torch.Tensor) -> torch.Tensor:
        """The values of an output there; all of one that has no such places."""
        return output[self.places] if _has_places(output, self.places) else output


@dataclass(frozen=True)
class OtherInputs(Patch):
    """Gives the last call other inputs where a mask has one of its values.

    Attributes:
        mask: The mask's name among the leaves of the call.
        is_set: Where it is not 0; else where it is.
    """

    mask: str
    is_set: bool
    is_same_step = False

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """See `Patch`."""
        *before, last = calls
        mask = dict(last.leaves())[self.mask]
        places = (mask != 0) == self.is_set

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is mask or not _has_places(tensor, places):
                return tensor
            other = tensor.clone()
            other[places] = tensor[~places][0]
            return other

        return [*before, last.with_batch(changed)]


def find_padding(
    call: Call,
    outputs: Sequence[torch.Tensor],
    run: Callable[[Patch], Sequence[torch.Tensor]],
) -> Padding | None:
    """Finds the padding of a call; None where it has none, or no mask tells.

    Args:
        call: The call.
        outputs: What it returns in float32.
        run: Returns what it does with a patch, in float32 too; nothing if it fails.
    """
    for name, mask in list(_masks(call))[:_MOST]:
        for is_set in (False, True):
            found = Padding((mask != 0) != is_set, _where(name, not is_set))
            others = run(OtherInputs(name, is_set))
            are_same = len(others) == len(outputs) and all(
                torch.equal(found.read(other), found.read(own))
                for other, own in zip(others, outputs, strict=True)
            )
            if are_same and not all(map(torch.equal, others, outputs)):
                return found
    return None


def _masks(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    leaves = call.leaves()
    for name, mask in leaves:
        if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()):
            continue
        has_both = bool((mask == 0).any()) and bool((mask == 1).any())
        if has_both and any(_has_places(t, mask) for _, t in leaves if t is not mask):
            yield name, mask


def _has_places(tensor: torch.Tensor, places: torch.Tensor) -> bool:
    return tensor.shape[: places.dim()] == places.shape


def _where(name: str, is_set: bool) -> str:
    return f"where `{name}` is {'not ' * is_set}0"
