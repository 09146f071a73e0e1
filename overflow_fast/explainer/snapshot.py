"""The snapshot: all that running a model again may change, put back bit for bit.

1. `take()` keeps everything as the program has it, behind its step.
2. `begin()`, before each run, makes everything what it was when the step began: it puts
   the snapshot back, goes back to the step's restore point, and drops gradients.
3. `restore()` makes everything what it was when it was taken. What it cannot, it says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..base.graph import leaves_of
from ..base.modules import (
    is_sharded,
    modules_in,
    named_modules,
    own_parameters_of,
    parameters_of,
)
from ..base.shared_models import reshard
from ..base.tensors import devices_of, is_whole
from ..guard.requests.gate import let_others_pass, others_wait
from ..guard.undo.attributes import KeptAttributes
from ..guard.undo.kept_place import KeptPlace
from ..guard.undo.random import RandomStates
from ..guard.undo.restore_point import RestorePoint
from ..guard.undo.tensors import SMALL, KeptTensor, num_bytes, write
from ..guard.verdict.foreign_hooks import is_ours
from ..torch_internals.cached_casts import without_cached_casts
from ..torch_internals.module_internals import forward_hooks, forward_pre_hooks
from ..torch_internals.replaying import without_torch_function
from ..torch_internals.tensor_internals import gradient_hooks, local_tensor
from .effects.held_signals import as_raised, held_signals
from .program_objects import MOST_OF_MODELS, ProgramObjects

# Bytes of weights that are copied without a known reason. If a run writes to another
# one, that is noticed, and reported.
_MAX_WEIGHTS = 2**28
# Bytes of a tensor in a variable; larger ones are data. If a run writes to one of them,
# it stays changed, which is reported.
_MAX_AROUND = 2**20


class Snapshot:
    """All that running models again may change, as it is now; restored on exit.

    Parameters, buffers, other tensors, gradients, random states, and attributes with
    the containers, arrays, generators and plain objects in them. Everything is restored
    in place, so that identities and aliases stay. Gradients are set aside by reference,
    and hooks on them that step an optimizer in backward with them: they are not called
    meanwhile. So are those of each leaf that a backward reaches, before it does: see
    `set_aside()`. What autocast has cached of weights is neither read nor dropped.
    Signals' handlers wait meanwhile.

    Weights are copied if they are small, or a forward is known to write to them; of
    the others a write is noticed, and reported by `problems`.

    Args:
        models: The models, by what their modules' names begin with.
        start: The beginning of the step that is run again; None for now.
        around: Variables that the code which is run reads, by their names.
        batches: Tensors that it is given. Their gradients are set aside.

    Attributes:
        iterators: Those among what it holds: what is taken from them stays taken.
        problems: After the exit, a sentence for each tensor that stays changed.
        has_hooks: Hooks behind gradients are set aside.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        start: RestorePoint | None = None,
        around: Mapping[str, Any] | None = None,
        batches: Iterable[torch.Tensor] = (),
    ) -> None:
        self._models = dict(models)
        self._start = start
        self._around = {} if around is None else dict(around)
        self._batches = list(batches)
        self._is_taken = False
        self._casts = ExitStack()
        self._gradients: list[Callable[[], None]] = []
        # Weakly: a run makes leaves of its own. By their ids.
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._tensors: list[tuple[str, KeptTensor]] = []
        self.iterators: list[Any] = []
        self.problems: list[str] = []
        self.has_hooks = False

    def __enter__(self) -> Snapshot:
        if not self._is_taken:
            with as_raised():
                self.take()
        return self

    def __exit__(self, *exception: object) -> None:
        with as_raised():
            self.restore()

    def take(self) -> None:
        """Keeps everything, and begins the step; what an error has left is restored."""
        held_signals.hold()
        try:
            self._keep()
        except BaseException:
            held_signals.release()
            raise
        self._is_taken = True
        try:
            models = self._models.values()
            weights = (each for model in models for each in parameters_of(model))
            self._casts.enter_context(without_cached_casts(weights))
            for each in self._find_leaves():
                self._set_gradient_aside(each)
            self._begin()
        except BaseException:
            self.restore()
            raise

    def _keep(self) -> None:
        models = list(self._models.values())
        reshard(models)
        self._random = RandomStates(devices_of(models))
        self._objects = objects = ProgramObjects(models)
        named = [  # a wrapper has the name of what it wraps
            (f"{prefix}{name}", module)
            for prefix, model in self._models.items()
            for name, module in named_modules(model)
        ]
        objects.add(named, MOST_OF_MODELS)
        self._keep_tensors(list(objects.tensors.values()))
        self._num_own, num_tensors = len(objects.kept), len(objects.tensors)
        objects.add_around(self._around.items())
        others = list(objects.tensors.values())[num_tensors:]
        self._tensors += [
            (name, KeptTensor(tensor, tensor.nbytes <= _MAX_AROUND))
            for name, tensor in others
        ]
        self.iterators = objects.iterators

    def begin(self) -> None:
        """Makes everything what it was when the step began, and drops gradients.

        Signals' handlers and forwards of other threads that have waited go before, with
        everything as the program has it.
        """
        if held_signals.are_due or others_wait():
            self.restore()
            let_others_pass()
            self.take()
            return
        reshard(self._models.values())
        self._put_back()
        self._begin()

    def _begin(self) -> None:
        if self._start is not None:
            rewind(self._start)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Sets the gradients to None."""
        for held in self._leaves.values():
            leaf = held()
            if leaf is not None:
                leaf.grad = None

    def set_aside(self, roots: Any) -> None:
        """Sets aside the gradients that a backward is about to add to.

        Args:
            roots: The tensors or edges that it begins at, or the one.
        """
        with without_torch_function():
            for leaf in leaves_of(roots):
                held = self._leaves.get(id(leaf))
                if leaf.requires_grad and (held is None or held() is not leaf):
                    self._set_gradient_aside(leaf)
                    leaf.grad = None

    def changed_around(self) -> list[str]:
        """The names of variables that are not as they were when it was taken.

        A run again begins with them as they are after the step, not before it.
        """
        return list(dict.fromkeys(self._objects.differences(self._num_own)))

    def set_meanwhile(self) -> list[str]:
        """After a run: the names of the models' numbers that it has left as others.

        The step had them as they are when this is taken, so what the run lacks is code
        outside of the models' forwards that sets them: a flag of the loop's.
        """
        names = self._objects.differences(last=self._num_own)
        return [name.removeprefix(".") for name in names]

    def is_of_other_form(self) -> bool:
        """True if a module has another class, or further hooks, than in the step.

        Those of this package are not counted. Known where attributes were kept.
        """
        starts = () if self._start is None else self._start.starts
        return any(_has_other_form(kept) for each in starts for kept in each.attributes)

    def was_kept(self, tensor: torch.Tensor | None) -> bool:
        """True for a tensor whose contents were kept when the step began."""
        starts = () if self._start is None else self._start.starts
        taken = [each for each in starts if each.is_taken]
        is_attribute = any(e.holds(tensor) for each in taken for e in each.attributes)
        return is_attribute or any(
            e is tensor for each in taken for e, _ in each.pairs()
        )

    def restore(self) -> None:
        """Makes everything what it was when it was taken."""
        if not self._is_taken:
            return
        self._is_taken = False
        try:
            self._casts.close()
            reshard(self._models.values())
            texts = (
                f"{n} could not be put back ({why})." for n, why in self._put_back()
            )
            self.problems = list(dict.fromkeys([*self.problems, *texts]))
            for undo in reversed(self._gradients):
                undo()
            self._gradients.clear()
            self._leaves.clear()
            self._tensors.clear()
        finally:
            held_signals.release()

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
        others = [tensor for _, tensor in self._objects.tensors.values()]
        for tensor in (*others, *self._batches):
            is_leaf = tensor.is_leaf and tensor.requires_grad
            if id(tensor) not in seen and (is_leaf or tensor.retains_grad):
                seen.add(id(tensor))
                yield tensor

    def _keep_tensors(self, found: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Keeps the models' tensors, the smallest first."""
        models = list(self._models.values())
        is_gathered = any(map(is_sharded, models))  # and freed, by its wrapper
        known = {id(each) for each in _written_by_torch(models)}
        left = _MAX_WEIGHTS
        for name, tensor in sorted(found, key=lambda pair: num_bytes(pair[1])):
            is_weight = isinstance(tensor, nn.Parameter)
            is_trained = is_weight and tensor.requires_grad
            if is_trained and is_gathered:
                continue
            size = num_bytes(tensor)
            is_copied = size <= SMALL or (not is_weight and tensor.grad_fn is None)
            if is_weight and not is_copied:
                is_copied = id(tensor) in known or self._is_written(tensor)
            if is_weight and not is_copied and size <= left:
                is_copied, left = True, left - size
            self._tensors.append((name, KeptTensor(tensor, is_copied)))

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """True for a weight that a forward was seen to write to, in any step."""
        starts = () if self._start is None else self._start.starts
        return any(each.is_known(tensor) for each in starts)

    def _set_gradient_aside(self, leaf: torch.Tensor) -> None:
        held = self._leaves[id(leaf)] = weakref.ref(leaf)
        gradient = leaf.grad
        hooks = gradient_hooks(leaf) or {}
        saved = dict(hooks)
        self.has_hooks |= bool(hooks)
        hooks.clear()
        is_plain = gradient is not None and local_tensor(gradient) is None
        if gradient is not None and is_plain and not is_whole(gradient):
            # DDP may reduce others in there.
            self._tensors.append(("a gradient", KeptTensor(gradient, True)))

        def undo() -> None:
            own = held()
            if own is not None:
                own.grad = gradient
            if saved:
                hooks.update(saved)

        self._gradients.append(undo)


