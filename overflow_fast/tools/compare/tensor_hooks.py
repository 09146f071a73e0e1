"""Hooks that show the tensors of a model's step in order."""

from __future__ import annotations

import collections
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.modules import Handles, class_name_of, named_modules
from ...base.tensors import PLAIN
from ...base.text import error_line
from ...base.tree import Path, call_tensors, path_text, tensors, tensors_in
from ...base.types import TensorPath
from ...torch_internals.compiler import uncompiled
from ...torch_internals.module_internals import own_buffers, own_parameters
from ...torch_internals.replaying import own_compiled_call, set_compiled_call
from ...torch_internals.running import (
    graph_task_id,
    is_recorded,
)
from ...torch_internals.tensor_internals import local_tensor
from .run_settings import scalars_in
from .summary import Shard, part_of, without_modes

# Where tensors are in a step, and which of them a model has.


STATE, FORWARD, BACKWARD = "state", "forward", "backward"


@dataclass(frozen=True)
class StepPath(TensorPath):
    """Where a tensor is in a step: its path, and of which call.

    Its roles are those that recordings are written with, in which gradients are named
    for what they belong to: "parameter", "buffer", "input", "output",
    "output_gradient", "input_gradient", "accumulated_gradient" (a parameter's, as
    backward leaves it, before clipping or an all-reduce) and "parameter_gradient" (as
    the optimizer finds it).

    Attributes:
        phase: "state" (what the step begins with), "forward" or "backward".
        class_name: The module's class.
        call: Which call of the module in this step, from 0.
        caller: The module that called this one.
        is_leaf: Whether the module has no submodules.
    """

    phase: str = STATE
    class_name: str = ""
    call: int = 0
    caller: str = ""
    is_leaf: bool = True

    @property
    def key(self) -> tuple[str, int, str, str]:
        """The same in each run of the same model."""
        return self.module, self.call, self.role, self.path

    @property
    def forward_key(self) -> tuple[str, int, str, str]:
        """The key of the forward's tensor whose gradient this is."""
        role = self.role.removesuffix("_gradient")
        return self.module, self.call, role, self.path

    @property
    def is_computed(self) -> bool:
        """True for what the model makes: no weight of its own, nor what it is given."""
        is_given = self.role == "input" and not self.module
        return self.phase != STATE and not is_given

    @property
    def is_of_call(self) -> bool:
        """True for all but parameters and buffers, and gradients of those."""
        return not self.role.startswith(("parameter", "buffer", "accumulated"))

    def __str__(self) -> str:
        """The path as comparisons write it, such as `h.0.attn #1: output[0]`.

        Each role is named behind the colon, and calls have numbers: a comparison lists
        a parameter, its gradient and every call of its module beside one another.
        """
        role = self.role.replace("_", " ")
        call = f" #{self.call}" if self.call else ""
        if not self.is_of_call:
            return f"{self.fqn}{call}: {role}"
        return f"{self.module or 'the model'}{call}: {role}{self.path}"


