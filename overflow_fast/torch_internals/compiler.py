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

from .registry import INTERNALS, Internal, internal, stack

_WRAPPERS = ("eval_frame.py",)


def _is_compiled_call(frame: FrameType) -> bool:
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
        if _is_compiled_call(frame):
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
            if _is_compiled_call(frame):
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
        is_inside = is_inside or _is_compiled_call(frame)
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


@internal(
    "torch.library._register_effectful_op",
    "compiled code drops operators without outputs, or changes their order",
    "Compiled modules are not watched",
    False,
)
def keep_in_order(operator: str) -> bool:
    """Makes compiled code keep an operator, and its order among others like it.

    Returns:
        False where torch has changed.
    """
    effect = torch._library.effects.EffectType.ORDERED
    torch.library._register_effectful_op(operator, effect)
    return True


def open_layouts(operator: Any) -> None:
    """Makes inductor leave open how the tensors lie that an operator takes.

    Inductor decides the strides of what it computes by what reads them; for an operator
    that it does not know it decides them at once. A convolution that reads the same
    tensor, and wants channels last, then gets a copy.

    Args:
        operator: One without outputs that takes a tensor, constants and a list of
            tensors, which may have any strides.
    """
    # Where code is made by another backend, inductor is not imported.
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        _lower(lowering, operator)


@internal(
    "torch._inductor.lowering.register_lowering",
    "inductor decides at once how the tensors lie that an operator of ours takes",
    "Compiled convolutions may take copies of what is scanned",
)
def _lower(lowering: Any, operator: Any) -> None:
    if operator in lowering.lowerings:
        return
    fallback = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lower(*arguments: Any) -> Any:
        return None if _takes(operator, *arguments) else fallback(*arguments)

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


@internal(
    "torch._inductor.ir.FallbackKernel",
    "an operator in inductor's code whose tensors may still be laid out otherwise",
    "Compiled convolutions may take copies of what is scanned",
    False,
)
def _takes(operator: Any, handle: Any, *rest: Any) -> bool:
    from torch._inductor import ir

    *constants, tensors = rest
    inputs = [ir.ExternKernel.realize_input(each) for each in (handle, *tensors)]
    # Its `create()` decides the layouts, since outputs might depend on them.
    ir.FallbackKernel(
        ir.NoneLayout(device=inputs[0].get_device()),
        operator,
        inputs,
        constants,
        lambda tensors, constants: ((tensors[0], *constants, list(tensors[1:])), {}),
    )
    return True


@internal(
    "torch._functorch.partitioners.get_default_op_list",
    "an operator that is not fused makes compiled code save other tensors for backward",
    "Compiled models save other tensors for backward under the guard",
)
@functools.cache
def keep_partition(*operators: Any) -> None:
    """Makes AOTAutograd save for backward what it would save without some operators.

    Behind an operator that cannot be fused it computes nothing again in backward, and
    so saves what it would not save otherwise, such as the mask of a ReLU. An operator
    that only reads is no reason for that.

    Args:
        operators: Those without outputs.
    """
    from torch._functorch import partitioners

    class OpTypes(partitioners.OpTypes):
        def is_fusible(self, node: torch.fx.Node) -> bool:
            # `with_effects()` takes its operator behind a token.
            called = (node.target, *node.args[1:2])
            return any(each in operators for each in called) or super().is_fusible(node)

    chosen = partitioners.get_default_op_list
    OpTypes(**vars(chosen()))  # raises here, and not where code is compiled
    partitioners.get_default_op_list = lambda: OpTypes(**vars(chosen()))


INTERNALS["EvalFramePause"] = Internal(
    "torch._C._dynamo.eval_frame.set_eval_frame",
    "dynamo traces Python code that the extension calls while compiled code runs",
    "Dynamo may compile the guard's own code",
)


@internal(
    "torch._guards.TracingContext",
    "DDPOptimizer takes effects' tokens for tensors of the program",
    "Compiled DDP may fail under the guard",
    False,
)
def is_split_for_ddp() -> bool:
    """Returns True if DDPOptimizer has split the graph for a backend with tokens."""
    context = torch._guards.TracingContext.try_get()
    config = torch._functorch.config
    keeps_tokens = not getattr(config, "unlift_effect_tokens", True)
    return keeps_tokens and getattr(context, "fakify_first_call", False)


@internal(
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "the tensors of AOTAutograd's trace stand for values",
    "Compiled modules list a tensor anew in each frame",
    False,
)
def is_functional(tensor: object) -> bool:
    """Returns True for a tensor that AOTAutograd traces with."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FunctionalTensor)


@internal(
    "torch._subclasses.functional_tensor.FunctionalTensorMode",
    "the trace that a value belongs to",
    "Compiled modules list a tensor anew in each frame",
)
def functional_mode() -> Any:
    """The mode of the AOTAutograd trace that runs, or None."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = _get_current_dispatch_mode_stack()
    found = (mode for mode in modes if isinstance(mode, FunctionalTensorMode))
    return next(found, None)


@internal(
    "torch._from_functional_tensor",
    "a value of the trace, whose tensor changes with each write",
    "Compiled modules list a tensor anew in each frame",
)
def traced_value(tensor: Any) -> Any:
    """The value that a functional tensor holds at this moment."""
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    return torch._from_functional_tensor(tensor.elem)


@internal(
    "torch._dynamo.symbolic_convert.InstructionTranslator",
    "bodies of higher-order operators cannot hold an operator with effects",
    "torch.cond, map and while_loop may fail to compile under the guard",
)
def dynamo_translator() -> Any:
    """Dynamo's translator of the code that it traces."""
    return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
