"""A batch of an evaluation inside a training, which trainers announce."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...base.tree import tensors_in
from .inputs import finite_places, is_batch_first, is_plain, samples


@dataclass(frozen=True)
class Evaluation:
    """A batch of an evaluation inside a training.

    Attributes:
        batch: Its index in the evaluation, from 0.
        loader: The index of the loader, where there are several; 0 for the first.
    """

    batch: int
    loader: int = 0

    def text(self, output: object, model: torch.nn.Module | None) -> str:
        """Writes which batch of the evaluation it is, and which rows are non-finite.

        Incurs a CPU-GPU sync for each tensor on a device.

        Args:
            output: What the model has returned; None if that is not known.
            model: The model.
        """
        found = [each for each in tensors_in(output) if is_plain(each)]
        bad = (each for each in found if not bool(finite_places(each).all()))
        rows = (samples(each, is_batch_first(model)) for each in bad)
        of_loader = f" of loader {self.loader}" * bool(self.loader)
        which = f"batch {self.batch} (from 0){of_loader} of an evaluation"
        return f"It is of {which}{next(filter(None, rows), '')}; the run goes on."
