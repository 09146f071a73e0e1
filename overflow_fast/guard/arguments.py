"""Checks of arguments: each raises TypeError or ValueError with a sentence."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ..core.selection import Wanted
from .policy import ACTIONS

COLLECT = ("rank0", "node", "all")
_INTS = {
    "every": 1,
    "warmup": 0,
    "max_consecutive_skips": 0,
    "max_frames": 0,
    "evidence_keep": 1,
    "log_keep": 0,
    "record_steps": 1,
}
_OPTIONAL_INTS = dict.fromkeys(
    ("underflow_every", "explain_budget", "ops_every", "audit", "check_replicas"), 1
)


def reusable(value: Any) -> Any:
    """Returns an argument that can be read repeatedly: its iterators as tuples."""
    if isinstance(value, Mapping):
        return {key: reusable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [reusable(each) for each in value]
    if isinstance(value, (tuple, Iterator)) and not callable(value):
        return tuple(reusable(each) for each in value)
    return value


def check_int(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError if an argument is no int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if an argument is no number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, got {value}")


def check_choices(config: Any) -> None:
    """Raises TypeError or ValueError if a choice of a configuration is none."""
    if not callable(config.on_overflow) and config.on_overflow not in ACTIONS:
        raise ValueError(
            "on_overflow must be 'raise', 'warn', 'skip' or a callable that takes "
            f"a Report and returns one of these, got {config.on_overflow!r}"
        )
    if config.sync not in ("step", "lagged"):
        raise ValueError(f"sync must be 'step' or 'lagged', got {config.sync!r}")
    if not isinstance(config.replay_safe, bool):
        raise TypeError(
            f"replay_safe must be a bool, got {type(config.replay_safe).__name__}"
        )
    if config.explain not in (True, False, "auto"):
        raise ValueError(
            f"explain must be True, False or 'auto', got {config.explain!r}"
        )
    if config.on_spike not in ("warn", "skip", None):
        raise ValueError(
            f"on_spike must be 'warn', 'skip' or None, got {config.on_spike!r}"
        )
    if config.on_spike == "skip" and config.sync == "lagged":
        raise ValueError(
            "on_spike must be 'warn' or None with sync='lagged', got 'skip'"
        )
    if config.collect not in COLLECT:
        raise ValueError(
            f"collect must be 'rank0', 'node' or 'all', got {config.collect!r}"
        )


def check_numbers(config: Any) -> None:
    """Raises TypeError or ValueError if a number of a configuration cannot be used."""
    for name, least in _INTS.items():
        check_int(name, getattr(config, name), least)
    for name, least in _OPTIONAL_INTS.items():
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), least)
    for name in ("evidence_mib", "log_mib", "record_mib"):
        check_positive(name, getattr(config, name))
    for name in ("headroom_bits", "saturation"):
        if getattr(config, name) is not None:
            check_positive(name, getattr(config, name))
    if config.saturation is not None and config.saturation > 1:
        raise ValueError(
            f"saturation must be a share of at most 1, got {config.saturation}"
        )
    if config.budget is not None:
        check_budget(config.budget)


def check_names(name: str, patterns: Any, optional: bool = False) -> None:
    """Raises TypeError if an argument is no list of patterns, or None if `optional`."""
    if patterns is None and optional:
        return
    is_list = isinstance(patterns, Collection) and not isinstance(
        patterns, (str, bytes, Mapping)
    )
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{name} must be a list of patterns of module names, got {patterns!r}"
        )


def check_path(name: str, value: Any) -> None:
    """Raises TypeError if an argument is neither a path nor None."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or None, got {type(value).__name__}")


def check_paths(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no list of paths."""
    is_list = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(each, (str, os.PathLike)) for each in value):
        raise TypeError(f"{name} must be a list of paths, got {value!r}")


def check_watch(watch: Any) -> None:
    """Raises TypeError or ValueError if `watch` is no list of its names."""
    if isinstance(watch, str) or not isinstance(watch, Iterable):
        raise TypeError(f"watch must be a list of names, or 'tripwire', got {watch!r}")
    for name in watch:
        if name not in Wanted._fields:
            known = ", ".join(repr(field) for field in Wanted._fields)
            raise ValueError(f"watch must hold names out of {known}, got {name!r}")
    if not list(watch):
        raise ValueError("watch must hold at least one name, got none")
    if "grad_outputs" in watch and "activations" not in watch:
        raise ValueError("watch must hold 'activations' where it holds 'grad_outputs'")


def check_budget(budget: Any) -> None:
    """Raises TypeError or ValueError if `budget` is no share of a step's time."""
    check_positive("budget", budget)
    if budget >= 1:
        raise ValueError(
            f"budget must be a share of a step's time, such as 0.01, got {budget}"
        )


def check_ranges(ranges: Any) -> None:
    """Raises ValueError if `ranges` holds anything but half-open ranges of steps."""
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


def check_group(group: Any) -> None:
    """Raises TypeError or ValueError if `process_group` cannot be used."""
    if group is None or group is False:
        return
    if isinstance(group, (bool, int, str)):
        raise _wrong_group(group)
    is_initialized = dist.is_available() and dist.is_initialized()
    if not is_initialized:
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


def check_safetensors() -> None:
    """Raises ImportError if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "evidence needs safetensors to write tensors: run "
            f"`pip install safetensors` ({error})"
        ) from error
