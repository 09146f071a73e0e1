"""The operations of a replay, and the non-finite values that they made or passed on."""

from __future__ import annotations

import collections
import functools
import heapq
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.multiprocessing import reductions

from .. import _C
from ..core.modules import Handles, named_modules
from ..core.ops import Stat, scan
from ..core.selection import full_name
from ..core.tensors import PLAIN, extent_of, is_whole, real_parts, widened
from ..report.explanation import TensorSummary
from ..text import dtype_name
from ..torch_internals.compiler import has_compiled, is_in_compiled_call
from ..torch_internals.running import (
    TorchDispatchMode,
    autograd_node,
    next_sequence,
    no_dispatch,
    schema_of,
    sequence_of,
)
from ..torch_internals.tensor_internals import (
    is_in_transform,
    local_part,
    storage_number,
    storages,
)
from ..tree import CALL_DEPTH, find, tensors_in
from .places import Frames, UsersFrames, runs_in_hook

# Kinds of non-finite values of tensors, and their magnitudes, by the fused scan.


NAN, POSITIVE_INF, NEGATIVE_INF = _C.NAN, _C.POSITIVE_INF, _C.NEGATIVE_INF
INF = POSITIVE_INF | NEGATIVE_INF


def is_float(tensor: torch.Tensor) -> bool:
    """True if a tensor can hold a nan or an inf, and has memory to look at."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and not is_in_transform(tensor)


def floats_in(value: object) -> list[torch.Tensor]:
    """Lists the tensors of a value that can hold a nan or an inf, and are not empty."""
    found = [value] if type(value) is torch.Tensor else tensors_in(value)
    return [t for t in found if is_float(t) and t.numel()]


def kinds_of(tensor: torch.Tensor, stat: Stat | None = None) -> int:
    """The kinds in a tensor, counted by torch's own operations.

    Args:
        tensor: The tensor.
        stat: Its stat, if it is known: only the sign of infs is not in it.
    """
    values = as_wide(tensor)
    if values is None:
        return 0 if stat is None else NAN * stat.has_nan | INF * stat.has_inf
    if stat is not None and not (stat.has_inf or stat.not_scanned):
        return NAN * stat.has_nan
    parts = real_parts(values)
    flags = torch.stack(
        [parts.isnan().any(), (parts == math.inf).any(), (parts == -math.inf).any()]
    ).tolist()
    nan, positive, negative = map(int, flags)
    return NAN * nan | POSITIVE_INF * positive | NEGATIVE_INF * negative


def as_wide(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a plain tensor in a dtype that has all operations, or None."""
    if type(tensor) not in PLAIN:
        tensor = local_part(tensor)
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return None
    return widened(tensor)


def summary_of(tensor: torch.Tensor, name: str = "") -> TensorSummary:
    """Counts the non-finite values of a tensor. Incurs a CPU-GPU sync."""
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    values = as_wide(tensor)
    if values is None or not is_float(tensor):
        return TensorSummary(dtype, shape, None, None, 0, 0, name)
    values = real_parts(values)
    finite = values[values.isfinite()].abs()
    least = float(finite.min()) if finite.numel() else None
    most = float(finite.max()) if finite.numel() else None
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    signs = inf_signs(values)
    return TensorSummary(dtype, shape, least, most, num_nan, num_inf, name, signs)


def inf_signs(values: torch.Tensor) -> str:
    """The signs of the infs: "+", "-", "+-", or "". Incurs a CPU-GPU sync."""
    values = real_parts(values)
    infs = {"+": values.isposinf(), "-": values.isneginf()}
    return "".join(sign for sign, are in infs.items() if are.any())


Index = tuple[int, ...]


def bad_places(
    tensor: torch.Tensor, nan_alone: bool = False
) -> tuple[Index, Index] | None:
    """The indices of the first and the last non-finite value, or None.

    Incurs a CPU-GPU sync.
    """
    values = as_wide(tensor)
    if values is None:
        return None
    places = (values.isnan() if nan_alone else ~values.isfinite()).nonzero()
    if not len(places):
        return None
    return tuple(places[0].tolist()), tuple(places[-1].tolist())


def bad_names(named: Iterable[tuple[str, torch.Tensor]], masks: bool) -> list[str]:
    """The names of the tensors that hold a non-finite value. Incurs a CPU-GPU sync.

    Args:
        named: Names and tensors.
        masks: Whether -inf counts.
    """
    floats = [(name, t) for name, t in named if is_float(t) and t.numel()]
    stats = scan([tensor.detach() for _, tensor in floats])
    return [
        name
        for (name, tensor), stat in zip(floats, stats, strict=True)
        if stat.has_nan or stat.has_inf
        if masks or kinds_of(tensor, stat) != NEGATIVE_INF
    ]


_Writes = tuple[int | None, int, torch.dtype]  # as torch and as this file counts them
_State = tuple[int, torch.Size, _Writes]


