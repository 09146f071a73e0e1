"""Records the tensors of one step of a model, in the order of execution.

1. `begin()` records parameters and buffers, and puts hooks on all modules and on
   parameters that require gradients.
2. A module's hooks record what it is given and returns, and put a hook on each of these
   tensors, which records its gradient. A tensor that was recorded before, and has not
   been written to since, is a row that refers to the earlier one (`same`).
3. The first optimizer that steps the model records gradients before its step, with its
   settings; else whoever ends the step calls `record_gradients()`.
4. `end()` takes the hooks away, and fetches the numbers of all rows at once.

Hooks return None, and what they raise is logged once and noted: nothing that runs is
changed. The stack of running calls is each thread's own; a lock guards the rows.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import _C
from ...base.modules import Handles, class_name_of, named_modules
from ...base.tensors import PLAIN, devices_of
from ...base.text import dtype_name, error_line
from ...base.tree import call_tensors, path_text, tensors, tensors_in
from ...guard.process import own_rank, world_size
from ...guard.undo.random import RandomStates
from ...torch_internals.compiled_calls import own_compiled_call, set_compiled_call
from ...torch_internals.compiler import uncompiled
from ...torch_internals.module_internals import own_buffers, own_parameters
from ...torch_internals.running import graph_task_id, is_recorded
from ...torch_internals.tensor_internals import local_tensor
from .recorded import RankStep, RecordedTensor
from .recording_schema import BACKWARD, FORWARD, SCHEMA, STATE, FirstLine, RowLine
from .run_settings import has_tf32, scalars_in, settings_of, settings_of_optimizer
from .shards import Shard, part_of
from .signed_sums import without_modes
from .summary import fetch, summarize, values_of

_log = logging.getLogger("overflow_fast")
# The fields of a row that say where its tensor is.
Place = Mapping[str, Any]


def _is_compiled(module: nn.Module) -> bool:
    """True if a call of the module runs compiled code."""
    return uncompiled(module) is not module or own_compiled_call(module) is not None


def _has_inner(module: nn.Module) -> bool:
    return any(True for _ in uncompiled(module).children())


def _to_hook(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields one module for each name, and compiled wrappers."""
    innermost = {name: module for name, module in named_modules(model)}
    for name, module in named_modules(model):
        is_wrapper = uncompiled(module) is not module
        if isinstance(module, torch.jit.ScriptModule):
            continue  # has no forward hooks
        if is_wrapper or innermost[name] is module:
            yield module, name


