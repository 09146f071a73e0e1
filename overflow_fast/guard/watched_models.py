"""The models that a guard is given, and the watches that it puts on them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.names import named_modules
from ..core.selection import Selection, check_patterns, full_name
from ..recording.watch import ModelWatch
from ..verdict.rules import Rules
from .config import GuardConfig
from .wrapped_optimizers import innermost

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
        models = {f"{i}.": each for i, each in enumerate(model)}
    else:
        raise _wrong_model(model)
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise _wrong_model(each)
    if not models:
        raise ValueError("model must hold at least one torch.nn.Module, got none")
    return models


def _wrong_model(model: object) -> TypeError:
    return TypeError(
        "model must be a torch.nn.Module, or a list or a dict of them, got "
        f"{type(model).__name__}"
        + ": give the model, and not its state_dict"
        * isinstance(model, torch.Tensor)
    )


def make_watches(
    models: Mapping[str, nn.Module],
    config: GuardConfig,
    rules: Rules,
    on_evaluated: Callable[[ModelWatch], None],
    defer: bool,
) -> list[ModelWatch]:
    """Makes a watch for each model.

    Args:
        models: The models, by the prefix of their modules' names.
        config: The guard's.
        rules: The values that are allowed.
        on_evaluated: Called after an outermost forward that ran without autograd.
        defer: Treat the CPU as a device.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    names = [
        full_name(prefix, name)
        for prefix, model in models.items()
        for name, _ in named_modules(model)
    ]
    check_patterns("include", config.include or (), names)
    check_patterns("exclude", config.exclude, names)
    wanted = config.wanted
    recorder = {
        "memo": True,
        "defer": defer,
        "step_mode": True,
        "lists_parameters": wanted.weights,
        "lists_calls": wanted.activations,
        "parameters_once": True,
        "watches_gradients": wanted.grad_outputs,
        "captures_tensors": config.evidence is not None,
    }
    watches = [
        ModelWatch(
            model,
            prefix,
            wanted,
            Selection(config.include, config.exclude, prefix),
            config.explain.frames,
            recorder,
            on_evaluated,
        )
        for prefix, model in models.items()
    ]
    rules.check(name for watch in watches for name in watch.modules.all_names())
    for watch in watches:
        rules.put_on(watch)
    return watches


def living_models(watches: Iterable[ModelWatch]) -> dict[str, nn.Module]:
    """The watched models by the prefix of their modules' names.

    Raises:
        RuntimeError: If none of them exists any more.
    """
    models = {w.prefix: w.model for w in watches if w.model is not None}
    if not models:
        raise RuntimeError(
            "the model is gone: the guard holds it weakly, so keep it yourself"
        )
    return models


def warn_foreign_parameters(
    models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]
) -> None:
    """Logs a warning for each optimizer that steps no watched parameter."""
    own = {id(each) for model in models.values() for each in model.parameters()}
    for optimizer in optimizers:
        groups = innermost(optimizer).param_groups
        if own and not any(id(p) in own for group in groups for p in group["params"]):
            _log.warning(
                "The %s that the guard was given has none of the model's parameters. "
                "Check that it is the optimizer that steps, and was made from this "
                "model.",
                type(innermost(optimizer)).__name__,
            )


def warn_of_other_guards(
    watches: Sequence[ModelWatch], others: Sequence[ModelWatch]
) -> None:
    """Logs a warning if other guards, which are on, watch modules of the same models.

    Args:
        watches: The guard's.
        others: Those of the other guards.
    """
    for model, other in itertools.product(*map(_models_of, (watches, others))):
        if other in set(model.modules()) or model in set(other.modules()):
            _log.warning(
                "Another OverflowGuard already watches this %s. Both work, each by "
                "its own policy. Call remove() on the other to replace it.",
                type(model).__name__,
            )
            return


def _models_of(watches: Sequence[ModelWatch]) -> list[nn.Module]:
    """The models that still exist; some have a length, and may be false."""
    return [model for watch in watches if (model := watch.model) is not None]
