"""The beginning of a step for one model: what is kept of it, and how it is put back.

The course of a step:

1. `take()`, before the step's first forward. Mostly the model holds the same tensors as
   in the last step, and those that are copied in each step are copied at once. Else,
   and in steps 1, 2, 4, 8, ..., the model is walked through. A forward without autograd
   may be none of the step: what it has taken is not firm, and the next one takes anew.
2. `begin_forward()` and `end_forward()`, around each outermost forward: what was
   written or replaced between them is the forward's, all else is other code's. A large
   tensor that a forward has changed is copied from the next step on.
3. `restore()`, if the step is skipped or raises: what forwards have written or replaced
   is put back, what other code has is left. Then `release()`: the next forward begins a
   step. Or `keep()`, if the step was made.
4. `prepare()`, at the end of both, takes at once where no hook announces a forward.

`renew()` is for code of the program that writes to the model in between, and whose
writes stay: see `lending.py`.

The state of a model has three owners: a `KeptBuffer` for each place of a buffer or
frozen parameter, from step to step, with its copy; one `KeptWeights`; and
`KeptAttributes` of modules, of this step alone. A `SteadyBuffers` owns nothing: it does
the work of all buffers of this step at once, and is made anew whenever one of them is
looked at by itself, or holds another tensor.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Set
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _C
from ...base.modules import is_sharded, modules_in, walk
from ...base.tensors import copy_tensors
from ...torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS
from .attributes import KeptAttributes
from .buffers import KeptBuffer
from .steady_buffers import SteadyBuffers
from .weights import KeptWeights, Slot

_TABLES = (MODULES, BUFFERS, PARAMETERS)


class Watched(Protocol):
    """A model that is watched."""

    prefix: str
    has_submodule_calls: bool

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it is gone."""

    @property
    def is_attached(self) -> bool:
        """Its hooks are on."""

    @property
    def is_in_step(self) -> bool:
        """A forward that runs is of a training step."""


