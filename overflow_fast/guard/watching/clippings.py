"""The norms that clipping computes: a finite one stands for the gradients it is of.

They need not be read again then, which is nearly all of what a tripwire costs.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ... import _C
from ...torch_internals.tensor_internals import local_tensor

# Norms that are kept in a step. Of more the first are dropped, and the gradients that
# they stand for are read. Where nobody judges, a loop would keep them all otherwise.
_MOST = 1000


class Clippings:
    """The norms that clipping has computed in a step. False if there are none."""

    def __init__(self) -> None:
        self._found: deque[_Clipping] = deque(maxlen=_MOST)

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Notes a norm that was computed.

        Args:
            parameters: The parameters whose gradients were clipped.
            norm: The norm that they had.
        """
        if type(norm) is torch.Tensor and not norm.is_inference():
            self._found.append(_Clipping(parameters, norm))

    def standing_for(self, wanted: set[int]) -> tuple[set[int], list[torch.Tensor]]:
        """Finds the norms that stand for all of some gradients together.

        Incurs a CPU-GPU sync for each norm on a device.

        Args:
            wanted: The identities of the parameters that have these gradients.

        Returns:
            The same identities, and the norms; nothing if one gradient is left out.
        """
        found = [(each.norm, each.covered() & wanted) for each in self._found]
        if not wanted or not wanted <= set().union(*(own for _, own in found)):
            return set(), []
        return wanted, [norm for norm, own in found if own]

    def clear(self) -> None:
        """Forgets them: the step was judged."""
        self._found.clear()


class _Clipping:
    """A norm, and the gradients that it was computed of, as they were then.

    It takes 1 microsecond for each parameter, and saves the read of its gradient.

    Args:
        parameters: The parameters whose gradients they are.
        norm: The norm of all of them before.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        self.norm = norm
        self._version = _C.version_of(norm)
        found = [(p, g) for p in parameters if (g := _memory_of(p.grad)) is not None]
        self._seen = [
            (parameter, weakref.ref(gradient), version)
            for (parameter, gradient), version in zip(
                found, _C.versions_of([gradient for _, gradient in found]), strict=False
            )
        ]

    def covered(self) -> set[int]:
        """Returns what the norm stands for; nothing if it is not finite.

        Incurs a CPU-GPU sync.
        """
        # A replay of a graph that is captured would not look again.
        is_captured = self.norm.is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured or _C.version_of(self.norm) != self._version:
            return set()
        return self._unchanged() if math.isfinite(self.norm.item()) else set()

    def _unchanged(self) -> set[int]:
        """Returns the identities of the parameters whose gradients are as they were.

        A later backward writes to a gradient, or puts another in its place.
        """
        same = [
            (parameter, version, gradient)
            for parameter, reference, version in self._seen
            if (gradient := reference()) is not None
            and gradient is _memory_of(parameter.grad)
        ]
        versions = _C.versions_of([gradient for _, _, gradient in same])
        return {
            id(parameter)
            for (parameter, before, _), now in zip(same, versions, strict=False)
            if before == now
        }


def _memory_of(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the tensor that writes to a gradient are counted in, or None.

    fully_shard() adds to the local part of a DTensor, past the DTensor itself.
    """
    if type(gradient) is not torch.Tensor:
        return local_tensor(gradient)
    return None if gradient.is_inference() else gradient