class Kinds:
    """Looks up which kinds of non-finite values tensors hold.

    A tensor that nobody has written to is scanned once, and none that views memory
    which was seen to be finite as a whole. Incurs a CPU-GPU sync for each scan of
    tensors on a device.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, _State, int, Stat]] = {}
        self._num_writes: dict[int, int] = {}  # by memory
        self._finite: StorageMap[tuple[_Writes, Stat]] = StorageMap()  # as a whole

    def of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The kinds in each tensor, as a sum of NAN, POSITIVE_INF and NEGATIVE_INF."""
        found = [self._kinds_if_known(tensor) for tensor in tensors]
        new = [t for t, each in zip(tensors, found, strict=True) if each is None]
        if new:
            scanned = iter(scan([tensor.detach() for tensor in new]))
            found = [
                self._remember(tensor, next(scanned))[0] if each is None else each
                for tensor, each in zip(tensors, found, strict=True)
            ]
        return [each for each in found if each is not None]

    def stat(self, tensor: torch.Tensor) -> Stat:
        """The stat of a tensor."""
        found = self._look_up(tensor)
        if found is None:
            found = self._remember(tensor, scan([tensor.detach()])[0])
        return found[1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets tensors, and others that share their memory: they are scanned again.

        Their version is raised only after this, or never: operators of extensions need
        not raise it.
        """
        for tensor in tensors:
            for key in memory_of(tensor):
                self._num_writes[key] = self._num_writes.get(key, 0) + 1

    def _kinds_if_known(self, tensor: torch.Tensor) -> int | None:
        finite = self._finite.get(tensor)
        if finite is not None and finite[0] == self._writes(tensor):
            return 0
        known = self._look_up(tensor)
        return None if known is None else known[0]

    def _look_up(self, tensor: torch.Tensor) -> tuple[int, Stat] | None:
        finite = self._finite.get(tensor)
        if finite is not None and finite[0] == self._writes(tensor):
            return (0, finite[1]) if is_whole(tensor) else None
        known = self._known.get(id(tensor))
        if known is None or tensor.is_inference() or known[0]() is not tensor:
            return None
        return known[2:] if known[1] == self._state(tensor) else None

    def _remember(self, tensor: torch.Tensor, stat: Stat) -> tuple[int, Stat]:
        kinds = kinds_of(tensor, stat) if stat.has_nan or stat.has_inf else 0
        if tensor.is_inference():
            return kinds, stat
        is_scanned = type(tensor) in PLAIN and stat.not_scanned is None
        if is_scanned and not kinds and is_whole(tensor):
            self._finite.put(tensor, (self._writes(tensor), stat))
        else:
            reference = weakref.ref(tensor)
            self._known[id(tensor)] = (reference, self._state(tensor), kinds, stat)
        return kinds, stat

    def _state(self, tensor: torch.Tensor) -> _State:
        """Identifies the contents of a tensor until somebody writes to it."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        pointer = tensor.data_ptr() if is_plain else 0
        return pointer, tensor.shape, self._writes(tensor)

    def _writes(self, tensor: torch.Tensor) -> _Writes:
        """Counts the writes to a tensor's memory."""
        keys = memory_of(tensor) if self._num_writes else ()
        writes = sum(self._num_writes.get(key, 0) for key in keys)
        return _C.version_of(tensor), writes, tensor.dtype


# Facts about memory, which hold for every tensor that shares it.


def memory_of(tensor: torch.Tensor) -> dict[int, torch.UntypedStorage]:
    """The storages of a tensor by their numbers, as `storages()`; of most at once."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return storages(tensor)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # within a transform
        return {}
    return {storage_number(storage): storage}


_Fact = TypeVar("_Fact")
_weakly: Any = reductions.StorageWeakRef


class StorageMap(Generic[_Fact]):
    """Maps memory to a fact, until it is freed; given out again, it is other memory."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, _Fact]] = {}

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """The fact about a tensor's memory, or None."""
        for key in memory_of(tensor) if self._facts else ():
            known = self._facts.get(key)
            if known is not None and not known[0].expired():
                return known[1]
        return None

    def put(self, tensor: torch.Tensor, fact: _Fact) -> None:
        """Notes a fact in place of what there was."""
        for key, storage in memory_of(tensor).items():
            self._facts[key] = _weakly(storage), fact

    def drop(self, tensor: torch.Tensor) -> None:
        """Forgets the fact about a tensor's memory."""
        for key in memory_of(tensor) if self._facts else ():
            self._facts.pop(key, None)


# A module's call that runs, with what it takes to make it alone.


_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass
class ModuleCall:
    """A call of a module, by reference.

    Attributes:
        module: The module.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        autocast: The devices that autocast is on for, with the dtypes.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: list[tuple[str, torch.dtype]] = field(default_factory=list)
    _given: list[torch.Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @classmethod
    def begun(
        cls, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ModuleCall:
        """Notes a call that begins now, in the state of this moment."""
        devices = [d for d in _DEVICES if torch.amp.is_autocast_available(d)]
        autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in devices
            if torch.is_autocast_enabled(device)
        ]
        given = tensors_in((args, kwargs), CALL_DEPTH)
        versions = _C.versions_of(given)
        return cls(module, name, args, kwargs, autocast, given, versions)

    @property
    def is_as_it_was(self) -> bool:
        """True if nobody has written to its arguments since it began."""
        return _C.versions_of(self._given) == self._versions


class ModuleStack:
    """The modules whose forwards run, and the user's lines, while it is entered.

    Args:
        models: The watched models, by what their modules' names begin with.
        on_end: Called with the name of each module of theirs that has returned, and its
            output.
        keeps_calls: Keep what the modules that run were called with.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], on_end: Any, keeps_calls: bool = False
    ) -> None:
        self._names: dict[nn.Module, str] = {}
        for prefix, model in models.items():
            for name, module in named_modules(model):
                self._names.setdefault(module, full_name(prefix, name))
        self._on_end, self._keeps_calls = on_end, keeps_calls
        self._running: list[tuple[int, str, bool]] = []
        self._calls: list[ModuleCall] = []
        self._handles = Handles()
        self._frames = UsersFrames()

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
        self._frames.forget()

    def lines(self) -> Frames:
        """The user's lines that run, the innermost first."""
        return self._frames.now()

    def current(self, in_backward: bool) -> str | None:
        """The name of the innermost one; None in a backward that runs none again."""
        for _, name, is_in_backward in reversed(self._running):
            if is_in_backward or not in_backward:
                return name
        return None if in_backward else ""

    def call(self) -> ModuleCall | None:
        """The call of the innermost one that runs, where calls are kept, or None."""
        return self._calls[-1] if self._calls else None

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        in_backward = autograd_node() is not None
        name = self._names[module]
        self._running.append((id(module), name, in_backward))
        if self._keeps_calls:
            self._calls.append(ModuleCall.begun(module, name, args, kwargs))

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        # One that an exception has left without its hook stands above it.
        while self._running and self._running[-1][0] != id(module):
            self._pop()
        if self._running:
            self._pop()
        self._on_end(self._names[module], output)

    def _pop(self) -> None:
        self._running.pop()
        if self._keeps_calls:
            self._calls.pop()


