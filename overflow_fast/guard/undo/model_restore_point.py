"""The beginning of a step for one model: what is kept of it, and how it is put back.

The course of a step:

1. `take()`, before the step's first forward. Mostly the model holds the same tensors as
   in the last step, and those that are copied in each step are copied at once. Else,
   and in steps 1, 2, 4, 8, ..., which are full, the model is walked through. A forward
   without autograd may be none of the step: what it has taken is not firm, and the next
   one takes anew.
2. `begin_forward()` and `end_forward()`, around each outermost forward: what was
   written or replaced between them is the forward's, all else is other code's.
3. `restore()`, if the step is skipped or raises: what forwards have written or replaced
   is put back, what other code has is left. Then `release()`: the next forward begins a
   step. Or `keep()`, if the step was made.
4. `prepare()`, at the end of both, takes at once where no hook announces a forward.

`note_forward()` and `renew()` are for code of the program that writes to the model in
between, and whose writes stay: see `lending.py`.

The state: a `KeptPlace` for each place of a tensor, from step to step, with its copy;
one `StepTensors`, which looks at the tensors of all places at once; and the
`KeptAttributes` of modules, of this step alone. Those are kept in full steps, and from
then on in each step for the modules that a forward was seen to change, or whose own
code may (`writing_modules.py`). So are the small weights that such code may write to.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import _C
from ...base.modules import is_sharded, modules_in, walk
from ...base.tensor_copies import copy_tensors
from ...base.text import some
from ...torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS
from .attributes import KeptAttributes
from .kept_place import KeptPlace, Slot
from .step_tensors import StepTensors
from .writing_modules import writes_of, written_by

_FEW = 4  # names in a sentence; chosen
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


class WrittenState(NamedTuple):
    """A tensor that lasts from step to step, and that a forward has written.

    Attributes:
        name: Its name.
        table: What holds it: the attributes of a module, or its buffers.
        key: Its name there.
        before: What it held when the step began; None if nothing was there.
    """

    name: str
    table: Mapping[str, Any]
    key: str
    before: torch.Tensor | None

    @property
    def now(self) -> Any:
        """The tensor."""
        return self.table.get(self.key)

    @property
    def was_finite(self) -> bool:
        """True if it was finite; a new one, if it is not nan as a placeholder is.

        Incurs a CPU-GPU sync.
        """
        before, now = self.before, self.now
        return bool(now.isfinite().any() if before is None else before.isfinite().all())


class ModelRestorePoint:
    """The beginning of the step of one model; see this file's docstring.

    Args:
        watch: The model.
        has_attributes: Attributes are restored with it, whatever was written: it is no
            model, whose loop may count in them.

    Attributes:
        tensors: Its kept tensors, looked at together.
        attributes: The attributes that are kept in this step.
        is_taken: It is complete.
        is_firm: No further forward of this step replaces it.
    """

    def __init__(self, watch: Watched, has_attributes: bool = False) -> None:
        self._watch = watch
        self._has_attributes = has_attributes
        self._model: weakref.ref[nn.Module] | None = None  # whose tensors these are
        # The tables of submodules, buffers and parameters, and what they held when the
        # step began: if that is the same, and the same parameters are trained, nothing
        # is looked for. And what they were seen to hold last, to find who has replaced
        # a tensor.
        self._tables: list[dict[str, Any]] = []
        self._held: list[Any] = []
        self._seen: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._are_trained: list[bool] = []
        self._is_in_forward = False
        self._has_ended_forward = False  # in this step
        self._places: dict[Slot, KeptPlace] = {}  # from step to step
        self.tensors = StepTensors()
        self.attributes: list[KeptAttributes] = []
        self._changing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._writers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # to weights
        self._num_taken = 0
        self.is_taken = False
        self.is_firm = False

    # The course of a step.

    def take(self, is_firm: bool) -> None:
        """Makes the current state the beginning of the step."""
        self.is_taken = self.is_firm = False  # until all of it is copied
        model = self._watch.model
        if model is None:
            self._forget()
            return
        self._num_taken += 1
        is_full = self._num_taken & (self._num_taken - 1) == 0
        if is_full:
            self._note_writers(model)
        if is_full or not (self._is_same_model(model) and self.tensors.take()):
            self._walk(model, is_full)
        self.tensors.begin()
        self._seen = self._held
        self._has_ended_forward = self._is_in_forward = False
        modules = modules_in(model) if is_full else list(self._changing)
        kept = filter(KeptAttributes.are_kept, modules)
        self.attributes = list(map(KeptAttributes, kept))
        self.is_taken, self.is_firm = True, is_firm

    def _note_writers(self, model: nn.Module) -> None:
        for module in modules_in(model):
            writes = writes_of(module)
            if writes.attributes or writes.weights:
                self._changing.add(module)
            if writes.weights:
                self._writers.add(module)

    def _is_same_model(self, model: nn.Module) -> bool:
        is_same = self._model is not None and self._model() is model
        is_same = is_same and _C.hold(self._tables, self._held)
        return is_same and self._are_trained == _C.require_grad(self._parameters)

    @torch.no_grad()
    def _walk(self, model: nn.Module, is_full: bool) -> None:
        """Looks for the tensors of the model, and copies those that have to be."""
        if self._model is None or self._model() is not model:
            # Tables hold submodules, which are to go with the model.
            self._model = weakref.ref(model, self._forget_if_running)
        found, self._tables = _places(model)
        self._held = _values(self._tables)
        self._parameters = [t for t in self._held if isinstance(t, nn.Parameter)]
        self._are_trained = _C.require_grad(self._parameters)
        places = [self._place(*each) for each in found]
        self._places = {place.slot: place for place in places}
        written = {each for writer in self._writers for each in written_by(writer)}
        _copy([e for e in places if e.begin(is_full or e.module() in written)])
        self.tensors.list_tensors(places, is_full)

    def _place(
        self, module: nn.Module, table: str, name: str, is_trained: bool
    ) -> KeptPlace:
        known = self._places.get((id(module), table, name))
        is_same = known is not None and known.module() is module
        if known is None or not is_same or known.is_trained != is_trained:
            return KeptPlace(module, table, name, is_trained)
        return known

    def _forget_if_running(
        self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not is_finalizing():  # when it is, names of this file may be gone
            self._forget()

    def _forget(self) -> None:
        self._tables, self._held, self._seen, self._parameters = [], [], [], []
        self.attributes, self._places, self.tensors = [], {}, StepTensors()
        self.is_taken = self.is_firm = False

    def begin_forward(self) -> None:
        """Notes what other code has done since the step's last forward."""
        if self._has_ended_forward:
            self._note_placed()
        self._is_in_forward = True
        self.tensors.begin_forward()

    def _note_placed(self) -> None:
        """Notes who has replaced tensors, where the model holds others than before.

        That is a forward where one has not ended, or none was announced by a hook.
        """
        by_forward = self._is_in_forward or not self._has_ended_forward
        if _C.hold(self._tables, self._seen):
            return
        self._seen = _values(self._tables)
        for place in self._places.values():
            place.note_placed(by_forward)

    def end_forward(self) -> None:
        """Notes what a forward has written to, or replaced."""
        if not self.is_taken:
            return
        self._is_in_forward = True  # also where no hook has announced it
        self._note_placed()
        self._has_ended_forward, self._is_in_forward = True, False
        self.tensors.end_forward()
        for kept in self.attributes:
            module = kept.module()
            is_known = module is None or module in self._changing
            if module is not None and not is_known and kept.has_changed():
                self._changing.add(module)

    @torch.no_grad()
    def keep(self, compares: bool) -> None:
        """Ends the step, which was made."""
        self.tensors.note_changes(compares)
        if not _C.hold(self._tables, self._held):
            self._note_placed()
            for place in self._places.values():
                place.end()
            self._held, self._seen, self._parameters = [], [], []
            self.tensors = StepTensors()
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

    # A step that is undone.

    @torch.no_grad()
    def restore(self) -> Iterator[str]:
        """Restores the tensors; yields a sentence for those that stay so, by reason."""
        if not self.is_taken:
            return
        self._remove_new()
        self._note_placed()
        # A flag such as `is_initialized` belongs to the weights.
        written = {place.module() for place in self._places_written()}
        written |= {e for e in self._writers if not written.isdisjoint(written_by(e))}
        failed = dict[tuple[str, str], list[str]]()
        for place in self._places.values():
            try:
                why = place.restore()
            except Exception as error:  # a layout that cannot be written to
                why = f"{type(error).__name__}: {error}"
            if why:
                name = self._prefixes().get(place.module(), "") + place.name
                failed.setdefault((place.kind, why), []).append(name)
        for kept in self.attributes:
            if self._has_attributes or kept.module() in written:
                kept.restore()
        for (kind, why), names in failed.items():
            things = f"{kind} {names[0]}"
            if len(names) > 1:
                things, why = f"{kind}s {some(names, _FEW)}", f"each: {why}"
            yield f"The {things} could not be put back ({why})."

    def _remove_new(self) -> None:
        """Removes buffers that the forward has registered."""
        model = self._watch.model
        for module, table, name, _ in [] if model is None else _places(model)[0]:
            is_new = (id(module), table, name) not in self._places
            if table == BUFFERS and is_new:
                del module.__dict__[table][name]

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores the buffers where a flag on the device is not 0."""
        for buffer in self.buffers if self.is_taken else []:
            buffer.restore_where(flag)

    # Code of the program between two forwards, whose writes stay.

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it is gone."""
        return self._watch.model

    def held(self) -> dict[Slot, torch.Tensor]:
        """The tensors that the model holds now."""
        found = [] if self.model is None else _places(self.model)[0]
        return {
            (id(module), table, name): tensor
            for module, table, name, _ in found
            if (tensor := module.__dict__[table][name]) is not None
        }

    def note_forward(self) -> None:
        """Takes what was written to the model so far for the forward's."""
        self.tensors.end_forward()
        self.tensors.settle()

    @torch.no_grad()
    def renew(self, changed: Set[Slot]) -> None:
        """Makes what some of the model's places hold now their beginning."""
        for found in [] if self.model is None else _places(self.model)[0]:
            place = KeptPlace(*found)
            if place.slot not in changed:
                continue
            known = self._places.get(place.slot)
            if known is not None and known.tensor is place.current():
                place.changes = known.changes
            self._places[place.slot] = place
            # A forward may follow that writes to a small weight.
            _copy([place] if place.begin(is_full=True) else [])
        self.tensors.list_tensors(list(self._places.values()), is_full=True)

    # What is known of the beginning.

    @property
    def buffers(self) -> list[KeptPlace]:
        """The places of buffers and frozen parameters."""
        self.tensors.settle()
        return [place for place in self._places.values() if not place.is_trained]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that are copied, and what was in them."""
        places = self._places.values() if self.is_taken else ()
        return [pair for place in places if (pair := place.pair()) is not None]

    def is_known(self, weight: torch.Tensor) -> bool:
        """True for a weight that a forward was seen to write to, in any step."""
        places = self._places.values()
        return any(e.tensor is weight and e.changes for e in places)

    def is_written(self, weight: torch.Tensor) -> bool:
        """True for a weight that this step's forward has written to."""
        return any(place.tensor is weight for place in self._places_written())

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights that this step's forward has written to, with what was in them.

        Incurs a CPU-GPU sync for each that is copied, where it has not ended.
        """
        return [pair for place in self._places_written() if (pair := place.pair())]

    def _places_written(self) -> list[KeptPlace]:
        self.tensors.settle()
        weights = (place for place in self._places.values() if place.is_trained)
        return [place for place in weights if place.is_written]

    def written_state(self) -> Iterator[WrittenState]:
        """Yields the floats that last from step to step, and that it has written.

        Those are buffers, frozen parameters, and the attributes that the code of their
        module may read before it writes to them. Only what held other values when the
        step began is known.
        """
        written = list[tuple[nn.Module, Mapping[str, Any], str, torch.Tensor | None]]()
        for place in self.buffers if self.is_taken else ():
            now, module = place.current(), place.module()
            is_known = now is not None and place.copy is not None
            is_written = now is not place.tensor or place.is_written
            if module is not None and is_known and is_written:
                table = vars(module)[place.table]
                written.append((module, table, place.name, place.copy))
        for kept in self.attributes:
            module = kept.module()
            carried = None if module is None else writes_of(module).carried
            if module is not None and carried:
                own = vars(module)
                written += ((module, own, *each) for each in kept.written(carried))
        prefixes = self._prefixes() if written else {}
        for module, table, key, before in written:
            yield WrittenState(prefixes[module] + key, table, key, before)

    def _prefixes(self) -> dict[nn.Module | None, str]:
        """The beginnings of the names of tensors, by their modules."""
        model, prefix = self._watch.model, self._watch.prefix
        named = () if model is None else walk(model)
        return {each: prefix + f"{fqn}." * bool(fqn) for fqn, each in named}


_Found = tuple[
    nn.Module, str, str, bool
]  # a module, its table, the name there, trained


def _places(model: nn.Module) -> tuple[list[_Found], list[dict[str, Any]]]:
    """Finds the places of a model's tensors, those of weights last, each weight once.

    Returns:
        The places, and the tables of all modules. Weights are left out that are shards
        of others: their wrapper gathers and frees them.
    """
    places: list[_Found] = []
    tables: list[dict[str, Any]] = []
    weights: dict[int, _Found] = {}
    for module in modules_in(model):
        if isinstance(module, torch.jit.ScriptModule):
            continue  # TorchScript owns its tensors
        own = module.__dict__
        tables += [own[table] for table in _TABLES]
        places += [(module, BUFFERS, name, False) for name in own[BUFFERS]]
        for name, parameter in own[PARAMETERS].items():
            if parameter is None:
                continue
            if not parameter.requires_grad:
                places.append((module, PARAMETERS, name, False))
            elif not (is_lazy(parameter) or parameter.is_inference()):
                weights.setdefault(id(parameter), (module, PARAMETERS, name, True))
    found = [] if is_sharded(model) else list(weights.values())
    return [*places, *found], tables


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(map(dict.values, tables)))


def _copy(places: list[KeptPlace]) -> None:
    """Copies the contents of places, into the copies that there are."""
    tensors = [place.tensor for place in places if place.tensor is not None]
    copies = copy_tensors(tensors, [place.copy for place in places])
    for place, copy in zip(places, copies, strict=True):
        place.copy = copy
