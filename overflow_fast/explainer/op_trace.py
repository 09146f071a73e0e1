"""Shows each operation that runs, and the module that calls it, to an observer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..base.modules import Handles, named_modules
from ..base.torch_ops import base_of, has, is_view
from ..base.tree import find, tensors_in
from ..detector.selection import full_name
from ..torch_internals.replaying import (
    TorchDispatchMode,
    autograd_node,
    schema_of,
    without_torch_function,
)
from .storage_map import memory_of
from .tensor_kinds import is_float
from .users_lines import Sites, UsersLines


class ModuleStack:
    """The modules whose forwards run, and the user's lines, while it is entered.

    Args:
        models: The watched models, by what their modules' names begin with.
        on_values: Called with the name of each module of theirs that begins, what it
            was given, and True; once it has returned, with its output and False.
    """

    def __init__(self, models: Mapping[str, nn.Module], on_values: Any) -> None:
        self._names: dict[nn.Module, str] = {}
        for prefix, model in models.items():
            for name, module in named_modules(model):
                self._names.setdefault(module, full_name(prefix, name))
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
        self._on_values(name, (args, kwargs), True)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        # One that an exception has left without its hook stands above it.
        while self._running and self._running[-1][0] != id(module):
            self._running.pop()
        if self._running:
            self._running.pop()
        self._on_values(self._names[module], output, False)


# One call of an operation: what it reads and what it writes.


# Whatever they return or write to comes from other ranks, and may not be there yet.
_COMMUNICATION = ("c10d.", "_c10d_functional", "c10d_functional", "_dtensor.")
_WAITS = "wait_tensor"
# Batch norm's schemas do not say that it writes to these.
_STATISTICS = ("running_mean", "running_var")


@functools.cache
def _signature(func: Any) -> tuple[str, str, list[tuple[int, str, bool]], bool]:
    """The name of an operation, its base, the arguments that it writes to, if it views.

    Of these arguments the place, the name, and whether what was in it is not read.
    """
    name = str(func)
    base = base_of(name)
    schema, writes, overwrites = schema_of(func), [], has(base, "overwrites")
    if schema is not None and (schema.is_mutable or "batch_norm" in base):
        for place, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            is_written = alias is not None and alias.is_write
            if is_written or argument.name in _STATISTICS:
                is_over = argument.is_out or (place == 0 and overwrites)
                writes.append((place, argument.name, is_over))
    return name.removesuffix(".default"), base, writes, is_view(func)


class OpCall:
    """A call of an operation that is about to run.

    Args:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        name: Its name, such as "aten.div.Tensor".
        base: The same without namespace and overload, such as "div".
        written: The tensors that it writes to.
        kept: What was in those, by their `id`, where it reads it.
        is_view: Whether what it returns is said to be a view of what it is given.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name, self.base, writes, self.is_view = _signature(func)
        self.written: list[torch.Tensor] = []
        self._overwritten: list[torch.Tensor] = []
        self.kept: dict[int, torch.Tensor] = {}
        for place, name, is_overwritten in writes:
            tensors = tensors_in(args[place] if place < len(args) else kwargs.get(name))
            self.written += tensors
            self._overwritten += tensors * is_overwritten
        if self.name.startswith("c10d.") and self._has_output_first():
            self._overwritten += tensors_in(args[0])

    @functools.cached_property
    def arguments(self) -> list[torch.Tensor]:
        """The tensors that it is given."""
        return tensors_in((self.args, self.kwargs))

    @functools.cached_property
    def _given_memory(self) -> set[int]:
        return {key for tensor in self.arguments for key in memory_of(tensor)}

    def run(self) -> Any:
        """Runs it, and returns what it returned."""
        return self.func(*self.args, **self.kwargs)

    def _has_output_first(self) -> bool:
        """True if a collective only writes to its first argument, as most do."""
        takes_two = len(self.args) > 1 and bool(tensors_in(self.args[1]))
        return takes_two or self.base.startswith("recv")

    def read(self, floats: bool = True) -> list[torch.Tensor]:
        """The tensors whose values it reads.

        Args:
            floats: Whether to leave out those that can hold no nan, or nothing.
        """
        if self.is_constant:
            return []
        over = self._overwritten
        given = self.arguments
        if over:
            given = [t for t in given if not any(t is each for each in over)]
        return [t for t in given if is_float(t) and t.numel()] if floats else given

    def overwrites(self, tensor: torch.Tensor) -> bool:
        """True if it writes to all of a tensor, whatever was in it."""
        return any(tensor is each for each in self._overwritten)

    def keep_written(self) -> None:
        """Copies what it reads and then overwrites."""
        for tensor in self.written:
            if not any(tensor is each for each in self._overwritten):
                self.kept[id(tensor)] = tensor.detach().clone()

    def fresh(self, output: Any) -> list[torch.Tensor]:
        """The results that it returns in memory of their own."""
        if self.is_constant:
            return tensors_in(output)
        found = [output] if type(output) is torch.Tensor else tensors_in(output)
        given = self._given_memory
        return [tensor for tensor in found if given.isdisjoint(memory_of(tensor))]

    @property
    def is_communication(self) -> bool:
        """True if it takes part in a collective, or waits for one."""
        return self.name.startswith(_COMMUNICATION)

    @property
    def waits(self) -> bool:
        """True if it waits for a collective, whose result it is given."""
        return self.is_communication and self.base == _WAITS

    @property
    def is_empty(self) -> bool:
        """True if it returns memory that nobody has written to."""
        return has(self.base, "empty")

    @property
    def is_constant(self) -> bool:
        """True if it makes a tensor of a number of Python."""
        return has(self.base, "constant")

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""
        numbers = [number for _, number in find((self.args, self.kwargs), (float,))]
        return [number for number in numbers if not math.isfinite(number)]


# The one dispatch mode: it shows each operation to an observer.


class OpObserver(Protocol):
    """Sees the operations of a trace, and what modules are given and return."""

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation with `op.run()`, and returns what that returned.

        Args:
            op: The operation, which is about to run.
            modules: Knows which module runs.
        """

    def on_module(self, name: str, values: Any, is_given: bool) -> None:
        """Takes in what a module is given, or has returned.

        Args:
            name: The module's name.
            values: What it is given, or what it returned.
            is_given: Which of both.
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
        if any(each.__name__ in _WRAPPERS for each in types):
            return NotImplemented  # it comes again, with this rank's parts
        if _signature(func)[0].startswith("profiler."):
            return func(*args, **kwargs)
        with without_torch_function():
            # Elsewhere autograd has taken apart what consists of other operations.
            if torch.is_inference_mode_enabled():
                with self._again():
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            return self._observer.run(OpCall(func, args, kwargs), self._modules)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Shows the operations that an operation consists of, as well."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
