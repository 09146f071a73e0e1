"""Explains a step from the folder of its evidence, in another process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..guard.files.reading import is_regular
from ..guard.options import BUDGET
from ..guard.report.causes import NOT_REPRODUCIBLE
from ..guard.report.explanation import Explanation
from .bad_step import BadStep
from .explain import investigate
from .saved_step import SavedStep
from .step_file import STEP, UnreadableStepError

_FEW = 3  # names in a sentence; chosen


def function_at(argument: str, place: str) -> Callable[..., Any]:
    """The function of a file.

    Args:
        argument: The name of the argument, for errors.
        place: The file and the function, such as "train.py:build".

    Raises:
        UnreadableStepError: If there is no such file or function, or it cannot be run.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not is_regular(path):
        raise UnreadableStepError(
            f"{argument} must be FILE.py:FUNCTION, and the file exist, got {place!r}"
        )
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        found = runpy.run_path(str(path), run_name=path.stem).get(name)
    except Exception as error:
        raise UnreadableStepError(f"{path} cannot be run: {error!r}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise UnreadableStepError(f"{path} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def require_step(folder: str | os.PathLike[str]) -> None:
    """Raises UnreadableStepError if a folder has no step; names those below it."""
    path = Path(folder)
    if not os.path.isdir(path):
        what = "is no folder" if os.path.lexists(path) else "does not exist"
        raise UnreadableStepError(f"{path} {what}")
    below = sorted(path.glob(f"**/{STEP}")) if not (path / STEP).is_file() else []
    if below:
        more = f", or one of {len(below) - 1} more" if len(below) > 1 else ""
        raise UnreadableStepError(f"give the folder of a step: {below[0].parent}{more}")


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
    if not isinstance(model, nn.Module):
        raise UnreadableStepError(
            f"the model must be a torch.nn.Module, got {type(model).__name__}"
        )
    require_step(folder)
    step = SavedStep(Path(folder))
    models = step.models(model)
    other = step.differences(models)
    text = (
        f"{len(other)} weights and buffers are not those of the step: "
        f"{', '.join(other[:_FEW])}{' ...' * (len(other) > _FEW)}"
    )
    if other and not any_weights:
        raise UnreadableStepError(f"{text}; load the checkpoint that the step ran with")
    bad_step = BadStep(models, step.calls(model, loss), budget=budget)
    found = investigate(bad_step)
    if found.is_finite:  # it was not, when it was saved
        found.cause = NOT_REPRODUCIBLE.name
    found.notes[:0] = step.notes + [text] * bool(other)
    return found