def _state_of(model: nn.Module) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yields parameters and buffers, shared ones under each of their names."""
    for name, module in named_modules(model):
        place = {"module": name, "class_name": class_name_of(type(uncompiled(module)))}
        for role, table in (
            ("parameter", own_parameters(module)),
            ("buffer", own_buffers(module)),
        ):
            for path, tensor in table.items():
                if tensor is not None:
                    yield {**place, "phase": STATE, "role": role, "path": path}, tensor


@dataclass
class _Running:
    """A call that has begun.

    Attributes:
        module: The module.
        place: The fields that all of its rows have.
        is_shown: False for a call that a compiled wrapper shows already.
        output: What the module's forward has returned, if it was kept.
    """

    module: nn.Module
    place: dict[str, Any]
    is_shown: bool
    output: Any = None


class StepRecorder:
    """Records one step: from `begin()` to `end()`.

    Args:
        model: The model.
        step: The number of the step.
    """

    def __init__(self, model: nn.Module, step: int) -> None:
        self._model, self._step = model, step
        self._rows: list[tuple[RecordedTensor, torch.Tensor | None]] = []
        self._lock = threading.RLock()
        self._names = dict(_to_hook(model))
        self._handles = Handles()
        self._compiled: dict[nn.Module, tuple[Any, Any]] = {}
        self._is_on = self._has_gradients = False
        self._optimizers = set[int]()  # that have stepped
        self._failures: list[str] = []
        self._calls = collections.Counter[tuple[str, bool]]()
        self._accumulated = collections.Counter[int]()
        self._stacks: dict[int, list[_Running]] = {}  # of each thread
        self._known: dict[Any, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._watched: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}

    def begin(self) -> None:
        """Records parameters and buffers, and what the model computes from now on."""
        model = self._model
        self._settings = settings_of(model)
        self._has_tf32 = has_tf32(model)
        self._random = RandomStates(devices_of([model]), loads_numpys=False)
        self._parameters = {id(p) for p in model.parameters() if p.requires_grad}
        for place, tensor in _state_of(model):
            self._add(place, tensor)
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._peek, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
            self._show_compiled(module)
        watched = set[int]()
        for place, tensor in _state_of(model):
            if id(tensor) in self._parameters - watched and tensor.is_leaf:
                watched.add(id(tensor))
                place |= {"phase": BACKWARD, "role": "accumulated_gradient"}
                hook = functools.partial(self._on_accumulated, place)
                register = tensor.register_post_accumulate_grad_hook
                self._handles.append(register(hook))  # type: ignore[no-untyped-call]
        before_step = register_optimizer_step_pre_hook(self._before_optimizer)
        self._handles.append(before_step)
        self._is_on = True

    def stop(self) -> None:
        """Removes the hooks."""
        self._is_on = False
        self._handles.remove_all()
        for module, (call, shown) in self._compiled.items():
            if own_compiled_call(module) is shown:  # not compiled again since
                set_compiled_call(module, call)
        self._compiled.clear()

    def end(self, raised: str = "") -> RankStep:
        """Ends the step. Incurs a CPU-GPU sync for each device and dtype."""
        self.stop()
        summaries = iter(fetch([n for _, n in self._rows if n is not None]))
        for row, numbers in self._rows:
            if numbers is not None:
                row.line.take(next(summaries))
        compiled = dict.fromkeys(
            name
            for module, name in self._names.items()
            if _is_compiled(module) and _has_inner(module)
        )
        line = FirstLine(
            schema=SCHEMA,
            time=time.time(),
            step=self._step,
            rank=own_rank(),
            world_size=world_size(),
            class_name=type(self._model).__name__,
            settings=self._settings,
            tf32=self._has_tf32,
            compiled=list(compiled),
            drawn=self._random.drawn(),
            random=self._random.digests(),
            failures=self._failures,
            raised=raised,
            rows=len(self._rows),
        )
        return RankStep(line, [row for row, _ in self._rows])

    def record_gradients(self, found: Mapping[int, torch.Tensor] | None = None) -> None:
        """Records the gradients of parameters, once.

        Args:
            found: The gradients by the parameters' ids; None: those that they have.
        """
        if self._has_gradients:
            return
        self._has_gradients = True
        for place, tensor in _state_of(self._model):
            gradient = tensor.grad if found is None else found.get(id(tensor))
            if place["role"] == "parameter" and gradient is not None:
                place |= {"phase": BACKWARD, "role": "parameter_gradient"}
                self._add(place, gradient)

    # What torch calls.

    def _isolated(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function; what it raises is logged and noted."""
        try:
            with torch.no_grad():
                function(*arguments)
        except Exception as error:
            text = error_line(error)
            if text not in self._failures:
                self._failures.append(text)
                _log.warning("A tensor could not be recorded: %s", text, exc_info=True)

    def _is_off(self) -> bool:
        return torch.compiler.is_compiling() or not self._is_on or is_recorded()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_off():
            self._isolated(self._begin_call, module, args, kwargs)

    def _peek(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keeps an output that has parts of tensors, which later hooks may unwrap."""
        if not self._is_off() and self._stack and self._stack[-1].module is module:
            self._isolated(self._keep_parts, self._stack[-1], output)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_off():
            self._isolated(self._end_call, module, output)

    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        """Records gradients as the first optimizer of the model's parameters has them.

        Where one is stepped within backward, most have none yet.
        """
        self._isolated(self._add_optimizer, optimizer)

    def _on_gradient(self, place: Place, gradient: torch.Tensor) -> None:
        if self._is_on and gradient is not None:
            self._isolated(self._add, place, gradient)

    def _on_accumulated(self, place: Place, parameter: torch.Tensor) -> None:
        if self._is_on and parameter.grad is not None:
            place = {**place, "call": self._accumulated[id(parameter)]}
            self._accumulated[id(parameter)] += 1
            self._isolated(self._add, place, parameter.grad)

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

    # What is recorded then.

    @property
    def _stack(self) -> list[_Running]:
        """The calls that run in this thread, the outermost first."""
        return self._stacks.setdefault(threading.get_ident(), [])

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, stack = self._names[module], self._stack
        again = graph_task_id() >= 0  # a checkpoint computes a forward again
        call = self._calls[name, again]
        callers = [each.place["module"] for each in stack if each.is_shown]
        place = {
            "module": name,
            "class_name": class_name_of(type(uncompiled(module))),
            "call": call,
            "caller": callers[-1] if callers else "",
            "is_leaf": not _has_inner(module),
        }
        # A compiled wrapper shows the calls of what it wraps.
        is_shown = not stack or stack[-1].place["module"] != name
        stack.append(_Running(module, place, is_shown))
        if not is_shown:
            return
        self._calls[name, again] += 1
        given = {f"input[{i}]": value for i, value in enumerate(args)}
        given |= {f"input.{key}": value for key, value in kwargs.items()}
        if not again and (found := scalars_in(given)):
            self._settings[f"{name} #{call}"] = found
        for path, tensor in call_tensors(args, kwargs):
            self._add_of_call(place, "input", path_text(path), tensor, again)

    def _keep_parts(self, running: _Running, output: Any) -> None:
        if any(isinstance(part_of(each), Shard) for each in tensors_in(output)):
            running.output = output

    def _end_call(self, module: nn.Module, output: Any) -> None:
        stack = self._stack
        while stack and stack[-1].module is not module:
            stack.pop()  # one that an exception has left without its hook
        running = stack.pop() if stack else None
        if running is None or not running.is_shown:
            return
        output = output if running.output is None else running.output
        again = graph_task_id() >= 0
        for path, tensor in tensors(output):
            self._add_of_call(running.place, "output", path_text(path), tensor, again)

    def _add_of_call(
        self, place: Place, role: str, path: str, tensor: torch.Tensor, again: bool
    ) -> None:
        """Records a tensor of a call, and its gradient when that is computed."""
        if not again:
            forward = {"phase": FORWARD, "role": role, "path": path}
            self._add({**place, **forward}, tensor)
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return
        known = self._watched.get(id(tensor))
        version = _C.version_of(tensor)  # what is written in place has another gradient
        if known is None or known[0]() is not tensor or known[1] != version:
            self._watched[id(tensor)] = weakref.ref(tensor), version
            backward = {"phase": BACKWARD, "role": f"{role}_gradient", "path": path}
            hook = functools.partial(self._on_gradient, {**place, **backward})
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _add_optimizer(self, optimizer: Any) -> None:
        if id(optimizer) in self._optimizers:
            return
        number = len(self._optimizers)
        found = settings_of_optimizer(optimizer, number, self._parameters)
        if found:
            self._optimizers.add(id(optimizer))
            self._settings |= found
            self.record_gradients()

    def _add(self, place: Place, tensor: torch.Tensor) -> None:
        """Adds the row of a tensor, and computes its numbers."""
        with self._lock, without_modes():
            same = self._same_as(tensor)
            is_gradient = place["phase"] == BACKWARD
            line = RowLine(
                order=len(self._rows),
                **place,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                requires_grad=None if is_gradient else tensor.requires_grad,
                same=same,
            )
            row = RecordedTensor(line)
            self._rows.append((row, None))  # also if it cannot be read
            part, values = part_of(tensor), values_of(tensor)
            if isinstance(part, str) or isinstance(values, str):
                line.why = part if isinstance(part, str) else str(values)
                return
            if part is not None:
                line.part, line.local = part, tuple(values.shape)
            if same is None:
                self._rows[-1] = row, summarize(values, part)

    def _same_as(self, tensor: torch.Tensor) -> int | None:
        """The row of the same tensor, if it was recorded and not written to since."""
        key = _identity(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            return known[1]
        if key is not None:
            self._known[key] = weakref.ref(tensor), len(self._rows)
        return None


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
