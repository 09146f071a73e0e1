"""The non-finite gradients that a bad step leaves to the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ... import _C
from ...base.modules import named_parameters
from ...torch_internals.tensor_internals import local_part
from ..watching.watch import ModelWatch


class LeftGradients:
    """The non-finite gradients that a bad step leaves to the next one, held weakly.

    Attributes:
        is_new: The step that is judged, or was judged last, has left them.
    """

    def __init__(self) -> None:
        self.is_new = False
        # By the gradients' ids, which others may have later: what they held tells.
        self._held: dict[int, tuple[str, int, _C.Contents]] = {}

    def note(
        self,
        step: int,
        gradients: Mapping[str, torch.Tensor],
        since: Mapping[str, int],
    ) -> None:
        """Notes those of a bad step.

        Args:
            step: Its number.
            gradients: Its bad gradients, by name.
            since: The steps that have left it some of these.
        """
        self.is_new = True
        self._held = {
            id(each): (name, since.get(name, step), _C.Contents(each))
            for name, each in gradients.items()
        }

    def unchanged(self, gradients: Sequence[torch.Tensor]) -> dict[str, int]:
        """Those that nobody has written to since, by name, with their step.

        Args:
            gradients: Those that are there now.
        """
        found = {}
        for each in gradients:
            held = self._held.get(id(each))
            if held is not None and held[2].are_in(each):
                found[held[0]] = held[1]
        return found

    def clear(self) -> None:
        """Forgets them: a step since then was finite."""
        self._held.clear()


def gradients_of(
    watches: Sequence[ModelWatch], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The gradients of parameters with these names, of DTensors this rank's part."""
    wanted = set(names)
    return {
        f"{watch.prefix}{name}": local_part(parameter.grad)
        for watch in watches
        if watch.model is not None
        for name, parameter in named_parameters(watch.model)
        if f"{watch.prefix}{name}" in wanted and parameter.grad is not None
    }
