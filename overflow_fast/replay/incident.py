"""A step that is explained, as a guard saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Incident:
    """The step that is explained, as a guard saw it.

    Attributes:
        kind: Of the first bad entry: see `BadEntry.kind`; "" where nobody watched.
        module: The name of its module, or "".
        is_made: Whether that module is known to have made it.
        reaches_loss: Whether loss, outputs or gradients were bad.
        gradients: The bad gradients of parameters, by name.
        weights: The largest magnitudes of weights in the last steps, by name, where
            they were finite.
        steps_between: How many steps are between two of these magnitudes.
        largest_gradient: That of all gradients in the last step.
        optimizers: The optimizers.
        num_dropped: How many forwards of the step were too many to be kept.
        hidden_by: Why forwards of the step could not be kept, or "".
        is_late: Whether the weights may have been stepped since.
        had_gradients: See `Capture`.
        is_of_flag: Whether a device's overflow flag is all that was seen.
    """

    kind: str = ""
    module: str = ""
    is_made: bool = False
    reaches_loss: bool = True
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    steps_between: int = 1
    largest_gradient: float = 0.0
    optimizers: Sequence[torch.optim.Optimizer] = ()
    is_late: bool = False
    is_of_flag: bool = False
    num_dropped: int = 0
    hidden_by: str = ""
    had_gradients: bool = False