def to_hook(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields one module for each name, and compiled wrappers."""
    innermost = {name: module for name, module in named_modules(model)}
    for name, module in named_modules(model):
        is_compiled = uncompiled(module) is not module
        if isinstance(module, torch.jit.ScriptModule):
            continue  # has no forward hooks
        if is_compiled or innermost[name] is module:
            yield module, name


def is_compiled(module: nn.Module) -> bool:
    """True if a call of the module runs compiled code."""
    return uncompiled(module) is not module or own_compiled_call(module) is not None


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of compiled modules with others inside, which are not recorded."""
    return [
        name
        for name, module in named_modules(model)
        if is_compiled(module) and any(True for _ in uncompiled(module).children())
    ]


def class_of(module: nn.Module) -> str:
    return class_name_of(type(uncompiled(module)))


def state_of(model: nn.Module) -> Iterator[tuple[StepPath, torch.Tensor]]:
    """Yields parameters and buffers, shared ones under each of their names."""
    for name, module in named_modules(model):
        kind = class_of(module)
        for role, table in (
            ("parameter", own_parameters(module)),
            ("buffer", own_buffers(module)),
        ):
            for path, tensor in table.items():
                if tensor is not None:
                    yield StepPath(name, role, path, STATE, kind), tensor


_log = logging.getLogger("overflow_fast")
# Is called with a place, the tensor, and the number of the call with the same tensor.
Sink = Callable[[StepPath, torch.Tensor, int | None], None]


@dataclass
class _Running:
    module: nn.Module
    name: str
    call: int
    is_shown: bool
    output: Any = None  # as the module's forward has returned it, if it was kept


class TensorHooks:
    """Shows a model's tensors to a function while it is entered.

    Nothing that runs is changed: hooks return None, and what they raise is logged once.

    Args:
        model: The model.
        sink: Is called with each tensor.
        is_one_thread: Whether only calls in the thread that entered it are shown.

    Attributes:
        failures: What the sink raised, as texts.
        arguments: The plain values that modules were called with, by module and call.
        had_gradients: Whether parameters had gradients when the step's first backward
            began; None before.
    """

    def __init__(
        self, model: nn.Module, sink: Sink, is_one_thread: bool = False
    ) -> None:
        self._model, self._sink = model, sink
        self._lock = threading.RLock()
        self._names = dict(to_hook(model))
        self._handles = Handles()
        self._compiled: dict[nn.Module, tuple[Any, Any]] = {}
        self._is_on = False
        self._is_one_thread, self._thread = is_one_thread, 0
        self.failures: list[str] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Counts calls and tensors anew."""
        self._calls: dict[tuple[str, bool], int] = {}
        self._accumulated = collections.Counter[int]()
        self._stacks: dict[int, list[_Running]] = {}  # of each thread
        self._number = 0
        self.arguments: dict[str, dict[str, str]] = {}
        self.had_gradients: bool | None = None
        self._known: dict[Any, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}

    @property
    def _stack(self) -> list[_Running]:
        """The calls that run in this thread, the outermost first."""
        return self._stacks.setdefault(threading.get_ident(), [])

    def __enter__(self) -> TensorHooks:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._peek, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
            self._show_compiled(module)
        watched = set[int]()
        for place, tensor in state_of(self._model):
            if id(tensor) in watched or not tensor.is_leaf:
                continue
            if place.role == "parameter" and tensor.requires_grad:
                watched.add(id(tensor))
                place = replace(place, phase=BACKWARD, role="accumulated_gradient")
                hook = functools.partial(self._on_accumulated, place)
                register = tensor.register_post_accumulate_grad_hook
                self._handles.append(register(hook))  # type: ignore[no-untyped-call]
        self._is_on, self._thread = True, threading.get_ident()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_on = False
        self._handles.remove_all()
        arguments, had_gradients = self.arguments, self.had_gradients
        for module, (call, shown) in self._compiled.items():
            if own_compiled_call(module) is shown:  # not compiled again since
                set_compiled_call(module, call)
        self._compiled.clear()
        self.begin_step()
        self.arguments, self.had_gradients = arguments, had_gradients

    def _show_compiled(self, module: nn.Module) -> None:
        """Puts hooks around what `compile()` made of a module: it has them inside."""
        call = own_compiled_call(module)
        if call is None:
            return

        def shown(*args: Any, **kwargs: Any) -> Any:
            self._begin(module, args, kwargs)
            output = None
            try:
                output = call(*args, **kwargs)
            finally:
                self._end(module, args, output)
            return output

        self._compiled[module] = call, shown
        set_compiled_call(module, shown)

    def show_state(self) -> None:
        """Shows parameters and buffers."""
        for place, tensor in state_of(self._model):
            self._show(place, tensor)

    def show_gradients(self, found: Mapping[int, torch.Tensor] | None = None) -> None:
        """Shows the gradients of parameters.

        Args:
            found: The gradients by the parameters' ids; None: those that they have.
        """
        for place, tensor in state_of(self._model):
            gradient = tensor.grad if found is None else found.get(id(tensor))
            if place.role == "parameter" and gradient is not None:
                role = "parameter_gradient"
                place = replace(place, phase=BACKWARD, role=role)
                self._show(place, gradient)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off():
            return
        self.isolated(self._begin_call, module, args, kwargs)

    def _peek(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keeps an output that has parts of tensors, which later hooks may unwrap."""
        if torch.compiler.is_compiling() or self._is_off() or not self._stack:
            return
        self.isolated(self._keep_parts, module, output)

    def _keep_parts(self, module: nn.Module, output: Any) -> None:
        running = self._stack[-1]
        if running.module is module and _has_parts(output):
            running.output = output

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off():
            return
        self.isolated(self._end_call, module, output)

    def _is_off(self) -> bool:
        is_foreign = self._is_one_thread and self._thread != threading.get_ident()
        return not self._is_on or is_foreign or is_recorded()

    def isolated(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function; what it raises is logged and noted."""
        try:
            with torch.no_grad():
                function(*arguments)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        text = error_line(error)
        if text not in self.failures:
            self.failures.append(text)
            _log.warning("A tensor could not be recorded: %s", text, exc_info=True)

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        again = graph_task_id() >= 0  # a checkpoint computes a forward again
        name = self._names[module]
        call = self._calls.get((name, again), 0)
        # A compiled wrapper shows the calls of what it wraps.
        is_shown = not self._stack or self._stack[-1].name != name
        if is_shown:
            self._calls[name, again] = call + 1
        self._stack.append(_Running(module, name, call, is_shown))
        if is_shown and not again:
            given = {f"input[{i}]": value for i, value in enumerate(args)}
            given |= {f"input.{key}": value for key, value in kwargs.items()}
            if found := scalars_in(given):
                self.arguments[f"{name} #{call}"] = found
        if is_shown:
            for path, tensor in call_tensors(args, kwargs):
                self._show_call(module, call, "input", path, tensor, again)

    def _end_call(self, module: nn.Module, output: Any) -> None:
        while self._stack and self._stack[-1].module is not module:
            self._stack.pop()  # one that an exception has left without its hook
        if not self._stack:
            return
        running = self._stack[-1]
        again = graph_task_id() >= 0
        if running.is_shown:
            output = output if running.output is None else running.output
            for path, tensor in tensors(output):
                self._show_call(module, running.call, "output", path, tensor, again)
        self._stack.pop()

    def _show_call(
        self,
        module: nn.Module,
        call: int,
        role: str,
        at: Path,
        tensor: torch.Tensor,
        again: bool,
    ) -> None:
        path = path_text(at)
        callers = [each for each in self._stack[:-1] if each.is_shown]
        caller = callers[-1].name if callers else ""
        name, kind = self._names[module], class_of(module)
        is_leaf = not any(True for _ in uncompiled(module).children())
        if not again:
            place = StepPath(name, role, path, FORWARD, kind, call, caller, is_leaf)
            self._show(place, tensor)
        role = f"{role}_gradient"
        place = StepPath(name, role, path, BACKWARD, kind, call, caller, is_leaf)
        self._watch_gradient(place, tensor)

    def _watch_gradient(self, place: StepPath, tensor: torch.Tensor) -> None:
        known = self._watched.get(id(tensor))
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return
        version = _C.version_of(tensor)  # what is written in place has another gradient
        is_known = known is not None and known[0]() is tensor
        if is_known and known is not None and known[1] == version:
            return
        self._watched[id(tensor)] = weakref.ref(tensor), version
        hook = functools.partial(self._on_gradient, place)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, place: StepPath, gradient: torch.Tensor) -> None:
        if self._is_on and gradient is not None:
            self.isolated(self._begin_backward, None)
            self.isolated(self._show, place, gradient)

    def _begin_backward(self, first: torch.Tensor | None) -> None:
        """Notes the gradients that were there, but for the one that was just made."""
        if self.had_gradients is None:
            others = (each for each in self._model.parameters() if each is not first)
            self.had_gradients = any(each.grad is not None for each in others)

    def _on_accumulated(self, place: StepPath, parameter: torch.Tensor) -> None:
        if self._is_on and parameter.grad is not None:
            self.isolated(self._begin_backward, parameter)
            place = replace(place, call=self._accumulated[id(parameter)])
            self._accumulated[id(parameter)] += 1
            self.isolated(self._show, place, parameter.grad)

    def _show(self, place: StepPath, tensor: torch.Tensor) -> None:
        with self._lock:
            key = _identity(tensor)
            known = self._known.get(key)
            same = known[1] if known is not None and known[0]() is not None else None
            if same is None and key is not None:
                self._known[key] = weakref.ref(tensor), self._number
            with without_modes():
                self._sink(place, tensor, same)
            self._number += 1


def _identity(tensor: torch.Tensor) -> Any:
    """A key that tensors with the same unchanged memory have in common, or None."""
    local = local_tensor(tensor)
    if local is not None:  # a write raises the version of the one that it was made by
        return id(tensor), _C.version_of(tensor), "of", _identity(local)
    is_plain = type(tensor) in PLAIN
    if not is_plain or tensor.layout is not torch.strided or tensor.is_inference():
        version = _C.version_of(tensor)
        return None if version is None else (id(tensor), version)
    where = tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *where, tuple(tensor.shape), tensor.stride(), _C.version_of(tensor)


def _has_parts(output: Any) -> bool:
    found = map(part_of, tensors_in(output))
    return any(isinstance(each, Shard) for each in found)
