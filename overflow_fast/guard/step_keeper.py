"""Keeps a step by reference, so that it can be run again: all that clean steps pay.

Nothing here runs anything again.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from .. import _C
from ..scanner.modules import first_parameter_of, parameters_of, stepped_by
from ..scanner.tensors import devices_of, loss_in
from ..scanner.text import is_of_program
from ..scanner.tree import (
    CALL_DEPTH,
    OBJECTS_OF_STEP,
    Path,
    copied_call,
    find,
    is_container,
    opaque,
    tensors,
    tensors_in,
)
from ..torch_internals.compiler import compiled_call_of, has_compiled
from ..torch_internals.running import graph_task_id, is_recorded
from .undo.code_names import global_names
from .undo.random import RandomStates
from .undo.step_start import StepStart
from .undo.tensors import num_bytes
from .watching.inputs import WeakTensor, hold
from .watching.watch import ModelWatch

# Random states, autocast and training mode at one moment.


class Ambient:
    """Random states, autocast and training mode at one moment.

    Does not incur a CPU-GPU sync.

    Args:
        model: The model whose training mode counts.
        devices: The devices besides the CPU that it is on.

    Attributes:
        random: The random states.
        training: The model's training mode.
        autocast: Of each kind of device: whether autocast is on, and its dtype.
        caches: Whether autocast caches what it casts.
        shares_buffers: DDP: whether the forward takes the first rank's buffers.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.random = RandomStates(devices)
        self.training = model.training
        types = ("cpu", *dict.fromkeys(device.type for device in devices))
        self.autocast = autocast_of(types)
        self.caches = torch.is_autocast_cache_enabled()
        self.shares_buffers = getattr(model, "require_forward_param_sync", None)


