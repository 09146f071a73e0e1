"""The snapshot: all that running a model again may change, put back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import _C
from ..core.engines import is_optimizer
from ..core.modules import (
    buffers_of,
    is_sharded,
    modules_in,
    named_modules,
    own_parameters_of,
    parameters_of,
    reshard,
)
from ..core.tensors import PLAIN, devices_of, has_memory, is_whole
from ..text import some
from ..torch_internals.tensor_internals import (
    gradient_hooks,
    local_tensor,
    may_step_in_backward,
    set_version,
)
from .objects import KeptObjects
from .random import RandomStates

_MAX_WEIGHTS = 2**28  # bytes of weights that are copied without a known reason
_MAX_AROUND = 2**20  # bytes of a tensor in a variable; larger ones are data
_FEW = 3
_MOST_AROUND = 4000  # objects that are looked at in a function's variables


# One tensor that is kept: its memory, its version, and a copy of its contents.


SMALL = 2**16  # bytes of a tensor that is copied without being asked


class KeptTensor:
    """A tensor as it is now; restored in place, also where its `.data` was exchanged.

    Args:
        tensor: The tensor.
        is_copied: Copy the contents. Without a copy only a write is noticed.

    Attributes:
        tensor: The tensor itself.
    """

    def __init__(self, tensor: torch.Tensor, is_copied: bool) -> None:
        self.tensor = tensor
        self._requires_grad = tensor.requires_grad
        self._is_lazy = is_lazy(tensor)
        self._memory = memory_of(tensor)
        self._version = _C.version_of(tensor)
        self._copy: torch.Tensor | None = None
        is_readable = not (tensor.is_meta or self._is_lazy)
        is_own = self._memory is not None or (
            is_strided(tensor) and local_tensor(tensor) is None
        )
        if is_readable and is_own:
            is_readable = has_memory(tensor)
        if is_copied and is_readable:
            with contextlib.suppress(Exception):  # a layout without clone(), no memory
                self._copy = tensor.detach().clone()

    def restore(self, is_write: bool = False) -> str:
        """Makes the tensor what it was. Does not incur a CPU-GPU sync.

        Args:
            is_write: Count the restoration as a write, for autograd. Else the version
                is that of before, too.

        Returns:
            Why it stays changed, or "".
        """
        tensor = self.tensor
        if self._is_lazy and not is_lazy(tensor):
            return "it was not initialized before"
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if self._memory is not None and not is_at(tensor, self._memory):
            tensor.data = self._memory
        if self._copy is None:
            is_known = tensor.is_meta or self._is_lazy
            is_written = not is_known and self.is_written()
            return "it was written to, and there is no copy" if is_written else ""
        try:
            if is_write:
                tensor.detach().copy_(self._copy)
            else:
                write(tensor, self._copy)
        except Exception as error:  # a layout that cannot be written to
            is_same = not self.is_written()
            return "" if is_same else f"{type(error).__name__}: {error}"
        if not is_write and self.is_written() and self._version is not None:
            set_version(tensor, self._version)
        return ""

    def is_written(self) -> bool:
        """True if torch has counted a write since."""
        return _C.version_of(self.tensor) != self._version

    def has_changed(self) -> bool:
        """True if the contents differ in a bit; without a copy, if it was written to.

        Incurs a CPU-GPU sync.
        """
        if self._copy is None:
            return self.is_written()
        return not is_same_bits(self._copy, self.tensor)


def write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Copies into a tensor unseen by autograd, once where it is expanded."""
    if is_strided(tensor) and 0 in tensor.stride() and local_tensor(tensor) is None:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    is_inference = tensor.is_inference()
    with torch.inference_mode() if is_inference else torch.no_grad():
        # The `.data` of another layout is no alias.
        (tensor.data if tensor.layout is torch.strided else tensor).copy_(copy)


