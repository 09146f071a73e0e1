"""Private APIs of torch.compile that a trace of hooks uses, and nothing else."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .compiler import undone_when_compiled
from .registry import INTERNALS, Internal, internal


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
def keep_partition(*operators: Any) -> None:
    """Makes AOTAutograd save for backward what it would save without some operators.

    Behind an operator that cannot be fused it computes nothing again in backward, and
    so saves what it would not save otherwise, such as the mask of a ReLU. An operator
    that only reads is no reason for that. This holds for the compilation that runs:
    others wait for it.

    Args:
        operators: Those without outputs.
    """
    if functional_mode() is None or undone_when_compiled:
        return  # no trace of AOTAutograd, or one of the same compilation
    from torch._functorch import partitioners

    class OpTypes(partitioners.OpTypes):
        def is_fusible(self, node: torch.fx.Node) -> bool:
            # `with_effects()` takes its operator behind a token.
            called = (node.target, *node.args[1:2])
            return any(each in operators for each in called) or super().is_fusible(node)

    chosen = partitioners.get_default_op_list
    OpTypes(**vars(chosen()))  # raises here, and not where code is compiled

    def put_back() -> None:
        if partitioners.get_default_op_list is extended:
            partitioners.get_default_op_list = chosen

    def extended() -> OpTypes:
        undone_when_compiled.clear()
        put_back()  # a compilation that fails ends without a word
        return OpTypes(**vars(chosen()))

    undone_when_compiled.append(put_back)
    partitioners.get_default_op_list = extended


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
