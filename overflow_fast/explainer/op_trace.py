"""Shows each operation that runs, and the module that calls it, to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import _C
from ..base.modules import Handles
from ..base.tensors import PLAIN
from ..torch_internals.replaying import (
    TorchDispatchMode,
    autograd_node,
    sequence_of,
    without_torch_function,
)
from .memory import memory_of
from .named_tensors import modules_by_name
from .op_call import OpCall, name_of
from .users_lines import Sites, UsersLines, runs_in_hook


class ModuleStack:
    """The modules whose forwards run, and the user's lines, while it is entered.

    Args:
        models: The watched models, by what their modules' names begin with.
        on_values: Called with the name of each module of theirs that begins and what it
            was given; once it has returned, with its output.
    """

    def __init__(self, models: Mapping[str, nn.Module], on_values: Any) -> None:
        self._names: dict[nn.Module, str] = {}
        for name, module in modules_by_name(models).items():
            self._names.setdefault(module, name)
        self._on_values = on_values
        self._running: list[tuple[int, str, bool]] = []
        self._handles = Handles()
        self._lines = UsersLines()

    def __enter__(self) -> ModuleStack:
        for module in self._names:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its hooks are compiled
            self._handles += [  # within the user's hooks is within the call
                module.register_forward_pre_hook(
                    self._begin, prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._end, always_call=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.remove_all()
        self._lines.forget()

    def lines(self) -> Sites:
        """The user's lines that run, the innermost first."""
        return self._lines.now()

    def current(self, in_backward: bool) -> str | None:
        """The name of the innermost one; None in a backward that runs none again."""
        for _, name, is_in_backward in reversed(self._running):
            if is_in_backward or not in_backward:
                return name
        return None if in_backward else ""

    def note_caller(self, op: OpCall) -> None:
        """Adds to an operation that is about to run what calls it."""
        node: Any = autograd_node()
        op.sites, op.module = self.lines(), self.current(node is not None)
        if node is not None:
            op.node, op.node_sequence = str(node.name()), sequence_of(node)
            op.variable = getattr(node, "variable", None)
            op.custom = bool(op.sites)
            op.in_hook = op.custom and runs_in_hook()

    def _begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        if kwargs is None:
            return  # of another thread, whose call ran when the hook was put on
        in_backward = autograd_node() is not None
        name = self._names[module]
        self._running.append((id(module), name, in_backward))
        with without_torch_function():
            self._on_values(name, (args, kwargs))

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        # One that an exception has left without its hook stands above it.
        while self._running and self._running[-1][0] != id(module):
            self._running.pop()
        if self._running:
            self._running.pop()
        with without_torch_function():
            self._on_values(self._names[module], output)


# The one dispatch mode: it shows each operation to an observer.


class OpObserver:
    """Sees the operations of a trace, and what modules are given and return.

    Attributes:
        number_of: Returns the number of a tensor's memory.
    """

    number_of: Callable[[torch.Tensor], int] = staticmethod(memory_of)

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation with `op.run()`, and returns what that returned.

        Args:
            op: The operation, which is about to run.
            modules: Knows which module runs.
        """
        return op.run()

    def on_module(self, name: str, values: Any) -> None:
        """Takes in what a module is given, or has returned.

        Args:
            name: The module's name.
            values: What it is given, or what it returned.
        """


_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")  # of tensors that ranks share


class OpTrace(TorchDispatchMode):
    """Shows all operations to an observer while it is entered.

    Of tensors that ranks share, the operations on this rank's parts.

    Args:
        models: The models, by what their modules' names begin with; modules of others
            are not known.
        observer: Sees the operations.
    """

    def __init__(self, models: Mapping[str, nn.Module], observer: OpObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._modules = ModuleStack(models, observer.on_module)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would import dynamo, which takes seconds

    def __enter__(self) -> OpTrace:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(each.__name__ in _WRAPPERS for each in types):
            return NotImplemented  # it comes again, with this rank's parts
        with without_torch_function():
            name = name_of(func)
            if name.startswith("profiler."):
                return func(*args, **kwargs)
            # Elsewhere autograd has taken apart what consists of other operations.
            if torch.is_inference_mode_enabled():
                with self._again():
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            # A tensor of another class may have operations of the program's.
            with _C.OwnCode(not types or all(each in PLAIN for each in types)):
                op = OpCall(func, args, kwargs, self._observer.number_of)
                return self._observer.run(op, self._modules)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Shows the operations that an operation consists of, as well."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
