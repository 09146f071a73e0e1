"""The models that a guard is given, and warnings of arguments that do not fit them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.modules import named_modules, parameters_of
from ..base.text import kind_of
from ..detector.selection import check_patterns, full_name
from .config import GuardConfig
from .files.writing import why_not_writable
from .optimizers.wrapped import innermost, stepper_of
from .watching.watch import ModelWatch, models_of

_log = logging.getLogger("overflow_fast")
Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]


def named_models(model: Models) -> dict[str, nn.Module]:
    """The models of an argument, by the prefix of their modules' names.

    Raises:
        TypeError, ValueError: If there is none, or one of them is no module.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        models = {f"{name}." if name else "": each for name, each in model.items()}
    elif isinstance(model, Iterable) and not isinstance(model, (str, torch.Tensor)):
        several = list(model)
        is_one = len(several) == 1  # as Megatron's list of a model's chunks
        models = {"" if is_one else f"{i}.": each for i, each in enumerate(several)}
    else:
        own = getattr(model, "__dict__", {}).items()  # a pipeline of models
        models = {f"{k}.": each for k, each in own if isinstance(each, nn.Module)}
        if not models:
            raise _wrong_model(model)
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise _wrong_model(each)
    if not models:
        raise ValueError("model must hold at least one torch.nn.Module, got none")
    return models


def _wrong_model(model: object) -> TypeError:
    return TypeError(
        "model must be a torch.nn.Module, a list or a dict of them, or an object with "
        "such attributes, got "
        f"{kind_of(model)}"
        + ": give the model, and not its parameters or state_dict"
        * isinstance(model, torch.Tensor)
        + ": give the model first, and then the optimizer"
        * isinstance(model, Optimizer)
    )


def check_names(config: GuardConfig, models: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if a pattern of modules to check matches nothing."""
    names = [
        full_name(prefix, name)
        for prefix, model in models.items()
        for name, _ in named_modules(model)
    ]
    check_patterns("include", config.include or (), names)
    check_patterns("exclude", config.exclude, names)


def living_models(watches: Iterable[ModelWatch]) -> dict[str, nn.Module]:
    """The watched models by the prefix of their modules' names.

    Raises:
        RuntimeError: If none of them exists any more.
    """
    models = models_of(watches)
    if not models:
        raise RuntimeError(
            "the model is gone: the guard holds it weakly, so keep it yourself"
        )
    return models


def warn_foreign_parameters(
    models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]
) -> None:
    """Logs a warning for each optimizer that steps no watched parameter."""
    own = {id(each) for model in models.values() for each in parameters_of(model)}
    for optimizer in optimizers:
        if stepper_of(optimizer) is not innermost(optimizer):
            continue  # an engine's: it may step copies
        groups = innermost(optimizer).param_groups
        if own and not any(id(p) in own for group in groups for p in group["params"]):
            _log.warning(
                "The %s that the guard was given has none of the model's parameters. "
                "Check that it is the optimizer that steps, and was made from this "
                "model.",
                type(innermost(optimizer)).__name__,
            )


def warn_of_idle_arguments(config: GuardConfig, watches: Sequence[ModelWatch]) -> None:
    """Logs a warning for each argument that can do nothing.

    Args:
        config: The guard's.
        watches: The watched models.
    """
    if not any(w.modules.is_selected(i) for w in watches for i in w.modules.order):
        _log.warning(
            "include= and exclude= leave no module to check. What is recorded is "
            "checked all the same: `guard.record()`, the loss of `guard.run()`."
        )
    log, record, evidence = config.log, config.record, config.evidence
    for name, asked_for in (("log", log), ("record", record), ("evidence", evidence)):
        if asked_for is None or (asked_for is record and os.path.lexists(record.path)):
            continue  # what is there is left alone: its folder has another
        why = why_not_writable(asked_for.path, is_folder=asked_for is evidence)
        if why:
            _log.warning("%s=%s cannot be written: %s.", name, asked_for.path, why)