# One call of an operation: what it reads and what it writes.


# These write to all of their first argument, whatever was in it.
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("exponential_", "set_", "resize_", "log_normal_", "cauchy_", "geometric_"),
}
# Whatever they return or write to comes from other ranks, and may not be there yet.
_COMMUNICATION = ("c10d.", "_c10d_functional", "c10d_functional", "_dtensor.")
_WAITS = "wait_tensor"
CONSTANT = "lift_fresh"  # what `torch.tensor(1.0)` ends with: it makes what it is given
# Batch norm's schemas do not say that it writes to these.
_STATISTICS = ("running_mean", "running_var")


@functools.cache
def _signature(func: Any) -> tuple[str, str, list[tuple[int, str, bool]], bool]:
    """The name of an operation, its base, the arguments that it writes to, if it views.

    Of these arguments the place, the name, and whether what was in it is not read.
    """
    name = str(func)
    base = name.split(".")[1] if "." in name else name
    schema, writes = schema_of(func), []
    if schema is not None and (schema.is_mutable or "batch_norm" in base):
        for place, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            is_written = alias is not None and alias.is_write
            if is_written or argument.name in _STATISTICS:
                is_over = argument.is_out or (place == 0 and base in _OVERWRITE)
                writes.append((place, argument.name, is_over))
    returns = [] if schema is None or writes else schema.returns
    is_view = bool(returns) and all(each.alias_info is not None for each in returns)
    return name.removesuffix(".default"), base, writes, is_view


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
        self._only_read: list[torch.Tensor] = []
        self._versions: list[int] = []
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
        if self.base == CONSTANT:
            return []
        over = self._overwritten
        given = self.arguments
        if over:
            given = [t for t in given if not any(t is each for each in over)]
        return [t for t in given if is_float(t) and t.numel()] if floats else given

    def keep_written(self) -> None:
        """Copies what it reads and then overwrites."""
        for tensor in self.written:
            if not any(tensor is each for each in self._overwritten):
                self.kept[id(tensor)] = tensor.detach().clone()

    def note_versions(self) -> None:
        """Notes how often what it reads alone was written to."""
        self._only_read = [
            tensor
            for tensor in self.arguments
            if not any(tensor is each for each in self.written)
        ]
        self._versions = _C.versions_of(self._only_read)

    @property
    def is_as_it_was(self) -> bool:
        """True if nobody has written to its arguments since it ran."""
        return _C.versions_of(self._only_read) == self._versions

    def fresh(self, output: Any) -> list[torch.Tensor]:
        """The results that it returns in memory of their own."""
        if self.base == CONSTANT:
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
    def is_constant(self) -> bool:
        """True if it makes a tensor of a number of Python."""
        return self.base == CONSTANT

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""
        numbers = [number for _, number in find((self.args, self.kwargs), (float,))]
        return [number for number in numbers if not math.isfinite(number)]


# Follows sums of masks: a mean of what a mask selects divides by one.


_SUMS = {"sum", "count_nonzero", "cumsum", "nansum", "bincount"}
_MASK, _SUM, _ZERO, _COUNT = "mask", "sum", "sum of zeros", "sum of mask"
_UNLABELED = "loss of no label"
LOSSES_OF_LABELS = {"nll_loss_forward", "nll_loss2d_forward"}
_ORDER = ("", _MASK, _SUM, _ZERO, _COUNT, _UNLABELED)


