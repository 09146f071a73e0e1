"""Private APIs of torch.compile. None imports torch._dynamo before it is called."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from .registry import internal, stack

_WRAPPERS = ("eval_frame.py",)


def is_compiled_call(frame: FrameType) -> bool:
    """Returns True for the frame that runs compiled code, or what it was made of."""
    code = frame.f_code
    is_named = code.co_name == "compile_wrapper"
    return is_named and code.co_filename.endswith(_WRAPPERS)


def is_in_compiled_call() -> bool:
    """Returns True within a call of what was compiled, also where it runs eagerly.

    It is asked in each operation: a loop takes less time than `stack()` does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_compiled_call(frame):
            return True
        frame = frame.f_back
    return False


def compiled_calls_elsewhere() -> Iterator[FrameType]:
    """Yields the calls of what was compiled that other threads run."""
    if "torch._dynamo" not in sys.modules:
        return
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and thread != threading.get_ident():
            if is_compiled_call(frame):
                yield frame
            frame = frame.f_back


def fails_uncompiled(call: FrameType) -> bool:
    """Returns True for a call of what was compiled with `fullgraph=True`.

    Args:
        call: One of `compiled_calls_elsewhere()`.
    """
    return bool(call.f_locals.get("fullgraph_count_enabled"))


@internal(
    "torch._dynamo.convert_frame.input_codes.seen",
    "hooks in compiled code are guards of it: taking them off compiles it again",
    "Hooks stay on in steps that `every` leaves out",
    True,
)
def has_compiled() -> bool:
    """Returns True if dynamo has compiled anything in this process."""
    if "torch._dynamo" not in sys.modules:
        return False
    import torch._dynamo  # another thread may still be at that

    return bool(torch._dynamo.convert_frame.input_codes.seen)


@internal(
    "torch._dynamo.eval_frame._stance",
    "set_stance() tells what it replaced only when it has, which a signal may prevent",
    "After a replay the stance of torch.compile is the default",
)
def _stance() -> Any:
    return torch._dynamo.eval_frame._stance


def stance_restorer() -> Callable[[], None]:
    """Returns what puts the stance of torch.compile back that there is now."""
    now = _stance()
    if now is None:
        return functools.partial(torch.compiler.set_stance, "default")
    return functools.partial(
        torch.compiler.set_stance,
        now.stance,
        skip_guard_eval_unsafe=now.skip_guard_eval_unsafe,
        force_backend=now.backend,
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other as it is."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


@internal(
    "torch.nn.Module._compiled_call_impl",
    "module.compile() compiles a call with its hooks, which then do not run",
    "Modules that are compiled in place are not recorded",
)
def own_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The code of `module.compile()`, which runs in place of the module's call."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replaces what runs in place of the module's call."""
    module._compiled_call_impl = call


@internal(
    "torch._dynamo.eval_frame.OptimizedModule",
    "a replay calls what the program called, which runs compiled code",
    "Replays of `torch.compile(model)` run eagerly where the model itself is watched",
    (True, None),
)
def compiled_call_of(module: nn.Module) -> tuple[bool, nn.Module | None]:
    """Looks for compiled code around a call of a module that runs in this thread.

    Returns:
        Whether there is any, and what to call for the same: the module, or the
        `torch.compile(module)` that has called it; None if it is compiled as a part of
        something else.
    """
    is_inside = False
    for frame in stack():
        is_inside = is_inside or is_compiled_call(frame)
        caller = frame.f_locals.get("self") if is_inside else None
        if isinstance(caller, nn.Module):
            is_same = caller is module or uncompiled(caller) is module
            return True, caller if is_same else None
    return is_inside, None if is_inside else module


@internal(
    "torch._dynamo.config.skip_nnmodule_hook_guards",
    "a module with hooks must not run code compiled for another one without any",
    "Compiled models that share code with a model without a guard may not be watched",
)
def guard_on_hooks() -> None:
    """Makes code that is compiled from now on check that modules have no hooks.

    For all threads, where the user has not set it: a setting is one thread's own.
    """
    config: Any = torch._dynamo.config
    config._config["skip_nnmodule_hook_guards"].default = False


@internal(
    "torch._dynamo.reset_code_caches",
    "code that was compiled before does not notice a hook on a module that had none",
    "Make the guard before the first compiled call",
)
def recompile_all() -> None:
    """Discards all compiled code; it is compiled again at its next call."""
    torch._dynamo.reset_code_caches()
