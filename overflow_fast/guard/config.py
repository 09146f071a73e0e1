"""The arguments of a guard: checked once, with sentences."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..core.names import named_modules
from ..core.selection import Selection, check_patterns, full_name
from ..recording.watch import ModelWatch, Wanted
from ..report.report import Report
from ..verdict.rules import Allow, Rules
from .metrics import exporters_of
from .optimizer_hook import innermost
from .policy import ACTIONS

_log = logging.getLogger("overflow_fast")
Policy = str | Callable[[Report], str | None]
Path = str | os.PathLike[str]
Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]
EVERYTHING = tuple(name for name in Wanted._fields if name != "optimizer_state")


@dataclass(frozen=True)
class GuardConfig:
    """How a guard was asked to be; see `OverflowGuard` for each."""

    on_overflow: Policy
    watch: Iterable[str]
    include: Sequence[str] | None
    exclude: Sequence[str]
    every: int
    warmup: int
    ranges: Sequence[tuple[int, int]] | None
    budget: float | None
    sync: str
    max_consecutive_skips: int
    max_frames: int
    memo: bool
    evidence: Path | None
    evidence_mib: float
    evidence_keep: int
    log: Path | None
    log_mib: float
    log_keep: int
    process_group: Any
    allow: Allow
    headroom_bits: float | None
    underflow_every: int | None
    metrics: Any
    explain: bool | str
    explain_budget: int | None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what cannot be used."""
        self._check_policy()
        _check_watch(self.watch)
        for name, least in (
            ("every", 1),
            ("warmup", 0),
            ("max_consecutive_skips", 0),
            ("max_frames", 0),
            ("evidence_keep", 1),
            ("log_keep", 0),
        ):
            check_int(name, getattr(self, name), least)
        for name in ("evidence", "log"):
            _check_path(name, getattr(self, name))
        for name in ("evidence_mib", "log_mib"):
            _check_positive(name, getattr(self, name))
        if self.budget is not None:
            _check_budget(self.budget)
        _check_ranges(self.ranges)
        check_names("include", self.include, optional=True)
        check_names("exclude", self.exclude)
        if self.sync not in ("step", "lagged"):
            raise ValueError(f"sync must be 'step' or 'lagged', got {self.sync!r}")
        if self.headroom_bits is not None:
            _check_positive("headroom_bits", self.headroom_bits)
        if self.underflow_every is not None:
            check_int("underflow_every", self.underflow_every, 1)
        if self.explain_budget is not None:
            check_int("explain_budget", self.explain_budget, 1)
        if self.explain not in (True, False, "auto"):
            raise ValueError(
                f"explain must be True, False or 'auto', got {self.explain!r}"
            )
        exporters_of(self.metrics)
        Rules(self.allow)
        if self.evidence is not None:
            _check_safetensors()
        _check_group(self.process_group)

    @property
    def wanted(self) -> Wanted:
        """What to look at, as flags."""
        return Wanted(**dict.fromkeys(self.watch, True))

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped."""
        return self.on_overflow == "skip" or callable(self.on_overflow)

    def _check_policy(self) -> None:
        if not callable(self.on_overflow) and self.on_overflow not in ACTIONS:
            raise ValueError(
                "on_overflow must be 'raise', 'warn', 'skip' or a callable that takes "
                f"a Report and returns one of these, got {self.on_overflow!r}"
            )


def kept(value: Any) -> Any:
    """An argument that can be read twice: generators in it as tuples."""
    if isinstance(value, Mapping):
        return {key: kept(each) for key, each in value.items()}
    if isinstance(value, list):
        return [kept(each) for each in value]
    if isinstance(value, (tuple, Iterator)) and not callable(value):
        return tuple(kept(each) for each in value)
    return value


def named_models(model: Models) -> dict[str, nn.Module]:
    """The models by what their modules' names begin with."""
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
    options: GuardConfig,
    rules: Rules,
    on_evaluated: Callable[[ModelWatch], None],
    defer: bool,
) -> list[ModelWatch]:
    """One watch for each model, by the prefix of its modules' names."""
    names = [
        full_name(prefix, name)
        for prefix, model in models.items()
        for name, _ in named_modules(model)
    ]
    check_patterns("include", options.include or (), names)
    check_patterns("exclude", options.exclude, names)
    wanted = options.wanted
    recorder = {
        "memo": options.memo,
        "defer": defer,
        "step_mode": True,
        "lists_parameters": wanted.weights,
        "lists_calls": wanted.activations,
        "parameters_once": True,
        "watches_gradients": wanted.grad_outputs,
        "captures_tensors": options.evidence is not None,
    }
    watches = [
        ModelWatch(
            model,
            prefix,
            wanted,
            Selection(options.include, options.exclude, prefix),
            options.max_frames,
            recorder,
            on_evaluated,
        )
        for prefix, model in models.items()
    ]
    rules.check(name for watch in watches for name in watch.all_names())
    for watch in watches:
        rules.put_on(watch)
    return watches