class Sums:
    """Knows which tensors are masks, or sums, or computed of one of them alone.

    Args:
        kinds: Knows the magnitudes of tensors.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._known: StorageMap[str] = StorageMap()

    def note(self, op: OpCall, fresh: Sequence[torch.Tensor]) -> None:
        """Takes in what an operation returned in memory of its own."""
        is_cast = op.base == "_to_copy"
        is_sum = op.base in _SUMS or op.base in LOSSES_OF_LABELS
        if not fresh or not (self._known or is_cast or is_sum):
            return
        read, kind = op.read(floats=False), ""
        if op.base in LOSSES_OF_LABELS and len(fresh) > 1 and has_no_label(op):
            fresh, kind = fresh[:1], _UNLABELED
        elif op.base in _SUMS:
            kind = max(map(self._sum_of, read), key=_ORDER.index, default="")
        elif len(read) == 1:
            is_mask = is_cast and not is_float(read[0])
            kind = _MASK if is_mask else self._known.get(read[0]) or ""
        if kind:
            for tensor in fresh:
                self._known.put(tensor, kind)

    def has_no_label(self, value: Any) -> bool:
        """True for a sum of losses to which no label has added one."""
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and self._known.get(value) == _UNLABELED

    def counts_in(self, op: OpCall) -> list[torch.Tensor]:
        """Finds inputs of an operation that count the elements which a mask selects."""
        read = op.read(floats=False)
        kinds = [self._known.get(tensor) for tensor in read]
        is_mean = len(read) == 2 and all(kinds)  # of what may be nothing but zeros
        return [
            tensor
            for tensor, kind in zip(read, kinds, strict=True)
            if kind == _COUNT or (kind == _ZERO and is_mean)
        ]

    def _sum_of(self, tensor: torch.Tensor) -> str:
        """Classifies the sum of a tensor."""
        if self._known.get(tensor) == _UNLABELED:
            return _UNLABELED
        if not is_float(tensor) or self._known.get(tensor) == _MASK:
            return _COUNT
        if tensor.numel() == 0:
            return _ZERO
        stat = self._kinds.stat(tensor)
        if stat.abs_max == 1 and stat.abs_min in (0, 1):
            return _COUNT
        return _ZERO if stat.abs_max == 0 else _SUM


def has_no_label(op: OpCall) -> bool:
    """True if a loss adds up no label: all are ignored."""
    labels, reduction, ignored = op.args[1], op.args[3], op.args[4]
    return reduction != 0 and bool((labels == ignored).all())


# The one dispatch mode: it shows each operation to an observer.


class OpObserver(Protocol):
    """Sees the operations of a trace, and what modules return."""

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation with `op.run()`, and returns what that returned.

        Args:
            op: The operation, which is about to run.
            modules: Knows which module runs.
        """

    def on_module(self, name: str, output: Any) -> None:
        """Takes in what a module has returned.

        Args:
            name: The module's name.
            output: What it returned.
        """


_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")  # of tensors that ranks share


class OpTrace(TorchDispatchMode):
    """Shows all operations to an observer while it is entered.

    Of tensors that ranks share, the operations on this rank's parts.

    Args:
        models: The models, by what their modules' names begin with; modules of others
            are not known.
        observer: Sees the operations.
        keeps_calls: See `ModuleStack`.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        observer: OpObserver,
        keeps_calls: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._modules = ModuleStack(models, observer.on_module, keeps_calls)

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
        return self._observer.run(OpCall(func, args, kwargs), self._modules)


# The last operations, with what they read and wrote, by reference.


_MOST_CALLS = 1024
_MOST_BEFORE = 96  # of one that is asked about
_MOST_NUMEL = 2**25  # of all results that they hold, and of all that is copied


class Contents:
    """The contents of some memory between two writes to it.

    Attributes:
        memory: A number for the memory.
        numel: How many elements it has.
        storage: The memory itself, or a copy once somebody is about to write to it;
            None if that was too large.
        num_holders: How many tensors are held that have it.
        is_made: Whether an operation of the trace has written it, not the program
            before.
    """

    __slots__ = ("_nbytes", "is_made", "memory", "num_holders", "numel", "storage")

    def __init__(
        self, memory: int, storage: torch.UntypedStorage, itemsize: int, is_made: bool
    ) -> None:
        self.memory, self._nbytes = memory, storage.nbytes()
        self.is_made = is_made
        self.numel = self._nbytes // itemsize
        self.storage: torch.UntypedStorage | None = storage
        self.num_holders = 0

    @property
    def is_held(self) -> bool:
        """True if it can still be read; a wrapper may free a weight's memory."""
        return self.storage is not None and self.storage.nbytes() == self._nbytes


