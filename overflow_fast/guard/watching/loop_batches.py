"""The batches that a trainer takes from its loader, held weakly.

`training_step()` of a LightningModule is no forward: only the trainer knows its batch.
"""

from __future__ import annotations

import operator

import torch

from .inputs import Given, finite_places, is_plain, samples

_MAX_BATCHES = 8  # the last ones; chosen. An older batch is not named in a report


class LoopBatch:
    """One batch: its tensors by their places in it.

    Args:
        batch: The batch, in any nesting.
    """

    def __init__(self, batch: object) -> None:
        self._given = Given((batch,))
        self._tensors = {
            f"batch{label.removeprefix('input[0]')}": held
            for label, held in self._given.tensors.items()
        }

    def place_of(
        self, tensor: torch.Tensor | None, model: torch.nn.Module | None = None
    ) -> str:
        """Finds the place of a tensor, or of its base, in the batch; "" if it has none.

        Incurs a CPU-GPU sync if it is there.

        Args:
            tensor: The tensor; None for none.
            model: The model that is trained with it.
        """
        for is_same in (operator.is_, _shares_memory):
            for place, held in self._tensors.items():
                own = held.unchanged()
                if own is not None and is_same(own, tensor):
                    return f"`{place}`{samples(own, self._given.are_samples(model))}"
        return ""

    def bad_places(self, model: torch.nn.Module | None = None) -> list[str] | None:
        """Lists the non-finite places of the batch; None if some cannot be checked.

        Incurs a CPU-GPU sync for each tensor on a device.

        Args:
            model: The model that is trained with it.
        """
        places = []
        for place, held in self._tensors.items():
            tensor = held.unchanged()
            if tensor is None:
                return None
            if not is_plain(tensor):
                if tensor.is_floating_point() or tensor.is_complex():
                    return None
            elif not bool(finite_places(tensor).all()):
                found = samples(tensor, self._given.are_samples(model))
                places.append(f"`{place}`{found}")
        return places if places or not self._given.unseen else None


class LoopBatches:
    """The last batches, by the forwards that belong to them."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[int, LoopBatch | None]] = {}

    def note(self, number: int, num_calls: int, batch: LoopBatch | None) -> None:
        """Notes the batch of the next forwards, until another one is noted.

        Args:
            number: The number of the next forward.
            num_calls: How many calls of modules were recorded by now.
            batch: The batch; None for none.
        """
        # Calls with this number may belong to the batch that was noted before.
        is_ambiguous = self._batches.get(number, (num_calls,))[0] != num_calls
        self._batches[number] = (-1, None) if is_ambiguous else (num_calls, batch)
        if len(self._batches) > _MAX_BATCHES:
            del self._batches[next(iter(self._batches))]

    def of(self, number: int) -> LoopBatch | None:
        """Returns the batch of a forward, or None if it is not known."""
        numbers = [each for each in self._batches if each <= number]
        return self._batches[max(numbers)][1] if numbers else None


def _shares_memory(own: object, other: object) -> bool:
    if not is_plain(own) or not is_plain(other) or own.dtype != other.dtype:
        return False
    begin = own.untyped_storage().data_ptr()
    return begin != 0 and begin == other.untyped_storage().data_ptr()
