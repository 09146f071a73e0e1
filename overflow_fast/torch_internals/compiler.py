"""Private APIs of torch.compile. None imports torch._dynamo before it is called."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .registry import internal, listed, stack

_WRAPPERS = ("eval_frame.py",)


def is_compiled_call(frame: FrameType) -> bool:
    """Returns True for the frame that runs compiled code, or what it was made of."""
    code = frame.f_code
    is_named = code.co_name == "compile_wrapper"
    return is_named and code.co_filename.endswith(_WRAPPERS)


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


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other as it is."""
    found = getattr(module, "_orig_mod", module)
    return found if isinstance(found, nn.Module) else module


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


undone_when_compiled: list[Callable[[], None]] = []  # or when hooks are gone
traced_hooks: list[bool] = []  # not empty: the compilation that runs has met hooks
_hooked: list[weakref.ref[CodeType]] = []  # what was compiled with hooks


@internal(
    "torch._dynamo.convert_frame.register_bytecode_hook",
    "a module with hooks must not run code compiled for another one without any",
    "Compiled models that share code with a model without a guard may not be watched",
)
def guard_on_hooks() -> Callable[[], None]:
    """Makes code that is compiled from now on check that modules have no hooks.

    Returns:
        What ends it. Both are called within the `compile_locks()`.
    """
    handle = torch._dynamo.convert_frame.register_bytecode_hook(_on_compiled)

    def end() -> None:
        handle.remove()
        _undo()

    return end


@listed(
    "torch._dynamo.convert_frame.compile_lock",
    "a compilation goes through the hooks on compilations",
    "A guard that is made or removed while another thread compiles may make that fail",
)
def compile_locks() -> tuple[Any, ...]:
    """The lock that a thread has while it compiles; none before the first could."""
    convert = sys.modules.get("torch._dynamo.convert_frame")
    lock = getattr(convert, "compile_lock", None)
    return () if lock is None else (lock,)


@internal(
    "torch._guards.CompileContext",
    "the hooks of a compilation that runs must not be taken off",
    "Hooks on compilations may outlive a guard that nobody has removed",
    True,
)
def is_compiling() -> bool:
    """True while this thread compiles."""
    return torch._guards.CompileContext.try_get() is not None


def _on_compiled(code: CodeType, new_code: CodeType) -> None:
    _undo()
    _add_guards()
    if traced_hooks:
        traced_hooks.clear()
        if not any(each() is code for each in _hooked):
            _hooked.append(weakref.ref(code))


def _undo() -> None:
    while undone_when_compiled:
        undone_when_compiled.pop()()


@internal(
    "torch._dynamo.guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT",
    "dynamo leaves such a check out, unless its config says otherwise for all threads",
    "Compiled models that share code with a model without a guard may not be watched",
)
def _add_guards() -> None:
    kinds = torch._dynamo.guards.GuardBuilder
    guards = sys._getframe(3).f_locals["output"].guards  # of dynamo, which calls hooks
    for guard in list(guards):
        if guard.create_fn is kinds.EMPTY_NN_MODULE_HOOKS_DICT:
            source = guard.originating_source
            guards.add(source.make_guard(kinds.SEQUENCE_LENGTH))


@internal(
    "torch._dynamo.reset_code_caches",
    "code that was compiled before does not notice a hook on a module that had none",
    "Make the guard before the first compiled call",
)
def recompile_all() -> None:
    """Discards all compiled code; it is compiled again at its next call."""
    torch._dynamo.reset_code_caches()


@internal(
    "torch._dynamo.eval_frame.reset_code",
    "code compiled for hooks that are gone counts towards dynamo's limit",
    "Compiled models may run eagerly after many bad steps",
)
def recompile_hooked() -> None:
    """Discards code that was compiled with hooks half as often as dynamo lets it be.

    It notices other hooks itself, and may be what the same hooks need the next time.
    """
    frames: Any = torch._dynamo.eval_frame
    most = torch._dynamo.config.recompile_limit // 2
    with torch._dynamo.convert_frame.compile_lock:
        for code in filter(None, [each() for each in _hooked]):
            if len(frames._debug_get_cache_entry_list(code)) >= most:
                frames.reset_code(code)
        _hooked[:] = [each for each in _hooked if each() is not None]