class TapedTensor(NamedTuple):
    """A tensor as an operation has read or written it.

    Attributes:
        contents: What its memory held.
        dtype: Its dtype.
        device: Its device.
        size: Its size.
        stride: Its strides.
        offset: Where it begins in its memory.
    """

    contents: Contents
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def memory(self) -> int:
        """A number for its memory."""
        return self.contents.memory

    @property
    def is_float(self) -> bool:
        """True if it holds numbers with a fraction."""
        return self.dtype.is_floating_point

    @property
    def whole(self) -> torch.Tensor:
        """All of its memory, as one row of elements."""
        flat = torch.empty(0, dtype=self.dtype, device=self.device)
        assert self.contents.storage is not None
        return flat.set_(self.contents.storage)

    @property
    def value(self) -> torch.Tensor:
        """Its values as they were."""
        return self.of(self.whole)

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in other memory of the same layout."""
        return memory.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True)
class TapedCall:
    """An operation with what it read, and what it returned and wrote to.

    Attributes:
        func: The operation.
        base: See `OpCall`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        row: Its row.
        read: The tensors that it was given, by their `id`.
        results: The float tensors that it returned, and those that it wrote to.
    """

    func: Any
    base: str
    args: Any
    kwargs: Any
    row: Row
    read: dict[int, TapedTensor] = field(default_factory=dict)
    results: list[TapedTensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[TapedTensor]:
        """All that it has read or written."""
        return [*self.read.values(), *self.results]

    @property
    def is_held(self) -> bool:
        """True if all that it has read or written can be read still."""
        return all(each.contents.is_held for each in self.tensors)


class Tape:
    """Holds what the last operations have read and written.

    By reference: memory is copied where an operation is about to write to it.

    Args:
        writers: The operations that have written to memory.
    """

    def __init__(self, writers: StorageMap[tuple[Row, ...]]) -> None:
        self._writers = writers
        self._calls: collections.deque[TapedCall] = collections.deque()
        self._now: dict[int, Contents] = {}  # of each memory
        self._numel = self._num_copied = 0

    def begin(self, op: OpCall, row: Row) -> TapedCall | None:
        """Takes in what an operation is about to read; None if it cannot be held."""
        call = TapedCall(op.func, op.base, op.args, op.kwargs, row)
        is_known = op.base not in _EMPTY and not op.is_communication
        for tensor in op.arguments if is_known else ():
            taped = self._taped(tensor)
            if taped is None:
                is_known = False
                break
            call.read[id(tensor)] = taped
        for tensor in op.written:
            self._copy(tensor)
        if not is_known:
            self._drop(call)
        return call if is_known else None

    def end(self, op: OpCall, call: TapedCall | None, output: Any) -> None:
        """Takes in what it has returned and written to."""
        if call is None:
            return
        returned = [output] if type(output) is torch.Tensor else tensors_in(output)
        for tensor in [*returned, *op.written]:
            taped = self._taped(tensor) if is_float(tensor) else None
            if taped is not None:
                call.results.append(taped)
            elif is_float(tensor):
                self._drop(call)
                return
        self._calls.append(call)
        while len(self._calls) > _MOST_CALLS or self._numel > _MOST_NUMEL:
            self._drop(self._calls.popleft())

    def before(self, row: Row) -> list[TapedCall]:
        """The operations that a row depends on, and its own, in order.

        Those that are held and ran last; what they read of others is taken as it was.
        """
        held = {call.row.index: call for call in self._calls}
        found: list[TapedCall] = []
        waiting = [-row.index]
        while waiting and len(found) < _MOST_BEFORE:
            call = held.pop(-heapq.heappop(waiting), None)
            if call is not None:
                found.append(call)
                for each in call.row.read_from:
                    heapq.heappush(waiting, -each.index)
        return found[::-1]

    def _taped(self, tensor: torch.Tensor) -> TapedTensor | None:
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.is_complex():
            return None
        for memory, storage in memory_of(tensor).items():
            contents = self._now.get(memory)
            if contents is None:
                is_made = self._writers.get(tensor) is not None
                contents = Contents(memory, storage, tensor.itemsize, is_made)
                self._now[memory] = contents
                self._numel += contents.numel * is_made
            contents.num_holders += 1
            layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return TapedTensor(contents, tensor.dtype, tensor.device, *layout)
        return None

    def _drop(self, call: TapedCall) -> None:
        """Lets go of what an operation alone has held."""
        for each in call.tensors:
            contents = each.contents
            contents.num_holders -= 1
            if not contents.num_holders:
                self._numel -= contents.numel * contents.is_made
                if self._now.get(contents.memory) is contents:
                    del self._now[contents.memory]

    def _copy(self, tensor: torch.Tensor) -> None:
        """Copies the memory of a tensor that is about to be written to."""
        for memory in memory_of(tensor):
            contents = self._now.pop(memory, None)
            if contents is None or contents.storage is None:
                continue
            self._num_copied += contents.numel
            is_small = self._num_copied <= _MOST_NUMEL
            copy = contents.storage.clone() if is_small else None  # type: ignore[no-untyped-call]
            contents.storage = copy


# The table of operations, and of tensors from before.


_CONSTANTS = ("buffer", "attribute", "weight")  # of models and other modules


RANGE, INTERMEDIATE, UNDEFINED = "range", "intermediate", "undefined"
EMPTY, SINGULAR, NOT_TRIED = "empty", "singular", ""


@dataclass
class Details:
    """Facts about an operation that made a non-finite value.

    Attributes:
        why: RANGE, INTERMEDIATE, UNDEFINED, EMPTY, SINGULAR or NOT_TRIED.
        reason: In a sentence.
        inputs: The float tensors that it was given.
        outputs: Those that it returned.
        first_index: Where the first non-finite value is in the first bad one.
        last_index: Where the last one is.
        outside: Which input is outside of the operation's domain, and where, or "".
        true_value: The result in float64 at the worst place, or None.
        limit: The largest number of the output's dtype.
        divides_by_number: Whether it divides by a number of Python, and no tensor.
        part: Where it was computed again, in words, if not as a whole; or "".
    """

    why: str = NOT_TRIED
    reason: str = ""
    inputs: list[TensorSummary] = field(default_factory=list)
    outputs: list[TensorSummary] = field(default_factory=list)
    first_index: Index | None = None
    last_index: Index | None = None
    outside: str = ""
    true_value: float | None = None
    limit: float | None = None
    divides_by_number: bool = False
    part: str = ""

    @property
    def has_bad_inputs(self) -> bool:
        """True if it was given non-finite values, which were meant."""
        return any(each.num_nan or each.num_inf for each in self.inputs)

    @property
    def is_overflow(self) -> bool:
        """True if its true result is a finite number."""
        return self.why in (RANGE, INTERMEDIATE) and self.true_value is not None


class Leaf:
    """A tensor that no operation of the replay made, such as a weight.

    Attributes:
        kind: "parameter", "buffer", "batch", "gradient" or "unknown"; or see
            `HeldTensor`.
        name: Its name, or key.
        tensor: The tensor.
        is_read: Whether an operation has read non-finite values of it.
        is_written: Whether the replay has written to it; known of `HeldTensor` alone.
    """

    def __init__(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        self.kind = kind
        self.name = name
        self.tensor = tensor
        self.is_read = self.is_written = False

    @functools.cached_property
    def is_mask(self) -> bool:
        """True if it holds -inf alone; in a batch, with zeros alone, and no graph."""
        values = self.tensor
        if values is None or kinds_of(values) != NEGATIVE_INF:
            return False
        if self.kind not in ("batch", "object"):
            return self.kind in _CONSTANTS
        is_sparse = not bool((values[values.isfinite()] != 0).any())
        return is_sparse and not values.requires_grad  # else it is a result, as of log


_Extent = tuple[int, int]  # the bytes of a memory where a tensor begins and ends
_ALL = (0, sys.maxsize)


class _Leaves:
    """Finds leaves by the part of the memory that they take up.

    Several may lie in one memory: engines put weights into flat buffers.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._leaves: dict[int, dict[_Extent, Leaf]] = {}
        for leaf in leaves:
            if leaf.tensor is not None:
                for key in memory_of(leaf.tensor):
                    own = self._leaves.setdefault(key, {})
                    own.setdefault(_extent_of(leaf.tensor), leaf)

    def overlapping(self, tensor: torch.Tensor) -> dict[_Extent, Leaf]:
        """The leaves that have memory in common with a tensor, by where they lie."""
        begin, end = _extent_of(tensor)
        return {
            extent: leaf
            for key in memory_of(tensor)
            for extent, leaf in self._leaves.get(key, {}).items()
            if extent[0] < end and begin < extent[1]
        }

    def around(self, tensor: torch.Tensor) -> Leaf | None:
        """The leaf that a tensor is, or else the only one of which it is a part."""
        (begin, end), found = _extent_of(tensor), self.overlapping(tensor)
        if (begin, end) in found:
            return found[begin, end]
        within = [leaf for (b, e), leaf in found.items() if b <= begin and end <= e]
        return within[0] if len(within) == 1 else None