class ModelRestorePoint:
    """The beginning of the step of one model; see this file's docstring.

    Args:
        watch: The model.

    Attributes:
        buffers: The buffers and frozen parameters of this step.
        weights: Its trained weights.
        attributes: The attributes that are kept in this step.
        is_taken: It is complete.
        is_firm: No further forward of this step replaces it.
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._model: weakref.ref[nn.Module] | None = None  # whose tensors these are
        # The tables of submodules, buffers and parameters, and what they hold: if that
        # is the same, and the same parameters are trained, nothing is looked for.
        self._tables: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._are_trained: list[bool] = []
        # Of these the tables of kept tensors: what they held when the step began, and
        # what they were seen to hold last, to find who has replaced a tensor.
        self._own_tables: list[dict[str, Any]] = []
        self._own_held: list[Any] = []
        self._placed: list[Any] = []
        self._is_in_forward = False
        self._has_ended_forward = False  # in this step
        # From step to step, by the module's id and the name.
        self._known: dict[tuple[int, str], KeptBuffer] = {}
        self.buffers: list[KeptBuffer] = []
        self._steady = SteadyBuffers([])
        self.weights = KeptWeights()
        self.attributes: list[KeptAttributes] = []
        # Modules whose attributes are kept in each step; those seen to change since.
        self._changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._was_firm = False  # one since the last full one
        self._num_taken = 0
        self._is_full = False  # small weights and all attributes are kept, too
        self.is_taken = False
        self.is_firm = False

    def take(self, is_firm: bool) -> None:
        """Makes the current state the beginning of the step."""
        self.is_taken = self.is_firm = False  # until all of it is copied
        model = self._watch.model
        if model is None:
            self._forget()
            return
        self._num_taken += 1
        self._is_full = self._num_taken & (self._num_taken - 1) == 0
        if not self._is_full and self._holds_same() and self._is_same_model(model):
            self._retake()
        else:
            self._walk(model)
        self.weights.take(self._is_full)
        self._placed = self._own_held
        self._has_ended_forward = self._is_in_forward = False
        self.attributes = []
        if self._is_full and self._was_firm:  # without autograd it may not change
            self._changing, self._changed = self._changed, weakref.WeakSet()
            self._was_firm = False
        if self._is_full or len(self._changing):
            modules = modules_in(model) if self._is_full else list(self._changing)
            kept = filter(KeptAttributes.are_kept, modules)
            self.attributes = list(map(KeptAttributes, kept))
        self.is_taken, self.is_firm = True, is_firm
        self._was_firm |= is_firm

    def _holds_same(self) -> bool:
        return _C.hold(self._tables, self._held)

    def _is_same_model(self, model: nn.Module) -> bool:
        is_same = self._model is not None and self._model() is model
        return is_same and self._are_trained == self._read_trained()

    def _read_trained(self) -> list[bool]:
        return _C.require_grad(self._parameters)

    def _retake(self) -> None:
        """Copies what is copied in each step: the model holds the same tensors."""
        if self._steady.take():
            return
        self._steady.settle()
        with torch.no_grad():
            for buffer in self.buffers:
                buffer.begin(buffer.current())
            self._copy()

    @torch.no_grad()
    def _walk(self, model: nn.Module) -> None:
        """Looks for the tensors of the model."""
        if self._model is None or self._model() is not model:
            # Tables hold submodules, which are to go with the model.
            self._model = weakref.ref(model, self._forget_if_running)
        slots, self._tables, weights = _slots(model)
        weights = [] if is_sharded(model) else weights
        self._held = _values(self._tables)
        places = [*slots, *((module, PARAMETERS, name) for module, name, _ in weights)]
        tables = {id(t): t for m, n, _ in places if (t := m.__dict__[n]) is not None}
        self._own_tables = list(tables.values())
        self._own_held = _values(self._own_tables)
        self._parameters = [t for t in self._held if isinstance(t, nn.Parameter)]
        self._are_trained = self._read_trained()
        self.buffers = [self._begin(*slot) for slot in slots]
        if len(self._known) > len(self.buffers):
            self._known = {buffer.slot: buffer for buffer in self.buffers}
        self._copy()
        self.weights.set(weights)

    def _begin(self, module: nn.Module, table: str, name: str) -> KeptBuffer:
        buffer = self._known.get((id(module), name))
        if buffer is None or buffer.module() is not module or buffer.table != table:
            buffer = self._known[id(module), name] = KeptBuffer(module, table, name)
        buffer.begin(module.__dict__[table][name])
        return buffer

    def _copy(self) -> None:
        """Copies contents into the copies that there are."""
        wanted = [e for e in self.buffers if e.needs_copy()]
        tensors = [e.tensor for e in wanted if e.tensor is not None]
        copies = copy_tensors(tensors, [e.copy for e in wanted])
        for buffer, copy in zip(wanted, copies, strict=True):
            buffer.copy = copy
        self._steady = SteadyBuffers(self.buffers)

    def _forget_if_running(
        self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not is_finalizing():  # when it is, names of this file may be gone
            self._forget()

    def _forget(self) -> None:
        self._tables, self._held, self._parameters, self.buffers = [], [], [], []
        self._own_tables, self._own_held, self._placed = [], [], []
        self._steady, self.attributes = SteadyBuffers([]), []
        self._known.clear()
        self.weights.set([])
        self.is_taken = self.is_firm = False

    def begin_forward(self) -> None:
        """Notes what other code has done since the step's last forward."""
        if self._has_ended_forward:
            self._note_placed()
        self._is_in_forward = True
        self.weights.begin_forward()

    def _note_placed(self) -> None:
        """Notes who has replaced tensors, where the model holds others than before.

        That is a forward where one has not ended, or none was announced by a hook.
        """
        by_forward = self._is_in_forward or not self._has_ended_forward
        if _C.hold(self._own_tables, self._placed):
            return
        self._placed = _values(self._own_tables)
        self.weights.note_placed(by_forward)
        for buffer in self.buffers:
            buffer.note_placed(by_forward)

    def end_forward(self) -> None:
        """Notes what a forward has written to, or replaced."""
        if not self.is_taken:
            return
        self._is_in_forward = True  # also where no hook has announced it
        self._note_placed()
        self._has_ended_forward, self._is_in_forward = True, False
        self._steady.note_writes()
        self.weights.end_forward()
        for kept in self.attributes:
            module = kept.module()
            if module is None or module in self._changed or not kept.has_changed():
                continue
            self._changed.add(module)
            self._changing.add(module)

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it is gone."""
        return self._watch.model

    def settle(self) -> None:
        """Takes what was written to the model so far for the forward's."""
        self._steady.settle()
        # What the model holds is looked up again, in the next step at the latest.
        self._steady, self._held, self._parameters = SteadyBuffers([]), [], []
        for buffer in self.buffers:
            buffer.end_forward()
        self.weights.end_forward()

    def renew(self, changed: Set[Slot]) -> None:
        """Makes what some of the model's tensors hold now their beginning."""
        self.weights.take_over(changed)
        for module, table, name in [] if self.model is None else _slots(self.model)[0]:
            if (id(module), table, name) not in changed:
                continue
            self._known.pop((id(module), name), None)
            own = [e for e in self.buffers if e.slot != (id(module), name)]
            buffer = self._begin(module, table, name)
            if buffer.needs_copy() and buffer.tensor is not None:
                (buffer.copy,) = copy_tensors([buffer.tensor], [None])
            self.buffers = [*own, buffer]

    @torch.no_grad()
    def keep(self, compares: bool) -> None:
        """Ends the step, which was made."""
        if _C.hold(self._own_tables, self._own_held):
            self._steady.note_changes(compares)
        else:
            self._steady.settle()
            self._note_placed()
            for buffer in self.buffers:
                buffer.end(compares)
            self.buffers, self._held, self._parameters = [], [], []
            self._steady = SteadyBuffers([])
        self.is_taken = self.is_firm = False
        self.prepare()

    def release(self, is_over: bool) -> None:
        """Lets the next forward begin a step."""
        self.is_firm = False
        if is_over:
            self.is_taken = False
            self.prepare()

    def prepare(self) -> None:
        """Keeps the model where no hook announces a forward."""
        is_announced = self._watch.is_attached and not self._watch.has_submodule_calls
        if not (self.is_taken or is_announced):
            self.take(is_firm=False)

    @torch.no_grad()
    def restore(self) -> Iterator[str]:
        """Restores the tensors; yields a sentence for each that stays changed."""
        if not self.is_taken:
            return
        self._remove_new()
        self._steady.settle()
        self._note_placed()
        for buffer in self.buffers:
            try:
                why = buffer.restore()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                kind = "buffer" if buffer.table == BUFFERS else "frozen parameter"
                yield self._sentence(kind, buffer.module(), buffer.name, why)
        restored = set()
        for module, name, why in self.weights.restore():
            restored.add(module)
            if why:
                yield self._sentence("weight", module, name, why)
        for kept in self.attributes:
            # A flag such as `is_initialized` belongs to the weights.
            if kept.module() in restored:
                kept.restore()

    def _remove_new(self) -> None:
        """Removes buffers that the forward has registered."""
        model = self._watch.model
        known = {buffer.slot for buffer in self.buffers}
        for module, table, name in [] if model is None else _slots(model)[0]:
            if table == BUFFERS and (id(module), name) not in known:
                del module.__dict__[table][name]

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the buffers where a flag on the device is not 0."""
        self._steady.settle()
        for buffer in self.buffers if self.is_taken else []:
            buffer.restore_where(flag)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that are copied, and what was in them."""
        if not self.is_taken:
            return []
        return [*filter(None, (e.pair() for e in self.buffers)), *self.weights.pairs()]

    def _sentence(
        self, kind: str, module: nn.Module | None, name: str, why: str
    ) -> str:
        watch, model = self._watch, self._watch.model
        for fqn, each in [] if model is None else walk(model):
            if each is module:
                name = f"{watch.prefix}{fqn}{'.' * bool(fqn)}{name}"
                break
        return f"The {kind} {name} could not be put back ({why})."


_Slot = tuple[nn.Module, str, str]


def _slots(
    model: nn.Module,
) -> tuple[
    list[_Slot], list[dict[str, Any]], list[tuple[nn.Module, str, torch.Tensor]]
]:
    """Finds the places of a model's buffers and frozen parameters, each once.

    `named_modules()` would take several times as long.

    Returns:
        The places, the dicts of all modules, and the trained weights.
    """
    slots: list[_Slot] = []
    tables: list[dict[str, Any]] = []
    weights: dict[int, tuple[nn.Module, str, torch.Tensor]] = {}
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # TorchScript owns its tensors
        own = module.__dict__
        tables += [own[table] for table in _TABLES]
        slots += [(module, BUFFERS, name) for name in own[BUFFERS]]
        for name, parameter in own[PARAMETERS].items():
            if parameter is None:
                continue
            if not parameter.requires_grad:
                slots.append((module, PARAMETERS, name))
            elif not (is_lazy(parameter) or parameter.is_inference()):
                weights[id(parameter)] = module, name, parameter
        for child in own[MODULES].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return slots, tables, list(weights.values())


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, tables)))