def are_same_bits(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[bool]:
    """See `is_same_bits()`, for each of several pairs."""
    return [is_same_bits(*pair) for pair in pairs]


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same bits; False if that is not known.

    A nan equals itself, and -0 does not equal 0. Incurs a CPU-GPU sync.
    """
    try:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(_bits(a), _bits(b))
    except Exception:  # a layout without accessible bytes, or without a shape
        return False


def memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """An alias of a plain tensor's memory, to be put back; None for others."""
    is_plain = type(tensor) in PLAIN
    if not is_plain or not is_strided(tensor) or tensor.is_meta:
        return None
    return None if is_lazy(tensor) else tensor.data


def is_strided(tensor: torch.Tensor) -> bool:
    """True for a tensor with a shape and strides; a nested one has none."""
    return tensor.layout is torch.strided and not tensor.is_nested


def num_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor with strided memory; 0 for others."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def is_at(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """True if a tensor still is where it was, with the same shape."""
    if tensor.shape != memory.shape or tensor.dtype != memory.dtype:
        return False
    return tensor.data_ptr() == memory.data_ptr()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# All that running models again may change.


class Start(Protocol):
    """The beginning of the step that is run again."""

    def rewind(self) -> None:
        """Makes what is known of the models what it was when the step began."""

    def is_written_by_forwards(self, tensor: torch.Tensor) -> bool:
        """True for a weight that a forward was seen to write to."""


class Snapshot:
    """All that running models again may change, as it is now; restored on exit.

    Parameters, buffers, other tensors, gradients, attributes with all mutable objects
    in them, and random states. Everything is restored in place, so that identities and
    aliases stay. Gradients are set aside by reference, and hooks on them that step an
    optimizer in backward with them: they are not called meanwhile.

    Weights are copied if they are small, or a forward is known to write to them; of
    the others a write is noticed, and reported by `problems`.

    Args:
        models: The models, by what their modules' names begin with.
        start: The beginning of the step that is run again; None for now.
        around: Variables that the code which is run reads, by their names.
        calls_hooks: Leave hooks behind gradients where they are; the weights that they
            may step are copied.
        on_copies: Other tensors take the place of parameters and buffers meanwhile:
            these are not copied.

    Attributes:
        lost: The names of what cannot be restored, such as iterators and files.
        problems: After the exit, a sentence for each tensor that stays changed.
        has_hooks: Hooks behind gradients are set aside.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        start: Start | None = None,
        around: Mapping[str, Any] | None = None,
        calls_hooks: bool = False,
        on_copies: bool = False,
    ) -> None:
        self._models = dict(models)
        self._start = start
        self._around = {} if around is None else dict(around)
        self._calls_hooks = calls_hooks
        self._on_copies = on_copies
        self._is_taken = False
        self._gradients: list[Callable[[], None]] = []
        self._leaves: list[torch.Tensor] = []
        self._tensors: list[tuple[str, KeptTensor]] = []
        self.lost: list[str] = []
        self.problems: list[str] = []
        self.has_hooks = False

    def __enter__(self) -> Snapshot:
        if not self._is_taken:
            self.take()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def take(self) -> None:
        """Keeps everything, and begins the step; what an error has left is restored."""
        models = list(self._models.values())
        reshard(models)
        self._random = RandomStates(devices_of(models))
        self._objects = objects = KeptObjects(models)
        objects.add(  # a wrapper has the name of what it wraps
            (f"{prefix}{name}", module)
            for prefix, model in self._models.items()
            for name, module in named_modules(model)
        )
        self._keep_tensors(list(objects.tensors.values()))
        self._num_own = len(objects.kept), len(objects.tensors)
        objects.add_around(self._around.items(), _MOST_AROUND)
        others = list(objects.tensors.values())[self._num_own[1] :]
        self._tensors += [
            (name, KeptTensor(tensor, tensor.nbytes <= _MAX_AROUND))
            for name, tensor in others
        ]
        self.lost = list(objects.lost)
        self._is_taken = True
        try:
            self._leaves = list(self._find_leaves())
            for each in self._leaves:
                self._set_gradient_aside(each)
            self.begin()
        except BaseException:
            self.restore()
            raise

    def begin(self) -> None:
        """Makes everything what it was when the step began, and drops gradients."""
        reshard(self._models.values())
        self._put_back()
        if self._start is not None:
            self._start.rewind()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Sets the gradients to None."""
        for each in self._leaves:
            each.grad = None

    def changed_around(self) -> list[str]:
        """The names of variables that are not as they were when it was taken.

        A run again begins with them as they are after the step, not before it. An
        iterator whose place cannot be seen counts as changed.
        """
        first, objects = self._num_own[0], self._objects
        changed = [*objects.differences(first), *objects.taken_from(first)]
        return list(dict.fromkeys(changed))

    def set_meanwhile(self) -> list[str]:
        """After a run: the names of the models' numbers that it has left as others.

        The step had them as they are when this is taken, so what the run lacks is code
        outside of the models' forwards that sets them: a flag of the loop's.
        """
        names = self._objects.differences(last=self._num_own[0])
        return [name.removeprefix(".") for name in names]

    def has_stepped(self) -> bool:
        """True if a weight with a hook behind its gradient is another one now."""
        return any(
            kept.has_changed()
            for _, kept in self._tensors
            if isinstance(kept.tensor, nn.Parameter)
            if may_step_in_backward(kept.tensor)
        )

    def not_restored(self) -> list[str]:
        """After the exit: sentences about what was not put back, or may not be."""
        taken = self._objects.taken_from()
        return [*self.problems, _lost_text(taken)] if taken else self.problems

    @property
    def lost_text(self) -> str:
        """A sentence that names what cannot be restored."""
        return _lost_text(self.lost)

    def restore(self) -> None:
        """Makes everything what it was when it was taken."""
        if not self._is_taken:
            return
        self._is_taken = False
        reshard(self._models.values())
        self.problems = [
            f"{name} could not be put back ({why})." for name, why in self._put_back()
        ]
        for undo in reversed(self._gradients):
            undo()
        self._gradients.clear()
        self._leaves.clear()
        self._tensors.clear()

    def _put_back(self) -> list[tuple[str, str]]:
        """Restores all but gradients; returns what stays changed, and why."""
        problems = self._objects.restore()
        self._random.restore()
        pairs = [(name, kept.restore()) for name, kept in self._tensors]
        return problems + [(name, why) for name, why in pairs if why]

    def _find_leaves(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that a backward gives gradients to, each once."""
        seen = set()
        for model in self._models.values():
            for parameter in parameters_of(model):
                seen.add(id(parameter))
                yield parameter
        for key, (_, tensor) in self._objects.tensors.items():
            if key not in seen and tensor.is_leaf and tensor.requires_grad:
                yield tensor

    def _keep_tensors(self, found: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Keeps the models' tensors, the smallest first."""
        models = list(self._models.values())
        left_out = (
            {id(each) for each in _in_tables(models)} if self._on_copies else set()
        )
        is_gathered = any(map(is_sharded, models))  # and freed, by its wrapper
        known = {id(each) for each in _written_by_torch(models)}
        left = _MAX_WEIGHTS
        for name, tensor in sorted(found, key=lambda pair: num_bytes(pair[1])):
            is_weight = isinstance(tensor, nn.Parameter)
            is_trained = is_weight and tensor.requires_grad
            if id(tensor) in left_out or (is_trained and is_gathered):
                continue
            size = num_bytes(tensor)
            is_copied = size <= SMALL or (not is_weight and tensor.grad_fn is None)
            if is_weight and not is_copied:
                is_copied = id(tensor) in known or self._is_written(tensor)
                is_copied |= self._calls_hooks and may_step_in_backward(tensor)
            if is_weight and not is_copied and size <= left:
                is_copied, left = True, left - size
            self._tensors.append((name, KeptTensor(tensor, is_copied)))

    def _is_written(self, tensor: torch.Tensor) -> bool:
        return self._start is not None and self._start.is_written_by_forwards(tensor)

    def _set_gradient_aside(self, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        hooks = {} if self._calls_hooks else gradient_hooks(leaf) or {}
        saved = dict(hooks)
        self.has_hooks |= bool(hooks)
        hooks.clear()
        is_plain = gradient is not None and local_tensor(gradient) is None
        if gradient is not None and is_plain and not is_whole(gradient):
            # DDP may reduce others in there.
            self._tensors.append(("a gradient", KeptTensor(gradient, True)))

        def undo() -> None:
            leaf.grad = gradient
            if saved:
                hooks.update(saved)

        self._gradients.append(undo)


def _lost_text(names: Iterable[str]) -> str:
    listed = some((f"`{name}`" for name in names), _FEW)
    return (
        f"What a replay takes from {listed} is not put back: an iterator, "
        "file, socket, queue or cached function has no copy."
    )


def _in_tables(models: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for model in models:
        yield from parameters_of(model)
        yield from buffers_of(model)


def _written_by_torch(models: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields the weights that torch itself writes to: of embeddings with `max_norm`."""
    for model in models:
        for module in modules_in(model):
            if getattr(module, "max_norm", None) is not None:
                yield from own_parameters_of(module).values()


# An optimizer with its weights and its state, to undo a step that is skipped.


class OptimizerSnapshot:
    """The attributes of an optimizer, with all tensors in them, as they are now.

    Includes parameters, state, groups, all that its containers hold, and the same of
    optimizers among its attributes. Containers and tensors keep their identity when
    they are restored. Copies the parameters and their state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._objects = KeptObjects(
            opens=lambda value: value is optimizer or is_optimizer(value)
        )
        self._objects.add([("", optimizer)])
        with torch.no_grad():
            self._tensors = [
                KeptTensor(tensor, is_copied=True)
                for _, tensor in self._objects.tensors.values()
            ]

    def restore(self) -> None:
        """Restores everything but the gradients, which stay as they are."""
        self._objects.restore()
        with torch.no_grad():
            for kept in self._tensors:
                kept.restore(is_write=True)