def _innermost(found: Mapping[_Extent, Leaf]) -> list[Leaf]:
    """The leaves in which no other one lies."""
    return [
        leaf
        for (begin, end), leaf in found.items()
        if not any(begin <= b and e <= end for b, e in found if (b, e) != (begin, end))
    ]


def _extent_of(tensor: torch.Tensor) -> _Extent:
    is_known = type(tensor) in PLAIN and tensor.layout is torch.strided
    return extent_of(tensor) if is_known else _ALL


class Row:
    """One operation.

    Attributes:
        index: Its place in the order of execution.
        name: Its name, such as "aten.div.Tensor".
        module: The name of the module that called it; None in backward.
        frames: The user's lines that led to it.
        thread: The thread that ran it.
        node: The name of the autograd node that called it, or "".
        node_sequence: The number of that node.
        sequence: The number of the last node that was made in this thread.
        custom: Whether the user's code called it within a backward.
        in_hook: Whether that was a hook on a gradient.
        variable: Where gradients are added up: whose.
        read_from: The operations that wrote what it has read.
        parents: What its non-finite inputs came from that are not meant.
        kinds: The kinds of non-finite values that it returned.
        abs_max: The largest magnitude of its first result; None if it has none.
        is_meant: Whether these are infs that the code asked for, as of a mask.
        masks: The sources of the infs that it was given, where all of them are meant.
        reduces: Whether its infs are fewer than those: a mask has gone beyond itself.
        is_empty: Whether it returned memory that nobody has written to.
        is_communication: Whether other ranks may have made what it returned.
        details: What is known of its inputs and outputs, where it made the bad value.
        call: Its arguments, where it made the bad value and they are wanted; else None.
        module_call: The call of the module that called it, likewise.
    """

    __slots__ = (
        *("index", "name", "module", "frames", "node", "node_sequence", "sequence"),
        *("parents", "kinds", "is_meant", "is_empty", "details", "custom", "thread"),
        *("variable", "call", "module_call", "is_communication"),
        *("in_hook", "masks", "reduces", "read_from", "abs_max"),
    )

    def __init__(
        self, index: int, name: str, module: str | None, frames: Frames
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.frames = frames
        self.thread = threading.get_ident()
        self.node = ""
        self.node_sequence = self.sequence = -1
        self.read_from: tuple[Row, ...] = ()
        self.abs_max: float | None = None
        self.parents: list[Source] = []
        self.masks: list[Source] = []
        self.kinds = 0
        self.is_meant = self.is_empty = self.custom = self.is_communication = False
        self.in_hook = self.reduces = False
        self.details: Details | None = None
        self.variable: torch.Tensor | None = None
        self.call: OpCall | None = None
        self.module_call: ModuleCall | None = None

    @property
    def place(self) -> tuple[object, ...]:
        """Its name, module, node and line, which tell it from others."""
        return self.name, self.module, self.node, self.frames[:1]

    @property
    def in_backward(self) -> bool:
        """True if an autograd node called it, not a checkpointed forward."""
        return bool(self.node) and self.module is None


def row_of(op: OpCall, modules: ModuleStack, index: int = 0) -> Row:
    """Makes the row of an operation that is about to run.

    Args:
        op: The operation.
        modules: Knows which module runs.
        index: Its place in the order of execution.
    """
    node: Any = autograd_node()
    frames = modules.lines()
    row = Row(index, op.name, modules.current(node is not None), frames)
    row.sequence = next_sequence() - 1
    if node is not None:
        row.node = str(node.name())
        row.node_sequence = sequence_of(node)
        row.variable = getattr(node, "variable", None)
        row.custom = bool(frames)
        row.in_hook = row.custom and runs_in_hook()
    return row


Source = Row | Leaf


def is_meant(source: Source, kinds: int) -> bool:
    """True if the infs of a source were asked for, as those of a mask are.

    Args:
        source: The source.
        kinds: The kinds of non-finite values that were read of it.
    """
    if isinstance(source, Row):
        return source.is_meant
    if source.kind == "unknown":  # such as a constant
        return kinds == NEGATIVE_INF
    return source.is_mask


_EMPTY = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("empty_permuted", "empty_quantized", "resize_"),
}
_MAX_SOURCES = 8
_MOST_WRITERS = 32
_MOST_UNDEFINED = 4
_MAX_DETAILS = 48
_NAMED = ("parameter", "buffer", "batch")  # leaves that a report names
_autograd: Any = torch.autograd
# The sources of a tensor, its kinds and its size.
_Read = list[tuple[list[Source], int, int]]