def autocast_of(types: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    """Of each kind of device: whether autocast is on, and its dtype."""
    return [
        (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
        for type in types
    ]


# A function that is kept, with the variables that it takes from around it.


MAX_CALLED = 3  # functions deep; chosen, not measured
_MAX_VALUES = 256  # of an object that may be a batch
_OF_PROGRAM = (torch.Tensor, nn.Module, Optimizer, Dataset, DataLoader)
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class HeldFunction:
    """A function without arguments, with what its variables hold now.

    A loop gives them the next batch before the step is judged. The variables of the
    functions of its module that it calls are held, too.

    Args:
        function: The function. What it reads from variables around it, or has as
            arguments of `functools.partial`, is its batch if there are tensors in it.

    Attributes:
        function: The same.
        called: What is called in the end: of a partial, what it is of.
        names: The names of a partial's positional arguments.
        plain: The function that `called` is, or None where it is another object.
        held: The variables of each function, by their names.
        values: The batch: the values of those variables, by their names.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        plain = function
        self.names: list[str] = []
        if isinstance(function, functools.partial):
            plain = function.func
            self.names = argument_names(plain, len(function.args))
            for name, each in self.given.items():
                self._add(name, each)
        self.called = plain
        self.plain = plain if isinstance(plain, types.FunctionType) else None
        self.held: dict[types.FunctionType, dict[str, Any]] = {}
        if self.plain is not None:
            self._hold(self.plain, 0)
            for each in self.held.values():
                for name, value in each.items():
                    self._add(name, value)
            self._add_defaults(self.plain)
        self._add_objects()

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a partial, by their names."""
        own = self.function
        if not isinstance(own, functools.partial):
            return {}
        return {**dict(zip(self.names, own.args, strict=True)), **own.keywords}

    def _hold(self, function: types.FunctionType, depth: int) -> None:
        """Holds the variables of a function, and of those of its module among them."""
        held = self.held[function] = dict(variables_of(function))
        if depth == MAX_CALLED:
            return
        for each in held.values():
            if isinstance(each, types.FunctionType) and each not in self.held:
                if each.__globals__ is not function.__globals__:
                    continue
                self._hold(each, depth + 1)

    def _add_defaults(self, function: types.FunctionType) -> None:
        count = len(function.__defaults__ or ())
        last = function.__code__.co_varnames[: function.__code__.co_argcount]
        for name, each in zip(
            last[-count:] if count else (), function.__defaults__ or (), strict=False
        ):
            self._add(name, each)

    def _add(self, name: str, value: Any) -> None:
        if name in self.values or isinstance(value, (nn.Module, nn.Parameter)):
            return
        if not is_container(value):
            self._objects.setdefault(name, value)
        elif any(not isinstance(t, nn.Parameter) for t in _given_in(value)):
            self.values[name] = value

    def _add_objects(self) -> None:
        """Adds objects that hold data alone: as many rows as the rest of the batch."""
        sizes = _sizes(_given_in(self.values))
        for name, value in self._objects.items():
            own = _sizes([tensor for _, tensor in data_in(value)])
            if len(own) == 1 and (not sizes or own == sizes):
                self.values[name] = value


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first parameters; their places where they have none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in _BY_PLACE][:count]
    return names + [f"input[{i}]" for i in range(len(names), count)]


def variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from around a function that it can read, and what they hold."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    around = function.__globals__
    for name in global_names(function.__code__):
        if name in around:
            yield name, around[name]


def data_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors of a container, or of an object that holds data alone.

    That is no object that leads to modules, optimizers or datasets, or to many values.
    """
    if is_container(value):
        return tensors(value)
    found = find(value, _OF_PROGRAM, most=_MAX_VALUES)
    is_data = all(type(each) is torch.Tensor for _, each in found)
    return found if found and is_data and not opaque(value, most=_MAX_VALUES) else []


_given_in = functools.partial(tensors_in, objects=OBJECTS_OF_STEP)


def _sizes(tensors: list[torch.Tensor]) -> set[int]:
    """The sizes of the first dimension of tensors that have one."""
    return {tensor.size(0) for tensor in tensors if tensor.dim()}


# One call of a step, with what it takes to make it again.


_MAX_HELD_BYTES = 2**26  # of gradients, from forward to the verdict; chosen
NUM_SAMPLED = 64  # values of a tensor that is compared with itself later


class KeptCall:
    """One call of the step: of a model, or of a function that calls models.

    Attributes:
        function: The model, or the `HeldFunction`.
        batch: What it is called with, in any nesting.
        ambient: What was set when it began.
        outputs: The tensors whose gradients are held, weakly.
        held: The gradients of what it returned, by their places among its tensors.
        not_held: How many bytes of gradients were too many to be held; 0 for none.
        num_held: How many gradients have come to it, of several backwards, too.
        returns_loss: Whether backward is called on what it returned.
        is_part_of_compiled: Whether it ran in code that was compiled together with
            others', and runs eagerly when it is called alone.
        has_stand_ins: Whether other tensors stood in for the model's own weights, and
            do not when it is called again.
        called_at: The file and the line of the program that made it; "" and 0 if that
            is not known.
        was_overwritten: Whether the batch had been written to when the call was first
            made again; None before that.
        follows_others: Whether the loop had outputs of other forwards by then, whose
            backward had not come: it may have computed the arguments from them.
        began: The time of `time.perf_counter()` when it was called in a step; None
            where it was not seen to be called.
        has_backward: Whether one follows; False for a forward without autograd, whose
            output is all there is; None where a loss that it returns will tell.
        has_autograd: Whether it ran with autograd, where no backward follows.
        forwards: Of a function: the calls of models in it, which can be made again
            where the function itself cannot.
        has_returned: Whether it returned; False if an exception has left it.
        raised: The type of the exception that the program's code has raised in the
            step, in this call or behind it; None for none.
    """

    called_at = "", 0
    has_returned = True
    raised: type[Exception] | None = None
    follows_others = False
    began: float | None = None
    has_backward: bool | None = True
    has_autograd = False
    forwards: Sequence[Any] = ()

    def __init__(
        self,
        function: Any,
        batch: Any,
        ambient: Ambient,
        tensors: list[torch.Tensor] | None = None,
    ) -> None:
        self.function = function
        self.batch = batch
        self.ambient = ambient
        self.outputs: list[WeakTensor] = []
        self.held: dict[int, torch.Tensor] = {}
        self.not_held = self.num_held = 0
        self.returns_loss = False
        self.is_part_of_compiled = False
        self.has_stand_ins = False
        self.was_overwritten: bool | None = None
        self._tensors = _given_in(batch, CALL_DEPTH) if tensors is None else tensors
        self._versions = _C.versions_of(self._tensors)
        self._samples = _C.samples_of(self._tensors, NUM_SAMPLED)

    @property
    def awaits_backward(self) -> bool:
        """True if no gradient has come to what it returned so far."""
        return not self.held and not self.not_held

    def hold_gradients(self, output: Any, loss: torch.Tensor | None) -> None:
        """Holds the gradients of the output, by reference, once they are there.

        Of the loss in it if there is one, else of all tensors up to a size.
        """
        self.returns_loss = loss is not None
        asked = [
            (place, tensor)
            for place, tensor in enumerate(tensors_in(output))
            if (loss is None or tensor is loss) and tensor.grad_fn is not None
        ]
        size = sum(tensor.nbytes for _, tensor in asked)
        if size > _MAX_HELD_BYTES:
            self.not_held = size
            return
        for place, tensor in asked:
            hook = functools.partial(self._hold, place)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self.outputs.append(hold(tensor))

    def _hold(self, place: int, gradient: torch.Tensor) -> None:
        self.held[place] = gradient
        self.num_held += 1


# What is kept of a call beyond its step.


_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def marks_of(function: Any) -> list[Any]:
    """The marks of a kept function: its code, and what it reads besides the batch.

    Values are held; objects weakly, or a model would live as long as its guard.
    """
    if not isinstance(function, HeldFunction):
        return [weakref.ref(function)]
    held, called, given = function.held, function.called, function.given
    read = [e for e in given.values() if type(e) not in _VALUES]
    if function.plain is None:  # a method may read the batch from its object
        read.append(getattr(called, "stands_for", called))
    for each, variables in held.items():
        read += [*variables.values(), *(each.__defaults__ or ())]
        read += (each.__kwdefaults__ or {}).values()
    known = {id(each) for each in (*function.values.values(), *held)}
    marks = [_mark(each) for each in read if id(each) not in known]
    return [*(each.__code__ for each in held), *given, *function.values, *marks]


def _mark(value: Any) -> Any:
    try:
        return value if type(value) in _VALUES else weakref.ref(value)
    except TypeError:  # a list may be another one by now, at the same place
        return object()


def _batch_alone(call: KeptCall) -> KeptCall | None:
    """A call without its function; None if its batch is large, or computed outside."""
    tensors = call._tensors
    is_large = sum(map(num_bytes, tensors)) > _MAX_HELD_BYTES
    if is_large or not tensors or any(each.grad_fn is not None for each in tensors):
        return None
    if isinstance(call.function, HeldFunction):
        given = call.function.given
        numbers = {k: each for k, each in given.items() if type(each) in _VALUES}
        call.batch = {**numbers, **call.batch}
    call.function = marks_of(call.function)
    call.held, call.outputs, call.forwards = {}, [], ()
    return call


# The calls of a step.


_MAX_KEPT = 8  # the last calls of a step; chosen, not measured
COMPILED = "was compiled together with code around it, which hides its arguments"
GRAPH = "was captured in a CUDA graph, which runs no code that could be run again"


class _OfThread(threading.local):
    """The forward that runs in a thread, and is kept."""

    open: KeptCall | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:  # a copied guard's
        return _OfThread, ()


class LeftGradients:
    """The non-finite gradients that a bad step leaves to the next one, held weakly.

    Attributes:
        is_new: The step that is judged, or was judged last, has left them.
    """

    def __init__(self) -> None:
        self.is_new = False
        self._held: dict[str, tuple[int, weakref.ref[torch.Tensor], int]] = {}

    def note(
        self,
        step: int,
        gradients: Mapping[str, torch.Tensor],
        since: Mapping[str, int],
    ) -> None:
        """Notes those of a bad step.

        Args:
            step: Its number.
            gradients: Its bad gradients, by name.
            since: The steps that have left it some of these.
        """
        self.is_new = True
        self._held = {
            name: (since.get(name, step), weakref.ref(each), version)
            for name, each in gradients.items()
            if (version := _C.version_of(each)) is not None
        }

    def unchanged(self, gradients: Container[int]) -> dict[str, int]:
        """Those that nobody has written to since, by name, with their step.

        Args:
            gradients: The identities of the gradients that are there now.
        """
        found = {}
        for name, (step, reference, version) in self._held.items():
            gradient = reference()
            if gradient is None or id(gradient) not in gradients:
                continue
            if _C.version_of(gradient) == version:
                found[name] = step
        return found

    def clear(self) -> None:
        """Forgets them: a step since then was finite."""
        self._held.clear()


class StepKeeper:
    """Keeps the calls of the watched models since the last judged step.

    Args:
        start: The models as they were when the step began.

    Attributes:
        start: The same.
        calls: The calls.
        num_dropped: How many were too many to be kept.
        hidden_by: Why forwards could not be kept, as the end of a sentence, or "".
        is_running: Whether a function runs that is kept as a whole.
        had_gradients: Whether gradients that may be bad were there before the step's
            first forward: no step before was judged, or that one was bad.
        left: The gradients that the last bad step has left.
        left_over: Those of them that nobody has cleared or written to before the step's
            first forward, by name, with that step.
        clean: The last call of the last clean step, with `marks_of` its function; None
            if its batch is not kept.
    """

    def __init__(self, start: StepStart) -> None:
        self.start = start
        self.clean: KeptCall | None = None
        self._devices: dict[int, tuple[torch.device | None, list[torch.device]]] = {}
        self.calls: list[KeptCall] = []
        self.num_dropped = 0
        self.hidden_by = ""
        self.is_running = False
        self.had_gradients = False
        self.left = LeftGradients()
        self.left_over: dict[str, int] = {}
        self._doubts_gradients = True
        self._now = _OfThread()
        self._forwards: list[KeptCall] = []  # of the function that runs

    def begin(
        self, model: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Keeps what an outermost forward is called with.

        Not tensors that stand in for the model's own weights, which may have its size.
        """
        if not torch.is_grad_enabled():
            return
        if args is None:
            self.hidden_by = self.hidden_by if self.is_running else COMPILED
            return
        if is_recorded():
            return
        devices = self._devices_of(model)
        if self._is_captured(devices):
            return
        if not self.is_running:
            self._look_for_gradients(model)
        ambient = Ambient(model, devices)
        batch, found = copied_call(args, kwargs)
        is_compiled, called = False, model
        if has_compiled():
            is_compiled, known = compiled_call_of(model)
            called = model if known is None else known
            is_compiled = is_compiled and known is None
        self._now.open = call = KeptCall(called, batch, ambient, found)
        call.is_part_of_compiled = is_compiled
        call.has_stand_ins = has_stand_ins
        call.called_at = _calling_line()
        call.began = perf_counter()
        before = self._forwards if self.is_running else self.calls
        call.follows_others = any(each.awaits_backward for each in before)

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Keeps the gradients that its output will get."""
        call, self._now.open = self._now.open, None
        if call is not None:
            call.hold_gradients(output, loss)
            self._add(call, self._forwards if self.is_running else self.calls)

    def leave(self) -> None:
        """Keeps a forward that an exception has left.

        Not one that backward computes again: torch leaves it early.
        """
        call, self._now.open = self._now.open, None
        if call is not None and graph_task_id() < 0:
            call.has_returned = False
            self._add(call, self._forwards if self.is_running else self.calls)

    def note_raised(
        self, error: Exception, calls: Sequence[KeptCall] | None = None
    ) -> None:
        """Notes the exception that has ended the step: a replay may raise it, too.

        Args:
            error: The exception.
            calls: Those that may raise it again; None for all.
        """
        for call in self.calls if calls is None else calls:
            for each in (call, *call.forwards):
                each.raised = type(error)

    @property
    def has_left(self) -> bool:
        """True if an exception has left the last call."""
        return bool(self.calls) and not self.calls[-1].has_returned

    def drop_left(self) -> None:
        """Lets go of calls that an exception has left: the step goes on without."""
        self.calls = [each for each in self.calls if each.has_returned]

    def run(
        self,
        model: nn.Module,
        function: Callable[[], Any],
        shield: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Calls a function that calls the model, and keeps it.

        Args:
            model: The model.
            function: The function.
            shield: Lets no error of the guard's own out.
        """
        call = None
        with shield():
            self._look_for_gradients(model)
            self.start.before_run()
            held = HeldFunction(function)
            ambient = Ambient(model, self._devices_of(model))
            call = KeptCall(held, held.values, ambient)
            call.began = perf_counter()
        was_running = self.is_running
        self.is_running = was_running or call is not None
        try:
            output = function()
        except Exception:
            if call is not None and not was_running:
                call.forwards, call.has_returned = self._forwards, False
                call.returns_loss = True
                self._add(call, self.calls)
            raise
        finally:
            self.is_running = was_running
            forwards = self._forwards
            if not was_running:
                self._forwards = []
        with shield():
            if call is not None and not was_running:
                # Of those that were left, the function has caught the exception.
                call.forwards = [each for each in forwards if each.has_returned]
                call.hold_gradients(output, loss_in(output))
                call.returns_loss = True
                self._add(call, self.calls)
        return output

    def _add(self, call: KeptCall, calls: list[KeptCall]) -> None:
        calls.append(call)
        if len(calls) > _MAX_KEPT:
            del calls[0]
            self.num_dropped += calls is self.calls

    def _look_for_gradients(self, model: nn.Module) -> None:
        if not self._doubts_gradients or self.calls:
            return
        leaves = [each for each in parameters_of(model) if each.is_leaf]
        there = {id(p.grad) for p in leaves if p.grad is not None}
        self.had_gradients = bool(there)
        self.left_over.update(self.left.unchanged(there))

    def clear(self) -> None:
        """Lets go of what was kept, but for the batch of a clean step: it is judged."""
        is_bad, self.left.is_new = self.left.is_new, False
        if self.calls or is_bad:  # each of several models calls this
            self._doubts_gradients = is_bad
        if self.calls and not is_bad:
            self.clean = _batch_alone(self.calls[-1])
            self.left.clear()
        self.calls.clear()
        self.had_gradients = False
        self.left_over.clear()
        self.start.end_judgement()
        self._now.open = None
        self.num_dropped = 0
        if self.hidden_by == COMPILED:
            self.hidden_by = ""

    def _is_captured(self, devices: Sequence[torch.device]) -> bool:
        """True if a CUDA graph is being captured, whose replays call no hook."""
        has_device = any(each.type == "cuda" for each in devices)
        is_captured = has_device and torch.cuda.is_current_stream_capturing()
        if is_captured and not self.is_running:
            self.hidden_by = GRAPH
        return is_captured

    def _devices_of(self, model: nn.Module) -> list[torch.device]:
        """The devices of a model, looked up again when its first parameter moves."""
        first = first_parameter_of(model)
        device = None if first is None else first.device
        known = self._devices.get(id(model))
        if known is None or known[0] != device:
            known = self._devices[id(model)] = device, devices_of([model])
        return known[1]


def _calling_line() -> tuple[str, int]:
    """The file and the number of the deepest running line of the program's own.

    Its own are no lines of installed packages; "" and 0 if there is none.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_program(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def make_keeper(
    may_replay: bool, watches: Sequence[ModelWatch], start: StepStart | None
) -> StepKeeper | None:
    """Makes the watches keep their calls, if steps may be run again."""
    if start is None or not may_replay:
        return None
    keeper = StepKeeper(start)
    for watch in watches:
        watch.inputs.capture = keeper
    return keeper


# The optimizers' last steps.


_NUMBERS = (float, int, tuple, list)


class _LastStep(NamedTuple):
    names: tuple[str, ...]
    settings: list[tuple[Any, ...]]
    versions: list[int]
    weights: list[weakref.ref[torch.Tensor]]
    shapes: list[torch.Size]


def _are_same(references: list[Any], others: list[Any]) -> bool:
    """True if two lists hold the same objects; `==` would compare their tensors."""
    is_as_long = len(references) == len(others)
    return is_as_long and all(map(operator.is_, references, others))


def _names_of_numbers(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings to keep: what holds a model, or an optimizer, keeps it alive."""
    return tuple(k for k, v in group.items() if type(v) in _NUMBERS and k != "params")


class LastSteps:
    """The settings of optimizers' last steps, and the versions of weights after them.

    Both may have changed when a weight is found to be non-finite: a scheduler sets the
    next learning rate, and other code writes to weights.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, _LastStep] = WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a step that was made. Does not incur a CPU-GPU sync."""
        groups, stepped = optimizer.param_groups, stepped_by(optimizer)
        versions = _C.versions_of(stepped)
        known = self._of.get(optimizer)
        weights = list(map(weakref.ref, stepped))  # one object for each that lives
        if known is not None and _are_same(weights, known.weights):
            shapes = known.shapes
        else:
            shapes = [each.shape for each in stepped]
        names = known.names if known is not None else _names_of_numbers(groups[0])
        try:
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        except KeyError:  # others than the first step had
            names = tuple(
                set.intersection(*(set(_names_of_numbers(g)) for g in groups))
            )
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        self._of[optimizer] = _LastStep(names, settings, versions, weights, shapes)

    def settings(
        self, optimizer: torch.optim.Optimizer, place: int
    ) -> Mapping[str, Any]:
        """The numbers among a group's settings in the last step, where it is known."""
        last = self._of.get(optimizer)
        if last is None or place >= len(last.settings):
            return {}
        pairs = zip(last.names, last.settings[place], strict=True)
        return {name: value for name, value in pairs if type(value) in _NUMBERS}

    def writes_since(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> int:
        """The number of writes to a weight since, by its version; 0 if not known."""
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.versions):
            return 0
        pairs = zip(weights, last.versions, strict=True)
        before = [version for each, version in pairs if each is weight]
        return max(0, _C.versions_of([weight])[0] - before[0]) if before else 0

    def shape_before(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> torch.Size | None:
        """The shape of the weight that the last step had in the place of this one.

        None for the same weight, and where that is not known.
        """
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.weights):
            return None
        places = [i for i, each in enumerate(weights) if each is weight]
        if not places or last.weights[places[0]]() is weight:
            return None
        return last.shapes[places[0]]
