"""Hooks that show the tensors of a model's step, in the order of execution."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..torch_internals.compiler import uncompiled
from ..torch_internals.running import graph_task_id, is_recorded
from ..torch_internals.tensor_internals import version_of
from ..tree import Path, call_tensors, path_text, tensors, tensors_in
from .places_of import (
    BACKWARD,
    FORWARD,
    Place,
    class_of,
    state_of,
    to_hook,
)
from .shards import Part, part_of

_log = logging.getLogger("overflow_fast")
# Is called with a place, the tensor, and the number of the call with the same tensor.
Sink = Callable[[Place, torch.Tensor, int | None], None]


@dataclass
class _Running:
    module: nn.Module
    name: str
    call: int
    is_shown: bool
    output: Any = None  # as the module's forward has returned it, if it was kept


class Tap:
    """Shows a model's tensors to a function while it is entered.

    Nothing that runs is changed: hooks return None, and what they raise is logged once.

    Args:
        model: The model.
        sink: Is called with each tensor.
        is_one_thread: Whether only calls in the thread that entered it are shown.

    Attributes:
        failures: What the sink raised, as texts.
    """

    def __init__(
        self, model: nn.Module, sink: Sink, is_one_thread: bool = False
    ) -> None:
        self._model, self._sink = model, sink
        self._lock = threading.RLock()
        self._names = dict(to_hook(model))
        self._handles: list[RemovableHandle] = []
        self._is_on = False
        self._is_one_thread, self._thread = is_one_thread, 0
        self.failures: list[str] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Counts calls and tensors anew."""
        self._calls: dict[tuple[str, bool], int] = {}
        self._stacks: dict[int, list[_Running]] = {}  # of each thread
        self._number = 0
        self._known: dict[Any, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def _stack(self) -> list[_Running]:
        """The calls that run in this thread, the outermost first."""
        return self._stacks.setdefault(threading.get_ident(), [])

    def __enter__(self) -> Tap:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._peek, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
        self._is_on, self._thread = True, threading.get_ident()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.begin_step()

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
                name, role = place.class_name, "parameter_gradient"
                place = Place(BACKWARD, place.module, name, 0, role, place.path)
                self._show(place, gradient)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off():
            return
        self._isolated(self._begin_call, module, args, kwargs)

    def _peek(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keeps an output that has parts of tensors, which later hooks may unwrap."""
        if torch.compiler.is_compiling() or self._is_off() or not self._stack:
            return
        self._isolated(self._keep_parts, module, output)

    def _keep_parts(self, module: nn.Module, output: Any) -> None:
        running = self._stack[-1]
        if running.module is module and _has_parts(output):
            running.output = output

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._is_off():
            return
        self._isolated(self._end_call, module, output)

    def _is_off(self) -> bool:
        is_foreign = self._is_one_thread and self._thread != threading.get_ident()
        return not self._is_on or is_foreign or is_recorded()

    def _isolated(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            with torch.no_grad():
                function(*arguments)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
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
            place = Place(FORWARD, name, kind, call, role, path, caller, is_leaf)
            self._show(place, tensor)
        role = f"{role}_gradient"
        place = Place(BACKWARD, name, kind, call, role, path, caller, is_leaf)
        self._watch_gradient(place, tensor)

    def _watch_gradient(self, place: Place, tensor: torch.Tensor) -> None:
        known = self._watched.get(id(tensor))
        is_known = known is not None and known() is tensor
        if not tensor.requires_grad or is_known or isinstance(tensor, nn.Parameter):
            return
        self._watched[id(tensor)] = weakref.ref(tensor)
        hook = functools.partial(self._on_gradient, place)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _on_gradient(self, place: Place, gradient: torch.Tensor) -> None:
        if self._is_on and gradient is not None:
            self._isolated(self._show, place, gradient)

    def _show(self, place: Place, tensor: torch.Tensor) -> None:
        with self._lock:
            key = _identity(tensor)
            known = self._known.get(key)
            same = known[1] if known is not None and known[0]() is not None else None
            if same is None and key is not None:
                self._known[key] = weakref.ref(tensor), self._number
            self._sink(place, tensor, same)
            self._number += 1


def _identity(tensor: torch.Tensor) -> Any:
    """A key that tensors with the same unchanged memory have in common, or None."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not is_plain or tensor.layout is not torch.strided or tensor.is_inference():
        return (id(tensor), version_of(tensor)) if not tensor.is_inference() else None
    where = tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *where, tuple(tensor.shape), tensor.stride(), version_of(tensor)


def _has_parts(output: Any) -> bool:
    found = map(part_of, tensors_in(output))
    return any(isinstance(each, Part) for each in found)
