"""Explains a step from the folder of its evidence, in another process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .explain import BUDGET, investigate
from .explanation import Explanation
from .saved_step import SavedStep, UnreadableStepError

_FEW = 3


def explain_folder(
    folder: str | os.PathLike[str],
    model: nn.Module,
    loss: Callable[..., Any] | None = None,
    *,
    any_weights: bool = False,
    budget: int = BUDGET,
) -> Explanation:
    """Explains the step of a folder with a model that has the step's weights.

    Args:
        folder: The folder of a bad step's evidence: `.../step-00000012`.
        model: The model with its weights, as they were when the step was bad.
        loss: Takes the model and the batch, and returns the loss. The batch is the
            one argument of the model or a dict of them; where the step ran in
            `guard.run()`, a dict of the variables that its function used. None for the
            loss that the model returns.
        any_weights: Explain with weights that are not those of the step, too.
        budget: How many forwards it may run.

    Raises:
        UnreadableStepError: If the folder has no step that can be run, or the weights
            are not those of the step.
    """
    step = SavedStep(Path(folder))
    models = step.models(model)
    other = step.differences(models)
    text = (
        f"{len(other)} weights and buffers are not those of the step: "
        f"{', '.join(other[:_FEW])}{' ...' * (len(other) > _FEW)}"
    )
    if other and not any_weights:
        raise UnreadableStepError(f"{text}; load the checkpoint that the step ran with")
    found = investigate(models, step.calls(model, loss), budget=budget)
    found.notes[:0] = step.notes + [f"{text}."] * bool(other)
    return found
