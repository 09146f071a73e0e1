"""A step of a folder, to be run again in this process; see `step_file.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.modules import parameters_of
from ..guard.kept_calls.ambient import Ambient
from ..guard.undo.random import RandomStates
from .calls import Call, ModelCall, names_of_inputs
from .named_tensors import state_by_name
from .step_file import (
    STEP,
    SavedAmbient,
    SavedCall,
    UnreadableStepError,
    identity_of,
    read_step,
)


class SavedStep:
    """The step of a folder.

    Args:
        folder: The folder of a bad step's evidence.

    Raises:
        UnreadableStepError: If the file is missing, broken, or of a newer schema.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEP
        self._step = read_step(self._path)

    @property
    def notes(self) -> list[str]:
        """Lists the differences of this process from that of the step, in sentences."""
        others = dict.fromkeys(
            f"batch{at} was a {was} in the step; it is a plain {kind} here."
            for call in self._step.calls
            for at, (was, kind) in call.was.items()
        )
        if self._step.torch == torch.__version__:
            return [*others]
        return [
            f"The step ran with torch {self._step.torch}, this is {torch.__version__}.",
            *others,
        ]

    def models(self, model: nn.Module) -> dict[str, nn.Module]:
        """The models by their prefixes: one, or those of a model list or dict."""
        prefixes = self._step.prefixes
        if len(prefixes) == 1:
            return {prefixes[0]: model}
        children = dict(model.named_children())
        missing = [each for each in prefixes if each.rstrip(".") not in children]
        if missing:
            raise UnreadableStepError(
                f"the step has several models, and the one given has no {missing[0]!r}"
            )
        return {prefix: children[prefix.rstrip(".")] for prefix in prefixes}

    def differences(self, models: Mapping[str, nn.Module]) -> list[str]:
        """The names of weights and buffers that are not those of the step."""
        own = state_by_name(models)
        wanted = self._step.weights
        missing = [name for name in wanted if name not in own]
        changed = [n for n in wanted if n in own and identity_of(own[n]) != wanted[n]]
        return missing + changed

    def calls(self, model: nn.Module, loss: Callable[..., Any] | None) -> list[Call]:
        """The calls, to be made again.

        Args:
            model: The model.
            loss: Takes the model and the batch, and returns the loss; None for the loss
                that the model returns.

        Raises:
            UnreadableStepError: If an argument was not saved, or a loss is needed.
        """
        return [self._made(each, model, loss) for each in self._step.calls]

    def _made(
        self, saved: SavedCall, model: nn.Module, loss: Callable[..., Any] | None
    ) -> Call:
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
        try:
            batch = _on(device, saved.batch)
            if saved.is_of_model:
                args, kwargs = batch
                batch = tuple(args), {**kwargs}
            ambient = _ambient(saved.ambient)
            held = {place: each.to(device) for place, each in saved.held.items()}
        except Exception as error:
            raise UnreadableStepError(f"{self._path} is damaged: {error}") from error
        if saved.is_of_model and loss is None:
            call: Call = ModelCall.of(model, batch, ambient)
        else:
            own = _one_argument(model, batch) if saved.is_of_model else batch
            call = Call(_with_model(loss, model), own, ambient)
        call.returns_loss = loss is not None or saved.returns_loss
        call.has_backward = False if saved.is_alone else call.has_backward
        if loss is None:
            call.held = held
        return call


def _on(device: torch.device, value: Any) -> Any:
    """A batch on a device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _on(device, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on(device, each) for each in value)
    return value


def _with_model(
    loss: Callable[..., Any] | None, model: nn.Module
) -> Callable[[Any], Any]:
    assert loss is not None
    return lambda batch: loss(model, batch)


def _one_argument(model: nn.Module, batch: Any) -> Any:
    """The arguments of a model's call: the one there is, or all by their names."""
    args, kwargs = batch
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args:
        return kwargs
    names = names_of_inputs(model, len(args))
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _ambient(saved: SavedAmbient) -> Ambient:
    """Makes states of saved ones, but for those of devices that are not here."""
    ambient = Ambient.__new__(Ambient)
    random = saved.random.items()
    ambient.random = RandomStates.of({n: s for n, s in random if _is_here(n)})
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
