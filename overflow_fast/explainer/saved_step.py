"""Reads a step on disk, to be run again in this process; see `written_step.py`."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.modules import parameters_of
from ..base.tensors import dtype_named
from ..guard.files.json_text import SCHEMA
from ..guard.files.reading import FileError, read_bytes
from ..guard.files.schema import convert, decode_document
from ..guard.files.tensor_files import read_tensors
from ..guard.kept_calls.ambient import Ambient
from .calls import Call, ModelCall, names_of_inputs
from .named_tensors import state_by_name
from .saved_random import states_of
from .step_schema import SavedAmbient, SavedCall, SavedStepFile, SavedValue
from .written_step import STEP, TENSORS, identity_of


class UnreadableStepError(FileError):
    """Raised where a folder's step cannot be explained."""


class SavedStep:
    """The step of a folder.

    Args:
        folder: The folder of a bad step's evidence.

    Raises:
        UnreadableStepError: If a file is missing, broken, or of a newer schema.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._others: list[str] = []  # values of another type than they were
        self._step = self._read_step()
        try:
            self._tensors = read_tensors(folder / TENSORS)
        except FileNotFoundError:
            raise UnreadableStepError(
                f"{folder / TENSORS} is missing: it holds the step's batch"
            ) from None
        except FileError as error:  # whose sentence names the file
            raise UnreadableStepError(str(error)) from error
        except (OSError, ImportError) as error:
            raise UnreadableStepError(
                f"{folder / TENSORS} cannot be read: {error}"
            ) from error

    def _read_step(self) -> SavedStepFile:
        path = self._folder / STEP
        try:
            return decode_document(read_bytes(path), SavedStepFile, SCHEMA)
        except FileNotFoundError:
            raise UnreadableStepError(
                f"{path} is missing: a guard writes it with evidence=, if it kept the "
                "step's calls (explain=False and sync='lagged' keep none)"
            ) from None
        except (OSError, FileError) as error:
            raise UnreadableStepError(f"{path} cannot be read: {error}") from error

    @property
    def notes(self) -> list[str]:
        """Lists the differences of this process from that of the step, in sentences."""
        others = list(dict.fromkeys(self._others))
        if self._step.torch == torch.__version__:
            return others
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
            raise UnreadableStepError(
                "the step's loss was computed by a function of its own: give it with "
                "--loss FILE.py:FUNCTION; it takes the model and a dict of "
                f"{', '.join(saved.batch.by_key or {})}"
            )
        device = next((p.device for p in parameters_of(model)), torch.device("cpu"))
        try:
            batch = self._value(saved.batch, device)
            ambient = _ambient(saved.ambient, self._tensor)
            held = {
                int(place): self._tensor(name).to(device)
                for place, name in saved.held.items()
            }
        except UnreadableStepError:
            raise
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            path = self._folder / STEP
            raise UnreadableStepError(f"{path} is damaged: {error}") from error
        if saved.is_of_model:
            _check_arguments(batch, self._folder / STEP)
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

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UnreadableStepError(f"{self._folder / TENSORS} has no {name!r}")
        return self._tensors[name]

    def _value(self, found: Any, device: torch.device, at: str = "") -> Any:
        is_read = isinstance(found, SavedValue)  # the outermost one, with its call
        saved = found if is_read else convert(found, SavedValue)
        if isinstance(saved.lost, str):
            raise UnreadableStepError(
                f"an argument of the step could not be saved: batch{at} was a "
                f"{saved.lost}"
            )
        value = self._made_of(saved, device, at)
        if saved.was:
            kind = (
                "named tuple" if isinstance(saved.named, dict) else type(value).__name__
            )
            self._others.append(
                f"batch{at} was a {saved.was} in the step; it is a plain {kind} here."
            )
        return value

    def _made_of(self, saved: SavedValue, device: torch.device, at: str) -> Any:
        if isinstance(saved.tensor, str):
            tensor = self._tensor(saved.tensor).to(device)
            return tensor.requires_grad_() if saved.requires_grad else tensor
        if isinstance(saved.by_key, dict):
            items = saved.by_key.items()
            return {k: self._value(e, device, f"{at}[{k!r}]") for k, e in items}
        if isinstance(saved.pairs, list):
            keys = [self._value(key, device, at) for key, _ in saved.pairs]
            values = zip(keys, saved.pairs, strict=True)
            return {k: self._value(e, device, f"{at}[{k!r}]") for k, (_, e) in values}
        if isinstance(saved.named, dict):
            items = saved.named.items()
            made = collections.namedtuple(saved.was, list(saved.named))  # type: ignore[misc]
            return made(*(self._value(e, device, f"{at}.{k}") for k, e in items))
        for several, kind in ((saved.listed, list), (saved.tupled, tuple)):
            if isinstance(several, list):
                return kind(
                    self._value(each, device, f"{at}[{i}]")
                    for i, each in enumerate(several)
                )
        number = saved.number
        return float(number) if isinstance(number, (float, str)) else saved.value


def _check_arguments(batch: Any, path: Path) -> None:
    """Raises UnreadableStepError if a batch is not the arguments of a model's call."""
    is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    if not (
        is_pair and isinstance(batch[0], (list, tuple)) and isinstance(batch[1], dict)
    ):
        raise UnreadableStepError(f"{path} is damaged: no arguments of a model's call")


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


def _ambient(saved: SavedAmbient, tensor_of: Callable[[str], torch.Tensor]) -> Ambient:
    """Makes states of saved ones, but for those of devices that are not here.

    Args:
        saved: They, as they were read.
        tensor_of: Returns a tensor by its name.

    Raises:
        ValueError: If a state, a dtype or a device is none.
        RuntimeError: Likewise, as torch says it.
    """
    ambient = Ambient.__new__(Ambient)
    ambient.random = states_of(saved, tensor_of)
    ambient.training = saved.training
    ambient.autocast = [
        (type, is_on, _dtype_of(dtype))
        for type, is_on, dtype in saved.autocast
        if torch.amp.is_autocast_available(type)
    ]
    ambient.caches = saved.caches
    ambient.shares_buffers = None
    return ambient


def _dtype_of(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise ValueError(f"{name!r} is no dtype of torch")
    return found