class OpTable:
    """Records a row for each operation of a trace.

    Non-finite values are followed by the memory that holds them, so that views and
    writes in place are no matter. Nothing that runs is changed. Incurs a CPU-GPU sync
    for each operation on a device.

    Args:
        leaves: The tensors that are there before, by what they are.
        details_of: Says why an operation made a bad value.
        keeps_calls: Keep the arguments of operations that made bad values.
        looks_back: Hold what operations read, for one that turns out undefined.

    Attributes:
        rows: The operations, in order.
        bad_modules: The modules' outputs that were bad, with their names, in order.
        kinds: Knows which kinds of non-finite values tensors hold.
        undefined: The last operations whose results float64 cannot tell, each with
            those that it depends on.
        is_compiled: True if an operation ran in a call of what was compiled.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        details_of: Callable[[OpCall, Sequence[torch.Tensor], Any, Sums], Details],
        keeps_calls: bool = False,
        looks_back: bool = False,
    ) -> None:
        self._details_of, self._keeps_calls = details_of, keeps_calls
        self.rows: list[Row] = []
        self.bad_modules: list[tuple[str, torch.Tensor]] = []
        self.is_compiled, self._may_be_compiled = False, has_compiled()
        self.kinds = Kinds()
        self._sums = Sums(self.kinds)
        self._bad: StorageMap[list[Source]] = StorageMap()
        self._empty: StorageMap[Row] = StorageMap()
        self._writers: StorageMap[tuple[Row, ...]] = StorageMap()
        self._leaves = _Leaves(leaves)
        self._num_details = 0
        self._tape = Tape(self._writers) if looks_back else None
        self.undefined: dict[Row, list[TapedCall]] = {}

    def sources(self, tensor: torch.Tensor) -> list[Source]:
        """The sources of the non-finite values of a tensor."""
        known, empty = self._bad.get(tensor), self._empty.get(tensor)
        if known is not None:
            return known
        if empty is not None:
            return [empty]
        found = self._leaves.overlapping(tensor)
        if len(found) > 1:  # they share memory, as in an engine's flat buffers
            bad = [(e, leaf) for e, leaf in found.items() if self._is_bad(leaf)]
            found = dict(bad or list(found.items())[:_MAX_SOURCES])
        leaves = _innermost(found)[:_MAX_SOURCES] or [Leaf("unknown", "", tensor)]
        for leaf in leaves:
            leaf.is_read = True
        return list(leaves)

    def _is_bad(self, leaf: Leaf) -> bool:
        return leaf.tensor is not None and any(self.kinds.of([leaf.tensor]))

    def _name_of(self, tensor: torch.Tensor) -> str:
        """The name of the weight, buffer or input that it is or views; "" for none."""
        leaf = self._leaves.around(tensor)
        if leaf is None or leaf.tensor is None or leaf.kind not in _NAMED:
            return ""
        is_part = tensor.numel() < leaf.tensor.numel()
        return f"{'part of ' * is_part}`{leaf.name}`"

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and records its row; see `OpObserver`."""
        if op.waits:
            output = op.run()
            self.kinds.forget(tensors_in(output))
            return output
        row = self._begin(op, modules)
        if op.is_view:
            output = op.run()
            if not op.fresh(output):
                return output  # no value of it is new
            read = self._read(op, row)
            call = None if self._tape is None else self._tape.begin(op, row)
        else:
            read = self._read(op, row)
            op.keep_written()
            call = None if self._tape is None else self._tape.begin(op, row)
            output = op.run()
        with torch.no_grad():
            fresh = op.fresh(output)
            self._note_written(op, row, fresh)
            if self._tape is not None:
                self._tape.end(op, call, output)
            self._end(op, row, output, fresh, read)
        if row.call is not None and not row.in_backward:
            row.module_call = modules.call()
        return output

    def _read(self, op: OpCall, row: Row) -> _Read:
        """Notes which operations wrote what one reads; returns what is bad of it."""
        read = op.read()
        rows = [each for t in read for each in self._writers.get(t) or ()]
        row.read_from = tuple(dict.fromkeys(rows))
        return [
            (self.sources(tensor), kinds, tensor.numel())
            for tensor, kinds in zip(read, self.kinds.of(read), strict=True)
            if kinds
        ]

    def _note_written(
        self, op: OpCall, row: Row, fresh: Sequence[torch.Tensor]
    ) -> None:
        for tensor in fresh:
            self._writers.put(tensor, (row,))
        for tensor in op.written:  # of many writers to the same memory the last ones
            before = self._writers.get(tensor) or ()
            self._writers.put(tensor, (*before[1 - _MOST_WRITERS :], row))

    def close(self) -> None:
        """Lets go of what only operations that are still to come would need."""
        self._tape = None

    def on_module(self, name: str, output: Any) -> None:
        """Notes what a module has returned, if it is bad."""
        floats = floats_in(output)
        with no_dispatch():
            found = self.kinds.of(floats)
        for tensor, kinds in zip(floats, found, strict=True):
            # A mask's -inf is handed on; any other has an operation that made it.
            made = (s for s in self._bad.get(tensor) or () if not is_meant(s, kinds))
            if kinds & ~NEGATIVE_INF or (kinds and any(made)):
                self.bad_modules.append((name, tensor))

    def _begin(self, op: OpCall, modules: ModuleStack) -> Row:
        row = row_of(op, modules, len(self.rows))
        self.rows.append(row)
        if self._may_be_compiled and not self.is_compiled:
            self.is_compiled = is_in_compiled_call()
        return row

    def _end(
        self,
        op: OpCall,
        row: Row,
        output: Any,
        fresh: Sequence[torch.Tensor],
        read: _Read,
    ) -> None:
        self.kinds.forget(op.written)
        if op.is_communication:
            self._note_communication(op, row, output, read)
            return
        if op.base in _EMPTY:
            row.is_empty = True
            for tensor in fresh:
                self._empty.put(tensor, row)
            return
        self._sums.note(op, fresh)
        results = [t for t in [*fresh, *op.written] if is_float(t) and t.numel()]
        bad, found = [], self.kinds.of(results)
        row.abs_max = self.kinds.stat(results[0]).abs_max if results else None
        for tensor, kinds in zip(results, found, strict=True):
            if kinds:
                bad.append(tensor)
                row.kinds |= kinds
            elif (self._bad or self._empty) and is_whole(tensor):  # it is gone there
                self._bad.drop(tensor)
                self._empty.drop(tensor)
        if bad:
            self._note_bad(op, row, bad, output, read)

    def _note_communication(
        self, op: OpCall, row: Row, output: Any, read: _Read
    ) -> None:
        """Notes that what arrives came from other ranks, or from here.

        It may not have arrived yet, and is not looked at before somebody reads it.
        """
        row.is_communication = True
        row.parents = [s for of, k, _ in read for s in of if not is_meant(s, k)]
        for tensor in tensors_in((op.args, op.kwargs, output)):
            self.kinds.forget([tensor])
            self._empty.drop(tensor)
            if self._bad.get(tensor) is None:
                self._bad.put(tensor, [row])

    def _note_bad(
        self,
        op: OpCall,
        row: Row,
        bad: Sequence[torch.Tensor],
        output: Any,
        read: _Read,
    ) -> None:
        """Notes where bad results came from, or that they began here."""
        for of, kinds, _ in read:
            new = [each for each in of if each not in row.parents]
            row.parents += [each for each in new if not is_meant(each, kinds)]
        if not row.parents:
            row.is_meant = _is_meant(op, row, read)
            row.masks = [each for of, _, _ in read for each in of]
            sizes = [size for _, _, size in read]
            row.reduces = bool(sizes) and max(t.numel() for t in bad) < min(sizes)
            if row.reduces or not row.is_meant:
                self._detail(op, row, bad, output, bool(read))
        for tensor in bad:
            known = self._bad.get(tensor)
            if known is None:
                self._bad.put(tensor, [row])
            elif len(known) < _MAX_SOURCES and known[-1] is not row:
                known.append(row)

    def _detail(
        self,
        op: OpCall,
        row: Row,
        bad: Sequence[torch.Tensor],
        output: Any,
        has_masks: bool,
    ) -> None:
        if self._num_details < _MAX_DETAILS:
            self._num_details += 1
            row.details = details = self._details_of(op, bad, output, self._sums)
            details.inputs = [
                replace(summary, name=self._name_of(tensor))
                for summary, tensor in zip(details.inputs, op.read(), strict=True)
            ]
            if self._keeps_calls:
                row.call = op
                op.note_versions()
            is_undefined = details.why == UNDEFINED and details.true_value is not None
            if is_undefined and self._tape is not None:
                self.undefined[row] = self._tape.before(row)
                if len(self.undefined) > _MOST_UNDEFINED:
                    del self.undefined[next(iter(self.undefined))]
        # A mask's infs may change their sign; what overflows beside them is news.
        is_overflow = row.details is not None and row.details.is_overflow
        row.is_meant = has_masks and not row.kinds & NAN and not is_overflow


def _is_meant(op: OpCall, row: Row, read: _Read) -> bool:
    """True if an operation's infs were asked for: by a constant, or handed on.

    A mask is made of -inf. Of another constant that was used it is told.
    """
    if row.kinds & NAN:
        return False
    if not read:
        numbers = op.is_constant or op.numbers
        return bool(numbers) and row.kinds == NEGATIVE_INF
    given = 0
    for _, kinds, _ in read:
        given |= kinds
    return not row.kinds & ~given
