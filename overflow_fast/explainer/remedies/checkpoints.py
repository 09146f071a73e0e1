"""Tries the weights of the user's checkpoints: the last one whose are finite."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...base.text import error_line
from ...guard.report.remedy import Remedy
from ..named_tensors import names_of
from ..tensor_kinds import bad_names
from .failure import Failure
from .patches import OtherWeights
from .trials import Attempts, Trial, Trials

_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "weights")
_MAX_TRIED = 3  # checkpoints; chosen, not measured


def checkpoint_trials(failure: Failure, trials: Trials) -> Attempts:
    """Yields trials of checkpoints with weights that are all finite, the last first.

    Files are read and not written to; nothing in them is executed.

    Args:
        failure: The failure, with files of `torch.save` or safetensors.
        trials: Runs the step with their weights.
    """
    named = {name: tensor for _, name, tensor in names_of(trials.replayer.models)}
    num_tried = 0
    for path in reversed([Path(each) for each in failure.checkpoints]):
        try:
            weights, code = _weights_in(path, named)
        except Exception as error:
            trials.notes.append(f"{path.name} was not read: {error_line(error, 80)}.")
            continue
        bad = bad_names(weights.items(), masks=True)
        if not weights:
            trials.notes.append(f"{path.name} holds no weight of this model.")
        elif bad:
            trials.notes.append(f"{path.name} is not finite either: {bad[0]}.")
        elif num_tried < _MAX_TRIED:
            num_tried += 1
            text = f"load the weights of {path.name}, which are finite"
            remedy = Remedy(text, f"model.load_state_dict({code})")
            yield Trial(remedy, OtherWeights(weights))


def _weights_in(
    path: Path, named: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], str]:
    """The weights of the model in a file, by name, and the code to load them."""
    held, code = _read(path)
    for key in _KEYS:
        inner = held.get(key)
        if isinstance(inner, Mapping) and _is_state(inner):
            held, code = inner, f'{code}["{key}"]'
            break
    found = {}
    for name, value in held.items():
        name = str(name)
        while name not in named and name.startswith(("module.", "_orig_mod.")):
            name = name.partition(".")[2]
        own = named.get(name)
        if isinstance(value, torch.Tensor) and own is not None:
            if value.shape != own.shape:
                raise ValueError(
                    f"{name} is {tuple(value.shape)} there, {tuple(own.shape)} here"
                )
            found[name] = value
    return found, code


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path), f"safetensors.torch.load_file({str(path)!r})"
    # Of a file in the format before torch 1.6 no parts can be mapped into memory.
    held = torch.load(
        path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
    )
    if not isinstance(held, Mapping):
        raise TypeError(f"it holds a {type(held).__name__}, not a dict of weights")
    return held, f"torch.load({str(path)!r})"


def _is_state(held: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in held.values())