def _has_other_form(kept: KeptAttributes) -> bool:
    module = kept.module()
    if module is None:
        return False
    kind, keys = kept.form
    hooks = {**forward_pre_hooks(module), **forward_hooks(module)}
    added = [hook for key, hook in hooks.items() if key not in keys]
    return type(module) is not kind or not all(map(is_ours, added))


@torch.no_grad()
def rewind(start: RestorePoint) -> None:
    """Makes the models what they were when a step began, as far as is known.

    A snapshot restores them afterwards.
    """
    for each in start.starts:
        if not each.is_taken:
            continue
        for attributes in each.attributes:
            attributes.restore()
        for buffer in each.buffers:
            _rewind_buffer(buffer)
        for weight, copy in each.written():
            write(weight, copy)


def _rewind_buffer(buffer: KeptPlace) -> None:
    """Writes to it whoever owns its contents now: a snapshot has these."""
    tensor, is_gone = buffer.tensor, buffer.module() is None
    if is_gone or tensor is None or buffer.was_lazy or tensor.is_meta:
        return
    buffer.put_in_place()
    if buffer.copy is not None:
        write(tensor, buffer.copy)


def _written_by_torch(models: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields the weights that torch itself writes to: of embeddings with `max_norm`."""
    for model in models:
        for module in modules_in(model):
            if getattr(module, "max_norm", None) is not None:
                yield from own_parameters_of(module).values()