def warn_foreign_parameters(
    models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]
) -> None:
    """Says so once if an optimizer steps nothing that is watched."""
    own = {id(each) for model in models.values() for each in model.parameters()}
    for optimizer in optimizers:
        groups = innermost(optimizer).param_groups
        if own and not any(id(p) in own for group in groups for p in group["params"]):
            _log.warning(
                "The %s that the guard was given has none of the model's parameters. "
                "Is it the one that steps, and was it made of this model?",
                type(innermost(optimizer)).__name__,
            )


def warn_of_others(watches: Sequence[ModelWatch], others: Sequence[ModelWatch]) -> None:
    """Logs a line if other guards, which are on, watch modules of the same models.

    Args:
        watches: The guard's.
        others: Those of the other guards.
    """
    for model, other in itertools.product(*map(_models_of, (watches, others))):
        if other in set(model.modules()) or model in set(other.modules()):
            _log.warning(
                "Another OverflowGuard watches this %s already. Both work, each by "
                "its own policy. Call remove() on the other to replace it.",
                type(model).__name__,
            )
            return


def _models_of(watches: Sequence[ModelWatch]) -> list[nn.Module]:
    """The models that are still there; some have a length, and may be false."""
    return [model for watch in watches if (model := watch.model) is not None]


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizers of an argument that may be None, one, or several."""
    is_one = isinstance(optimizer, str) or not isinstance(optimizer, Iterable)
    several = [optimizer] if is_one or hasattr(optimizer, "step") else list(optimizer)
    several = [] if optimizer is None else several
    for each in several:
        try:
            innermost(each)
        except AttributeError:
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, a wrapper with one as its "
                f"`optimizer`, a list of them, or None, got {type(each).__name__}"
            ) from None
    return several


def _check_watch(watch: Any) -> None:
    if isinstance(watch, str) or not isinstance(watch, Iterable):
        raise TypeError(f"watch must be a list of names, got {watch!r}")
    for name in watch:
        if name not in Wanted._fields:
            known = ", ".join(repr(field) for field in Wanted._fields)
            raise ValueError(f"watch must hold names out of {known}, got {name!r}")
    if not list(watch):
        raise ValueError("watch must hold at least one name, got none")
    if "grad_outputs" in watch and "activations" not in watch:
        raise ValueError("watch must hold 'activations' where it holds 'grad_outputs'")


def check_int(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError if an argument is no int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_path(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or None, got {type(value).__name__}")


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, got {value}")


def _check_budget(budget: Any) -> None:
    _check_positive("budget", budget)
    if budget >= 1:
        raise ValueError(
            f"budget must be a share of a step's time, such as 0.01, got {budget}"
        )


def _check_ranges(ranges: Any) -> None:
    if ranges is None:
        return
    try:
        is_right = all(0 <= begin < end for begin, end in ranges)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            "ranges must hold pairs (first step, step after the last), such as "
            f"[(0, 100)], got {ranges!r}"
        )


def check_names(name: str, patterns: Any, optional: bool = False) -> None:
    """Raises TypeError if an argument is no list of patterns, or None if it may be."""
    if patterns is None and optional:
        return
    is_list = isinstance(patterns, Collection) and not isinstance(
        patterns, (str, bytes, Mapping)
    )
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{name} must be a list of patterns of module names, got {patterns!r}"
        )


def _check_group(group: Any) -> None:
    if group is None or group is False:
        return
    if isinstance(group, (bool, int, str)):
        raise _wrong_group(group)
    is_there = dist.is_available() and dist.is_initialized()
    if not is_there:
        raise ValueError(
            "process_group was given, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() first"
        )
    if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
        raise _wrong_group(group)


def _wrong_group(group: object) -> TypeError:
    return TypeError(
        "process_group must be a ProcessGroup, a DeviceMesh, False or None, got "
        f"{type(group).__name__}"
    )


def _check_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "evidence needs safetensors to write tensors: run "
            f"`pip install safetensors` ({error})"
        ) from error
