"""Stands for the compiled extension where there is none that fits.

`scan` and `assert_finite_state` then use torch operations. The guard, the detector and
replays need the extension, and refuse with the way to get it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import enumerations, tensor_recorder, torch_scan

_log = logging.getLogger("overflow_fast")


class Hidden(contextlib.nullcontext[None]):
    """Hides Python code from modes of the user's, which needs the extension."""


class FrameHook:
    """The hook of a module; it is never put on one."""

    def __init__(self, owner: object, module: int) -> None:
        self.owner, self.module = owner, module


def run_hook(*arguments: object) -> None:
    """Records a call of a module, which needs the extension."""
    tensor_recorder.refuse()


def run_paused(function: Callable[..., Any], /, *arguments: object) -> Any:
    """Calls a function of the package's from a hook, which needs the extension."""
    tensor_recorder.refuse()


def set_callbacks(**functions: Callable[..., Any]) -> None:
    """Takes the package's functions."""
    tensor_recorder.callbacks.update(functions)


def has_kernels(type: str) -> bool:
    """True if a device type has kernels: none has."""
    return False


def register_scan(type: str, function: object) -> None:
    """Registers the kernel of a device type, which needs the extension."""


def isa() -> str:
    """Names what scans."""
    return "torch operations"


def stand_in() -> ModuleType:
    """Returns a module with the names of the extension."""
    module = ModuleType("overflow_fast._C", __doc__)
    for source in (enumerations, tensor_recorder, torch_scan):
        public = {k: v for k, v in vars(source).items() if not k.startswith("_")}
        module.__dict__.update(public)
    # The package has a class of its own by this name.
    module.__dict__["Stat"] = torch_scan.TorchStat
    for each in (Hidden, FrameHook, run_hook, run_paused, set_callbacks):
        setattr(module, each.__name__, each)
    for function in (has_kernels, register_scan, isa):
        setattr(module, function.__name__, function)
    return module


def install(why: str) -> None:
    """Puts this in the extension's place, and logs that once.

    Args:
        why: what is missing, and how to get it.
    """
    tensor_recorder.why_missing[0] = why
    package, module = sys.modules[__package__.rpartition(".")[0]], stand_in()
    sys.modules[module.__name__] = package._C = module  # type: ignore[attr-defined]
    _log.warning(
        "%s\nUntil then torch operations scan, which is slower: `scan` and "
        "`assert_finite_state` work; the guard, the detector and replays do not.",
        why,
    )
