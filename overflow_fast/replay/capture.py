"""Keeps the calls of a step, by reference, so that it can be run again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from .. import _C
from ..core.modules import (
    first_parameter_of,
    modules_in,
    named_buffers,
    named_modules,
    named_parameters,
    parameters_of,
    set_shares_buffers,
)
from ..core.selection import full_name
from ..core.tensors import devices_of, dtype_named, has_memory, loss_in
from ..state.objects import attribute_names, global_names, is_taken_from
from ..state.random import RandomStates
from ..state.step_start import StepStart
from ..text import dtype_name
from ..torch_internals.compiler import compiled_call_of, has_compiled, uncompiled
from ..torch_internals.running import is_recorded
from ..tree import (
    CALL_DEPTH,
    NotRebuilt,
    Path,
    at,
    attributes,
    copied_call,
    find,
    is_container,
    mapped,
    opaque,
    path_text,
    tensors,
    tensors_in,
)
from .op_trace import Leaf, is_float
from .places import calling_line, is_of_user

if TYPE_CHECKING:
    from .step_schema import SavedAmbient


# Random states, autocast and training mode at one moment.


class Ambient:
    """Random states, autocast and training mode at one moment.

    Does not incur a CPU-GPU sync.

    Args:
        model: The model whose training mode counts.
        devices: The devices besides the CPU that it is on.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self._random = RandomStates(devices)
        self._training = model.training
        types = ("cpu", *dict.fromkeys(device.type for device in devices))
        self._autocast = [
            (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
            for type in types
        ]
        self._caches = torch.is_autocast_cache_enabled()
        # DDP: whether the forward takes the first rank's buffers.
        self._shares_buffers = getattr(model, "require_forward_param_sync", None)

    def as_plain(self, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
        """All of it as JSON.

        Args:
            put: Keeps a tensor, and returns its name.
        """
        return {
            **self._random.as_plain(put),
            "training": self._training,
            "autocast": [
                [t, is_on, dtype_name(dtype)] for t, is_on, dtype in self._autocast
            ],
            "caches": self._caches,
        }

    @classmethod
    def of_plain(
        cls, plain: SavedAmbient, tensor_of: Callable[[str], torch.Tensor]
    ) -> Ambient:
        """Makes it of JSON; states of devices that are not here are left out.

        Args:
            plain: What `as_plain()` returned.
            tensor_of: Returns the tensor that it kept by a name.

        Raises:
            ValueError: If a state, a dtype or a device is none.
            RuntimeError: Likewise, as torch says it.
        """
        ambient = cls.__new__(cls)
        ambient._random = RandomStates.of_saved(plain, tensor_of)
        ambient._training = plain.training
        ambient._autocast = [
            (type, is_on, _dtype_of(dtype))
            for type, is_on, dtype in plain.autocast
            if torch.amp.is_autocast_available(type)
        ]
        ambient._caches = plain.caches
        ambient._shares_buffers = None
        return ambient

    def with_autocast_of_now(self) -> Ambient:
        """The same, with autocast as it is at this moment."""
        copy = Ambient.__new__(Ambient)
        vars(copy).update(vars(self))
        copy._autocast = [
            (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
            for type, _, _ in self._autocast
        ]
        return copy

    def has_drawn(self) -> bool:
        """True if a random state is another one now."""
        return bool(self._random.drawn())

    @contextmanager
    def applied(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Sets all of it; autocast is as it was afterwards, the rest is not."""
        self._random.restore()
        for model in models:
            if model.training != self._training:
                model.train(self._training)
            if self._shares_buffers is not None:
                set_shares_buffers(model, self._shares_buffers)
        with ExitStack() as stack:
            for type, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                    )
                )
            yield


def _dtype_of(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


# A function that is kept, with the variables that it takes from around it.


_MAX_CALLED = 3
_MAX_VALUES = 256  # of an object that may be a batch
_OF_PROGRAM = (torch.Tensor, nn.Module, Optimizer, Dataset, DataLoader)
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Captured:
    """A function without arguments, which can be called with other data.

    It is called with what its variables held when this was made: a loop has given them
    the next batch since. So are the functions of its module that it calls.

    Args:
        function: The function. What it reads from variables around it, or has as
            arguments of `functools.partial`, is its batch if there are tensors in it.

    Attributes:
        values: The batch: the values of those variables, by their names.
        around: All variables that it reads, by their names.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.values: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        plain = function
        self._names: list[str] = []  # of the positional arguments of a partial
        if isinstance(function, functools.partial):
            plain = function.func
            self._names = argument_names(plain, len(function.args))
            for name, each in zip(self._names, function.args, strict=True):
                self._add(name, each)
            for key, each in function.keywords.items():
                self._add(key, each)
        self._called = plain
        self._plain = plain if isinstance(plain, types.FunctionType) else None
        self._held: dict[types.FunctionType, dict[str, Any]] = {}
        if self._plain is not None:
            self._hold(self._plain, 0)
            for each in self._held.values():
                for name, value in each.items():
                    self._add(name, value)
            self._add_defaults(self._plain)
        self._add_objects()

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function, with values in place of its variables'."""
        is_same = all(values[name] is each for name, each in self.values.items())
        if is_same and not any(map(self._is_rebound, self._held)):
            return self._function()
        function: Any = self._plain
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        if isinstance(self._function, functools.partial):
            own = self._function
            function = own.func
            given = zip(self._names, own.args, strict=True)
            args = [values.get(name, each) for name, each in given]
            keywords = {k: values.get(k, each) for k, each in own.keywords.items()}
        if self._plain is not None:
            function = self._with(self._plain, values)
        return function(*args, **keywords)

    @property
    def around(self) -> dict[str, Any]:
        called, found = self._called, dict[str, Any]()
        if isinstance(self._function, functools.partial):
            found |= zip(self._names, self._function.args, strict=True)
            found |= self._function.keywords
        if self._plain is None:
            found["self"] = getattr(called, "__self__", called)
        for own in self._held.values():
            found |= own
        for each in [getattr(called, "__func__", called), *found.values()]:
            found = dict(_all_variables(each, 0)) | found
        return {k: v for k, v in found.items() if k not in self.values}

    def takes_from(self) -> list[str]:
        """The iterators, files and queues that its code reads, by their names.

        To call it again would take from them again, or write to them.
        """
        found = [name for name, each in self._objects.items() if is_taken_from(each)]
        for function, held in self._held.items():
            found += [name for name, each in held.items() if is_taken_from(each)]
            for name, each in held.items():
                found += _taken_of(name, each, function.__code__)
        if self._plain is None:
            own = getattr(self._called, "__func__", type(self._called).__call__)
            if isinstance(own, types.FunctionType):
                owner = getattr(self._called, "__self__", self._called)
                found += _taken_of("self", owner, own.__code__)
        return list(dict.fromkeys(found))

    def _hold(self, function: types.FunctionType, depth: int) -> None:
        """Holds the variables of a function, and of those of its module among them."""
        held = self._held[function] = dict(_variables(function))
        if depth == _MAX_CALLED:
            return
        for each in held.values():
            if isinstance(each, types.FunctionType) and each not in self._held:
                if each.__globals__ is not function.__globals__:
                    continue
                self._hold(each, depth + 1)

    def _is_rebound(self, function: types.FunctionType) -> bool:
        """True if a variable of a function holds another object by now."""
        now = dict(_variables(function))
        held = self._held[function]
        return any(k not in now or now[k] is not each for k, each in held.items())

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
        elif any(not isinstance(t, nn.Parameter) for t in tensors_in(value)):
            self.values[name] = value

    def _add_objects(self) -> None:
        """Adds objects that hold data alone: as many rows as the rest of the batch."""
        sizes = _sizes(tensors_in(self.values))
        for name, value in self._objects.items():
            own = _sizes([tensor for _, tensor in data_in(value)])
            if len(own) == 1 and (not sizes or own == sizes):
                self.values[name] = value

    def _with(
        self,
        function: types.FunctionType,
        values: Mapping[str, Any],
        copies: dict[types.FunctionType, types.FunctionType] | None = None,
    ) -> types.FunctionType:
        """A copy of a function with what it held, but for these values."""
        copies = {} if copies is None else copies
        code, around = function.__code__, dict(function.__globals__)
        cells = {name: types.CellType() for name in code.co_freevars}
        copy = types.FunctionType(
            code, around, function.__name__, None, tuple(cells.values())
        )
        copies[function] = copy
        for name, each in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not assigned yet
                cells[name].cell_contents = each.cell_contents
        for name, own in self._held[function].items():
            each = self._instead(name, own, values, copies)
            if name in cells:
                cells[name].cell_contents = each
            else:
                around[name] = each
        last = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        names = last[len(last) - len(defaults) :]
        copy.__defaults__ = tuple(
            self._instead(name, each, values, copies)
            for name, each in zip(names, defaults, strict=True)
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def _instead(
        self,
        name: str,
        held: Any,
        values: Mapping[str, Any],
        copies: dict[types.FunctionType, types.FunctionType],
    ) -> Any:
        """Returns what a copy of a function reads in place of what it held."""
        if name in values and held is self.values.get(name):
            return values[name]
        if isinstance(held, types.FunctionType) and held in self._held:
            return copies[held] if held in copies else self._with(held, values, copies)
        return held


def _taken_of(
    name: str, owner: Any, code: types.CodeType, depth: int = _MAX_CALLED
) -> Iterator[str]:
    """Yields what a code takes from an object's attributes, also by its methods."""
    if isinstance(owner, (*_OF_PROGRAM, type, types.ModuleType)) or not depth:
        return
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return
    for key in attribute_names(code):
        if key in own:
            if is_taken_from(own[key]):
                yield f"{name}.{key}"
            continue
        method = next((vars(k)[key] for k in type(owner).__mro__ if key in vars(k)), 0)
        inner = getattr(method, "__code__", code)
        if inner is not code and is_of_user(inner.co_filename):
            yield from _taken_of(name, owner, inner, depth - 1)


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first parameters; their places where they have none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in _BY_PLACE][:count]
    return names + [f"input[{i}]" for i in range(len(names), count)]


def names_of_inputs(model: nn.Module, count: int) -> list[str]:
    """The names that a model's forward has for its first positional arguments.

    A wrapper such as DDP or an engine passes on what it is given, under no names of its
    own: they are those of the model within.
    """
    around = [uncompiled(each) for name, each in named_modules(model) if not name]
    named = [argument_names(each.forward, count) for each in around]
    return min(named, key=lambda names: sum("[" in name for name in names))


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
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


def _all_variables(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The variables of a user's function, and of functions among them."""
    if not isinstance(function, types.FunctionType) or depth > _MAX_CALLED:
        return
    if not is_of_user(function.__code__.co_filename):
        return
    for name, each in _variables(function):
        yield name, each
        yield from _all_variables(each, depth + 1)


def data_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Lists the tensors of a container, or of an object that holds data alone.

    That is no object that leads to modules, optimizers or datasets, or to many values.
    """
    if is_container(value):
        return tensors(value)
    found = find(value, _OF_PROGRAM, most=_MAX_VALUES)
    is_data = all(type(each) is torch.Tensor for _, each in found)
    return found if found and is_data and not opaque(value, most=_MAX_VALUES) else []


def _sizes(tensors: list[torch.Tensor]) -> set[int]:
    """The sizes of the first dimension of tensors that have one."""
    return {tensor.size(0) for tensor in tensors if tensor.dim()}


# One call of a step, with what it takes to make it again.


_MAX_HELD_BYTES = 2**26
_NUM_SAMPLED = 64  # values of a tensor that is compared with itself later


class KeptCall:
    """One call that can be made again: of the model, or of a function that calls it.

    Attributes:
        function: Takes the batch, and returns what the call returned.
        batch: What it is called with, in any nesting.
        ambient: What was set when it began.
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
    """

    called_at = "", 0

    def __init__(
        self, function: Callable[[Any], Any], batch: Any, ambient: Ambient
    ) -> None:
        self.function = function
        self.batch = batch
        self.ambient = ambient
        self.held: dict[int, torch.Tensor] = {}
        self.not_held = self.num_held = 0
        self.returns_loss = False
        self.is_part_of_compiled = False
        self.has_stand_ins = False
        self._is_overwritten: bool | None = None
        self._tensors = tensors_in(batch, CALL_DEPTH)
        self._versions = _C.versions_of(self._tensors)
        self._samples = _C.samples_of(self._tensors, _NUM_SAMPLED)

    @property
    def awaits_backward(self) -> bool:
        """True if no gradient has come to what it returned so far."""
        return not self.held and not self.not_held

    @property
    def caller(self) -> int:
        """Which model it is of; 0 for a function that calls them."""
        return 0

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch with their places, such as `batch['x']`."""
        return [
            (f"{name}{path_text(path)}", tensor) for name, path, tensor in self.places()
        ]

    def places(self) -> Iterator[tuple[str, Path, torch.Tensor]]:
        """Yields the variable, the path in it and the tensor, for the whole batch."""
        for name, value in self.variables().items():
            for path, tensor in tensors(value):
                yield name, path, tensor

    def variables(self) -> dict[str, Any]:
        """The values that make up the batch, by the names that code has for them."""
        is_captured = isinstance(self.function, Captured)
        return self.batch if is_captured else {"batch": self.batch}

    def around(self) -> dict[str, Any]:
        """The variables besides the batch that its function reads, by their names."""
        function = self.function
        return function.around if isinstance(function, Captured) else {}

    def note_overwritten(self) -> None:
        """Keeps the answer of `is_overwritten()`: a replay may write, too."""
        self._is_overwritten = self.is_overwritten()

    def with_own_batch(self) -> KeptCall:
        """The same call with a copy of its batch, for code that writes to it."""
        return self.with_batch(_as_copy)

    def with_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KeptCall:
        """The same call with another tensor in place of each of its batch's."""
        batch = mapped(self.batch, change, CALL_DEPTH)
        copy = type(self)(self.function, batch, self.ambient)
        copy.returns_loss, copy.held = self.returns_loss, self.held
        return copy

    def computed_outside(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch whose graph, of code outside of it, is not run."""
        found = self.leaves()
        return [(name, each) for name, each in found if each.grad_fn is not None]

    def without_graph(self) -> KeptCall:
        """The same call, whose backward ends at what was computed outside of it."""
        return self.with_batch(_as_leaf) if self.computed_outside() else self

    def with_held(self, held: dict[int, torch.Tensor]) -> KeptCall:
        """The same call, whose output gets other gradients."""
        copy = type(self)(self.function, self.batch, self.ambient)
        copy.returns_loss, copy.held = self.returns_loss, held
        return copy

    def is_overwritten(self) -> bool:
        """True if the batch was written to since.

        Writes that torch does not count, as through NumPy, are seen on the CPU alone,
        if they change one of a few values.
        """
        if self._is_overwritten is not None:
            return self._is_overwritten
        tensors = self._tensors
        if _C.versions_of(tensors) != self._versions:
            return True
        return _C.samples_of(tensors, _NUM_SAMPLED) != self._samples

    def was_written(self, tensor: torch.Tensor) -> bool:
        """True if a tensor of the batch was written to since, by torch."""
        now = _C.versions_of(self._tensors)
        both = zip(self._tensors, self._versions, now, strict=True)
        return any(before != after for each, before, after in both if each is tensor)

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

    def _hold(self, place: int, gradient: torch.Tensor) -> None:
        self.held[place] = gradient
        self.num_held += 1


class ModelCall(KeptCall):
    """A kept call of a model, with its positional and its keyword arguments.

    Attributes:
        follows_others: Whether the loop had outputs of other forwards by then, whose
            backward had not come: it may have computed the arguments from them.
    """

    follows_others = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: tuple[tuple[Any, ...], dict[str, Any]],
        ambient: Ambient,
    ) -> ModelCall:
        """Makes the call of a model with its arguments."""
        return cls(functools.partial(call_model, model), batch, ambient)

    @property
    def caller(self) -> int:
        """Which model it is of."""
        function: Any = self.function
        return id(function.args[0])

    def variables(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        return self.around()

    def around(self) -> dict[str, Any]:
        """The arguments, by the names of the parameters."""
        function: Any = self.function
        args, kwargs = self.batch
        names = names_of_inputs(function.args[0], len(args))
        return {**dict(zip(names, args, strict=True)), **kwargs}


def name_outside(calls: Iterable[KeptCall]) -> str:
    """The first tensor that a function was given with a graph of outside, or ""."""
    functions = [each for each in calls if not isinstance(each, ModelCall)]
    found = (each.computed_outside() for each in functions if each.returns_loss)
    return next((names[0][0] for names in found if names), "")


def _as_copy(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not has_memory(tensor):
        return tensor
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and is_float(tensor) else copy


def call_model(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = mapped(batch, _as_leaf, CALL_DEPTH, anew=True)
    return model(*args, **kwargs)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that another model made, without the graph of how it was made."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def loss_and_gradients(call: KeptCall, output: Any) -> list[tuple[Any, Any]]:
    """The tensors that backward begins at, with their gradients.

    Args:
        call: The kept call.
        output: What it returned now.
    """
    tensors = tensors_in(output)
    if call.held:
        places = [place for place in call.held if place < len(tensors)]
        return [(tensors[place], call.held[place]) for place in places]
    loss = loss_in(output)
    loss = tensors[0] if loss is None and call.returns_loss and tensors else loss
    if loss is None or not loss.requires_grad or not is_float(loss):
        return []
    return [(loss, torch.ones_like(loss))]


_MAX_KEPT = 8
COMPILED = "was compiled together with code around it, which hides its arguments"
GRAPH = "was captured in a CUDA graph, which runs no code that could be run again"


class Capture:
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
        takes_from: What the function of `guard.run()` takes from or writes to, by name,
            so that it must not be run again.
        left_over: The gradients that a bad step left, by name, and that nobody has
            cleared or written to before the step's first forward; with that step.
    """

    def __init__(self, start: StepStart) -> None:
        self.start = start
        self._devices: dict[int, tuple[torch.device | None, list[torch.device]]] = {}
        self.calls: list[KeptCall] = []
        self.num_dropped = 0
        self.hidden_by = ""
        self.is_running = False
        self.had_gradients = False
        self.takes_from: list[str] = []
        self.left_over: dict[str, int] = {}
        self._bad: dict[str, tuple[int, weakref.ref[torch.Tensor], int]] = {}
        self._doubts_gradients, self._is_bad = True, False
        self._open: KeptCall | None = None

    def begin(
        self, model: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Keeps what an outermost forward is called with.

        Not tensors that stand in for the model's own weights, which may have its size.
        """
        if not torch.is_grad_enabled():
            return
        if self.is_running:
            return
        if args is None:
            self.hidden_by = COMPILED
            return
        if is_recorded():
            return
        devices = self._devices_of(model)
        if self._is_captured(devices):
            return
        self._look_for_gradients(model)
        ambient = Ambient(model, devices)
        batch = copied_call(args, kwargs)
        is_compiled, called = False, model
        if has_compiled():
            is_compiled, known = compiled_call_of(model)
            called = model if known is None else known
            is_compiled = is_compiled and known is None
        self._open = call = ModelCall.of(called, batch, ambient)
        call.is_part_of_compiled = is_compiled
        call.has_stand_ins = has_stand_ins
        call.called_at = calling_line()
        call.follows_others = any(each.awaits_backward for each in self.calls)

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Keeps the gradients that its output will get."""
        call, self._open = self._open, None
        if call is not None:
            call.hold_gradients(output, loss)
            self._add(call)

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
            captured = Captured(function)
            ambient = Ambient(model, self._devices_of(model))
            taken = captured.takes_from()
            self.takes_from = list(dict.fromkeys([*self.takes_from, *taken]))
            if not taken:  # else its forwards are kept, as without it
                call = KeptCall(captured, captured.values, ambient)
        was_running = self.is_running
        self.is_running = was_running or call is not None
        try:
            output = function()
        finally:
            self.is_running = was_running
        with shield():
            if call is not None and not was_running:
                call.hold_gradients(output, loss_in(output))
                call.returns_loss = True
                self._add(call)
        return output

    def _add(self, call: KeptCall) -> None:
        self.calls.append(call)
        if len(self.calls) > _MAX_KEPT:
            del self.calls[0]
            self.num_dropped += 1

    def note_bad(self, step: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Notes that the step is bad: its gradients may stay for the next one.

        Args:
            step: Its number.
            gradients: Its bad gradients, by name.
        """
        self._is_bad = True
        self._bad = {
            name: (self.left_over.get(name, step), weakref.ref(each), version)
            for name, each in gradients.items()
            if (version := _C.version_of(each)) is not None
        }

    def _look_for_gradients(self, model: nn.Module) -> None:
        if not self._doubts_gradients or self.calls:
            return
        leaves = [each for each in parameters_of(model) if each.is_leaf]
        there = {id(p.grad) for p in leaves if p.grad is not None}
        self.had_gradients = bool(there)
        for name, (step, reference, version) in self._bad.items():
            gradient = reference()
            if gradient is None or id(gradient) not in there:
                continue
            if _C.version_of(gradient) == version:
                self.left_over[name] = step

    def clear(self) -> None:
        """Lets go of what was kept: the step is judged."""
        self.calls.clear()
        self.takes_from = []
        self.had_gradients = False
        self.left_over.clear()
        if not self._is_bad:
            self._bad.clear()
        self._doubts_gradients, self._is_bad = self._is_bad, False
        self.start.end_judgement()
        self._open = None
        self.num_dropped = 0
        if self.hidden_by == COMPILED:
            self.hidden_by = ""

    def _is_captured(self, devices: Sequence[torch.device]) -> bool:
        """True if a CUDA graph is being captured, whose replays call no hook."""
        has_device = any(each.type == "cuda" for each in devices)
        is_captured = has_device and torch.cuda.is_current_stream_capturing()
        if is_captured:
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


# Parts of a batch, along dimension 0.


def batch_size(call: KeptCall) -> int | None:
    """The size of dimension 0 that its tensors share; None if it cannot be cut."""
    tensors = [tensor for _, tensor in call.leaves() if tensor.dim()]
    plain = [each for each in tensors if type(each) is torch.Tensor]
    if not all(map(has_memory, plain)):
        return None
    sizes = {len(tensor) for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 and not why_whole(call) else None


def why_whole(call: KeptCall) -> str:
    """Returns why no part of a batch can be made, as a clause, or ""."""
    try:
        mapped(call.batch, torch.Tensor.detach, CALL_DEPTH)
    except NotRebuilt as error:
        return str(error)
    return ""


def part_of(call: KeptCall, rows: Sequence[int]) -> KeptCall:
    """The same call with some of the samples of its batch."""
    size = batch_size(call) or 0
    cut = functools.partial(_cut, rows=list(rows), size=size)
    part = type(call)(call.function, mapped(call.batch, cut, CALL_DEPTH), call.ambient)
    part.returns_loss = call.returns_loss
    part.held = {
        place: held[list(rows)] if held.dim() and len(held) == size else held
        for place, held in call.held.items()
    }
    return part


def _cut(tensor: torch.Tensor, rows: list[int], size: int) -> torch.Tensor:
    if not tensor.dim() or len(tensor) != size:
        return tensor
    part = tensor.detach()[rows]
    wants = tensor.requires_grad and is_float(tensor)
    return part.requires_grad_() if wants else part


# Tensors that replayed code may read besides its batch, and where it holds them.


_OWN = set(vars(nn.Module()))


class HeldTensor(Leaf):
    """A tensor that the program holds, such as an attribute of a module.

    Args:
        kind: "attribute" of a watched module, "weight" of another one, or "object".
        name: Its name, as code reads it.
        tensor: The tensor.
        look: Returns what is held there now.
    """

    def __init__(
        self, kind: str, name: str, tensor: torch.Tensor, look: Callable[[], Any]
    ) -> None:
        super().__init__(kind, name, tensor)
        self._look = look
        self._version = _C.version_of(tensor)

    def note_written(self) -> None:
        """Compares it with what it was when this was made."""
        tensor = self.tensor
        assert tensor is not None
        is_other = self._look() is not tensor
        self.is_written = is_other or _C.version_of(tensor) != self._version

    @property
    def is_carried(self) -> bool:
        """True if bad values were read of it, which the step may have left."""
        return self.is_written and self.is_read


def held_leaves(
    models: Mapping[str, nn.Module], around: Mapping[str, Any]
) -> list[HeldTensor]:
    """Finds attributes of modules that are tensors, and what objects hold.

    Runs none of the user's code. Does not incur a CPU-GPU sync.

    Args:
        models: The watched models, by what their modules' names begin with.
        around: The variables that the replayed code reads, by their names.
    """
    watched = {each for model in models.values() for each in modules_in(model)}
    found = [
        leaf
        for prefix, model in models.items()
        for name, module in named_modules(model)
        for leaf in _attributes("attribute", full_name(prefix, name), module)
    ]
    seen = set(watched)
    for variable, value in around.items():
        near = find(value, (torch.Tensor, nn.Module))
        for path, each in sorted(near, key=lambda one: len(one[0])):
            if each in seen:
                continue
            seen.add(each)
            name = f"{variable}{path_text(path)}"
            if isinstance(each, torch.Tensor):
                look = functools.partial(at, value, path)
                found.append(HeldTensor("object", name, each, look))
            else:
                found += _of_module(name, each)
    return found


def _attributes(kind: str, name: str, owner: Any) -> Iterator[HeldTensor]:
    for key, value in list(vars(owner).items()):
        for path, tensor in () if key in _OWN else data_in(value):
            full = f"{name}.{key}" if name else key
            look = functools.partial(_at, owner, key, path)
            yield HeldTensor(kind, f"{full}{path_text(path)}", tensor, look)


def _of_module(name: str, module: nn.Module) -> Iterator[HeldTensor]:
    """Yields the weights of a module that is not watched, and its attributes."""
    for key, tensor in [*named_parameters(module), *named_buffers(module)]:
        look = functools.partial(_itself, tensor)
        yield HeldTensor("weight", f"{name}.{key}", tensor, look)
    for key, each in named_modules(module):
        yield from _attributes("object", f"{name}.{key}".rstrip("."), each)


def _at(owner: Any, key: str, path: Path) -> Any:
    return at(dict(attributes(owner)).get(key), path)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
