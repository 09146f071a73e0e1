"""Explains a step from the folder of its evidence, in another process."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.modules import parameters_of
from ..base.tree import CALL_DEPTH, mapped
from ..guard.files.reading import is_regular
from ..guard.kept_calls.ambient import Ambient
from ..guard.kept_calls.kept_call import KeptCall
from ..guard.report.causes import NOT_REPRODUCIBLE
from ..guard.report.explanation import Explanation
from ..guard.undo.random import RandomStates
from .bad_step import BadStep
from .calls import Call, made_again
from .explain import investigate
from .named_tensors import state_by_name
from .step_file import (
    STEP,
    SavedAmbient,
    SavedCall,
    SavedStepFile,
    UnreadableStepError,
    identity_of,
    read_step,
)

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

    Raises:
        UnreadableStepError: If the folder has no step that can be run, or the weights
            are not those of the step.
    """
    if not isinstance(model, nn.Module):
        raise UnreadableStepError(
            f"the model must be a torch.nn.Module, got {type(model).__name__}"
        )
    require_step(folder)
    path = Path(folder) / STEP
    step = read_step(path)
    models = _models_of(step, model)
    other = _differences(step, models)
    text = (
        f"{len(other)} weights and buffers are not those of the step: "
        f"{', '.join(other[:_FEW])}{' ...' * (len(other) > _FEW)}"
    )
    if other and not any_weights:
        raise UnreadableStepError(f"{text}; load the checkpoint that the step ran with")
    calls = [_made(path, each, model, loss) for each in step.calls]
    found = investigate(BadStep(models, calls))
    if found.is_finite:  # it was not, when it was saved
        found.cause = NOT_REPRODUCIBLE.name
    found.notes[:0] = _notes(step) + [text] * bool(other)
    return found


def _notes(step: SavedStepFile) -> list[str]:
    """Lists the differences of this process from that of the step, in sentences."""
    own = f"The step ran with torch {step.torch}, this is {torch.__version__}."
    others = dict.fromkeys(
        f"batch{at} was a {was} in the step; it is a plain {kind} here."
        for call in step.calls
        for at, (was, kind) in call.was.items()
    )
    return [own] * (step.torch != torch.__version__) + [*others]


def _models_of(step: SavedStepFile, model: nn.Module) -> dict[str, nn.Module]:
    """The models by their prefixes: one, or those of a model list or dict."""
    prefixes = step.prefixes
    if len(prefixes) == 1:
        return {prefixes[0]: model}
    children = dict(model.named_children())
    missing = [each for each in prefixes if each.rstrip(".") not in children]
    if missing:
        raise UnreadableStepError(
            f"the step has several models, and the one given has no {missing[0]!r}"
        )
    return {prefix: children[prefix.rstrip(".")] for prefix in prefixes}


def _differences(step: SavedStepFile, models: Mapping[str, nn.Module]) -> list[str]:
    """The names of weights and buffers that are not those of the step."""
    own, wanted = state_by_name(models), step.weights
    missing = [name for name in wanted if name not in own]
    changed = [n for n in wanted if n in own and identity_of(own[n]) != wanted[n]]
    return missing + changed


def _made(
    path: Path, saved: SavedCall, model: nn.Module, loss: Callable[..., Any] | None
) -> Call:
    """A call of the step, to be made again.

    Raises:
        UnreadableStepError: If an argument was not saved, or a loss is needed.
    """
    if loss is None and not saved.is_of_model:
        names = saved.batch if isinstance(saved.batch, dict) else ()
        raise UnreadableStepError(
            "the step's loss was computed by a function of its own: give it with "
            "--loss FILE.py:FUNCTION; it takes the model and a dict of "
            f"{', '.join(map(str, names))}"
        )
    for at, kind in saved.lost.items():
        raise UnreadableStepError(
            f"an argument of the step could not be saved: batch{at} was a {kind}"
        )
    device = next((p.device for p in parameters_of(model)), torch.device("cpu"))

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    try:
        batch = mapped(saved.batch, on_device, CALL_DEPTH)
        if saved.is_of_model:
            args, kwargs = batch
            batch = tuple(args), {**kwargs}
        ambient = _ambient(saved.ambient)
        held = {place: each.to(device) for place, each in saved.held.items()}
    except Exception as error:
        raise UnreadableStepError(f"{path} is damaged: {error}") from error
    call = made_again(KeptCall(model, batch, ambient))
    if loss is None:
        call.held = held
    else:
        if saved.is_of_model:
            args, kwargs = batch
            is_one = len(args) == 1 and not kwargs
            batch = args[0] if is_one else call.variables()
        call = Call(functools.partial(loss, model), batch, ambient)
    call.returns_loss = loss is not None or saved.returns_loss
    call.has_backward = False if saved.is_alone else call.has_backward
    return call


def _ambient(saved: SavedAmbient) -> Ambient:
    """Makes states of saved ones, but for those of devices that are not here."""
    ambient = Ambient.__new__(Ambient)
    random = saved.random.items()
    ambient.random = RandomStates.of({n: s for n, s in random if _is_here(n)})
    ambient.generators = ()  # the program's own are not saved
    ambient.training = saved.training
    ambient.autocast = [
        each for each in saved.autocast if torch.amp.is_autocast_available(each[0])
    ]
    ambient.caches = saved.caches
    ambient.shares_buffers = None
    return ambient


def _is_here(name: str) -> bool:
    if name in ("cpu", "python", "numpy"):
        return True
    device = torch.device(name)
    module = torch.get_device_module(device)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()
