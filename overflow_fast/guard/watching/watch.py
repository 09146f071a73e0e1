"""The watch over one model of a guard: its hooks, rules and unjudged frames."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from torch import nn

from ... import _C
from ...detector.compiled_boundary import LOSS, ROOT
from ...detector.hooks import CopiedHooks
from ...detector.selection import Named, Selection, Wanted, full_name
from ...detector.steps import StepHooks
from ...scanner.modules import (
    buffers_of,
    first_parameter_of,
    is_scripted,
    is_sharded,
    modules_in,
    named_modules,
    own_tensors,
    tensor_name,
)
from ...scanner.tensors import model_loss_in
from ...torch_internals.compiler import has_compiled
from ...torch_internals.module_internals import BUFFERS, PARAMETERS, own_parameters
from ...torch_internals.running import is_in_function, is_jit_tracing
from .inputs import ForwardInputs
from .missed_steps import MissedSteps

# The modules of a watched model, by indices that do not change.


class ModuleIndex:
    """Gives each module an index, which no other module gets as long as this lives.

    Frames, rules and headroom know modules by their index. Modules may be inserted,
    replaced and renamed; `update()` looks them up again.

    Args:
        model: The model; its index is 0. Modules are held weakly.
        prefix: The beginning of its modules' names in reports.
        selection: The modules to watch.
        wanted: The tensors to scan.

    Attributes:
        names: The qualified name of each module in the model, or the last one it had,
            by its index.
        order: The indices of those that are in the model, in the model's order.
        apart: Returns the indices of those that have no hooks for now.
    """

    def __init__(
        self, model: nn.Module, prefix: str, selection: Selection, wanted: Wanted
    ) -> None:
        self._prefix = prefix
        self._selection = selection
        self._wanted = wanted
        self.names: list[str] = []
        self.order: list[int] = []
        self._full_names: list[str] = []
        self._selected: list[bool] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._places: dict[int, int] = {}  # in the order, by the index
        self._named: dict[str, list[int]] = {}
        self.apart: Callable[[], set[int]] = set
        self.update(model)

    def update(self, model: nn.Module) -> bool:
        """Looks the modules up again; returns whether a name or their order changed."""
        before = list(self.names), self.order
        known = {id(module): index for index, module in self._alive()}
        self.order = []
        for name, module in named_modules(model):
            index = known.get(id(module))
            if index is None:
                index = len(self.names)
                self.names.append(name)
                self._modules.append(weakref.ref(module))
            self.names[index] = name
            self.order.append(index)
        if before == (self.names, self.order):
            return False
        self._full_names = [full_name(self._prefix, name) for name in self.names]
        self._selected = [self._selection.takes(name) for name in self.names]
        self._places = {index: place for place, index in enumerate(self.order)}
        self._named = {}
        for index in self.order:
            self._named.setdefault(self.names[index], []).append(index)
        return True

    def _alive(self) -> Iterator[tuple[int, nn.Module]]:
        for index, ref in enumerate(self._modules):
            module = ref()
            if module is not None:
                yield index, module

    def present(self) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules that are in the model, in its order, with their index."""
        for index in self.order:
            module = self._modules[index]()
            if module is not None:
                yield index, module

    def place(self, index: int) -> int:
        """The place of a module that is in the model in its order."""
        return self._places[index]

    def ancestors(self, index: int) -> list[int]:
        """Lists the modules with a forward around one, from the nearest to the root."""
        place, around = self._places.get(index, 0), list[int]()
        name: str | None = self.names[index] if index < len(self.names) else None
        while name is not None:
            # A wrapper has the name of the module in it, which comes behind it.
            found = reversed(self._named.get(name, []))
            around += [each for each in found if self._places[each] < place]
            name = name.rpartition(".")[0] if name else None
        return [each for each in around if self.has_forward(each)]

    def unwatched_in(self, index: int) -> list[str]:
        """Lists the qualified names of the modules within one that are not watched."""
        name = self.names[index] if index < len(self.names) else ""
        inside, apart = f"{name}." if name else "", self.apart()
        return [
            self.name_at(other)
            for other, each in enumerate(self.names)
            if other != index and each.startswith(inside) and each != name
            if not self._selected[other] or other in apart
            if self.has_forward(other)
        ]

    def has_forward(self, index: int) -> bool:
        """True for a module that can be called, unlike a ModuleList; or one gone."""
        module = self.module_at(index)
        return module is None or type(module).forward is not nn.Module.forward

    def is_selected(self, index: int) -> bool:
        """True if the module of an index is to be watched."""
        return self._selected[index]

    def needs_hook(self, index: int, module: nn.Module) -> bool:
        """True if the calls of a module are to be recorded."""
        # A weight is scanned where it is used, because it is in the cache there.
        is_of_use = self._wanted.activations or (
            self._wanted.weights and bool(own_parameters(module))
        )
        return is_of_use and self.is_selected(index)

    def to_hook(self) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules whose calls are to be recorded, with their index."""
        return (each for each in self.present() if self.needs_hook(*each))

    def count(self, model: nn.Module | None) -> tuple[int, int]:
        """Returns how many modules the model has, and how many of them are watched."""
        if model is None:
            return len(self.order), 0
        indices = {id(module): index for index, module in self.present()}
        known = [indices.get(id(module)) for module in modules_in(model)]
        watched = {i for i in known if i is not None and self.is_selected(i)}
        return len(known), len(watched - self.apart())

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, or None if it is gone."""
        return self._modules[index]() if index < len(self._modules) else None

    def name_at(self, index: int) -> str:
        """The qualified name of a module, with the prefix."""
        if index < len(self._full_names):
            return self._full_names[index]
        return full_name(self._prefix, f"module {index}")

    def all_names(self) -> list[str]:
        """The qualified names of all modules, by their index."""
        return self._full_names.copy()


# The parameters and buffers of a watched model, by names that stay the same.


class NamedTensors:
    """The parameters and buffers of a model's modules, as they are now.

    The modules are looked up once, and again when one is gone or after `refresh()`; the
    names, when a module holds another tensor. Both take longer than all that is done
    with them.
    """

    def __init__(self, prefix: str, selection: Selection) -> None:
        self._prefix = prefix
        self._selection = selection
        self._names: dict[tuple[str, str], str] = {}
        self._modules: list[tuple[str, bool, weakref.ref[nn.Module]]] = []
        self._listings: dict[tuple[str, bool], _Listing] = {}

    def refresh(self) -> None:
        """Looks the modules up again when they are next needed."""
        self._modules = []
        self._listings.clear()

    def parameters(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each parameter of the selected, or all, modules by its first name."""
        return self._list(model, PARAMETERS, all_modules)

    def buffers(self, model: nn.Module, all_modules: bool = False) -> Named:
        """Lists each buffer of the selected, or all, modules by its first name."""
        return self._list(model, BUFFERS, all_modules)

    def _list(self, model: nn.Module, kind: str, all_modules: bool) -> Named:
        listing = self._listings.get((kind, all_modules))
        tensors = None if listing is None else listing.tensors()
        if listing is None or tensors is None:
            found = self._walk(model)
            taken = [(fqn, each) for fqn, takes, each in found if takes or all_modules]
            listing = _Listing(taken, kind, self._name)
            self._listings[kind, all_modules] = listing
            tensors = listing.tensors() or []
        return listing.names.copy(), tensors

    def _walk(self, model: nn.Module) -> list[tuple[str, bool, nn.Module]]:
        walked = [(fqn, takes, ref()) for fqn, takes, ref in self._modules]
        if not walked or any(module is None for _, _, module in walked):
            self.refresh()
            self._modules = [
                (fqn, self._selection.takes(fqn), weakref.ref(module))
                for fqn, module in named_modules(model)
            ]
            walked = [(fqn, takes, ref()) for fqn, takes, ref in self._modules]
        return [each for each in walked if each[2] is not None]  # type: ignore[misc]

    def _name(self, fqn: str, key: str) -> str:
        # The same string each time: the recorder knows labels by their address.
        name = self._names.get((fqn, key))
        if name is None:
            name = self._prefix + tensor_name(fqn, key)
            self._names[fqn, key] = name
        return name


class _Listing:
    """Each tensor in the tables of some modules once, while they hold the same ones.

    Args:
        modules: The modules with their names. They are held weakly.
        kind: The attribute that holds the table: their parameters or buffers.
        name: Names a tensor by its module's name and its key.

    Attributes:
        names: The names of the tensors, by their first places.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        kind: str,
        name: Callable[[str, str], str],
    ) -> None:
        self._kind = kind
        self._modules = [weakref.ref(module) for _, module in modules]
        self._is_scripted = any(is_scripted(module) for _, module in modules)
        places = {
            (fqn, key): tensor
            for fqn, module in modules
            for key, tensor in own_tensors(module, kind).items()
        }
        tensors = list(places.values())
        self._keys = [key for _, key in places]
        self._ids = list(map(id, tensors))
        last = {id(each): i for i, each in reversed(list(enumerate(tensors)))}
        self._taken = [
            each is not None and last[id(each)] == i for i, each in enumerate(tensors)
        ]
        first = itertools.compress(places, self._taken)
        self.names = list(itertools.starmap(name, first))

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors; None if the tables hold other ones. It runs in each step."""
        kind = self._kind
        try:
            if self._is_scripted:
                tables = [own_tensors(each(), kind) for each in self._modules]
            else:
                tables = [each().__dict__[kind] for each in self._modules]
        except AttributeError:  # a module is gone
            return None
        tensors = list(itertools.chain.from_iterable(map(dict.values, tables)))
        if list(map(id, tensors)) != self._ids:
            return None
        if list(itertools.chain.from_iterable(tables)) != self._keys:
            return None
        return list(itertools.compress(tensors, self._taken))


# The non-finite frames of a watched model, collected until a step is judged.


_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.RECORDED, _C.FrameKind.BACKWARD)
MAX_IN_FLIGHT = 64  # copies of stats on their way before the host waits for one
_MAX_FORWARDS_UNSENT = 64
# More than anybody accumulates gradients over.
_MANY_UNJUDGED = 1000
_log = logging.getLogger("overflow_fast")


class UnjudgedFrames:
    """The non-finite frames of a recorder in step mode.

    Args:
        recorder: The recorder.
        process_arrived: Processes the stats that have arrived, but for those of so many
            sends.

    Attributes:
        before: The frames in front of the first bad one.
        captured_tensors: What the recorder has kept of the first bad call.
    """

    def __init__(
        self, recorder: _C.Recorder, process_arrived: Callable[[int], None]
    ) -> None:
        self._recorder = recorder
        self._process_arrived = process_arrived
        self.before: list[_C.Frame] = []
        self.captured_tensors: object = None
        self._bad: list[_C.Frame] = []
        self._evaluations: set[int] = set()
        self._ending: set[int] = set()  # those that are being judged
        self._evaluated_weights: dict[int, int] = {}  # batches by the frame's order
        self._lock = Lock()
        self._sends_judged = 0
        self._forwards = 0
        self._unjudged = 0
        self._is_told = False

    @property
    def is_in_step(self) -> bool:
        """True if a forward of training has ended since the last judgement."""
        return self._unjudged > 0

    def is_first_told(self) -> bool:
        """True once: when it is first to be said that nobody judges what runs."""
        was_told, self._is_told = self._is_told, True
        return not was_told

    def note_forward(self, is_training: bool) -> None:
        """Counts a forward, and sends its stats unless its optimizer's step will."""
        self._forwards += 1
        self._unjudged += is_training
        if self._unjudged == _MANY_UNJUDGED and self.is_first_told():
            _log.warning(
                "%d forwards ran, and none was judged.\nGive the guard the optimizer "
                "that steps, or call `check()` after each step.",
                _MANY_UNJUDGED,
            )
        if not is_training or self._forwards >= _MAX_FORWARDS_UNSENT:
            self.send()

    @contextlib.contextmanager
    def evaluated(self, batch: int) -> Iterator[None]:
        """Notes that a batch ran without autograd, which is judged within."""
        with self._lock:
            self._ending.add(batch)
            if len(self._evaluations) > 4 * MAX_IN_FLIGHT:  # nothing else runs
                self._forget_evaluations(batch)
            self._evaluations.add(batch)
        try:
            yield
        finally:
            self._ending.discard(batch)

    def note_evaluated_weights(self, batch: int) -> None:
        """Notes that the last frame lists the weights of such a batch."""
        self._evaluated_weights[_C.Recorder.num_frames()] = batch

    def send(self, with_captured: bool = False) -> None:
        """Starts the copy of the stats on devices; does not wait.

        Args:
            with_captured: Include those that replays of CUDA graphs have written, which
                waits for the device.
        """
        self._forwards = 0
        self._recorder.send(with_captured)

    def receive(self, is_lagged: bool) -> None:
        """Processes the stats of all that ran; incurs the sync, unless it is lagged.

        Lagged, the host waits only for what was sent before the previous call.
        """
        sends = self._recorder.num_sends
        self._process_arrived(sends - self._sends_judged if is_lagged else 0)
        self._sends_judged = sends

    def receive_arrived(self) -> None:
        """Processes the stats that have arrived, but for those of the last send."""
        self._process_arrived(1)

    def take_bad(self, last: int) -> list[_C.Frame]:
        """Takes the bad frames of training, up to the one whose order is `last`."""
        return self._take(lambda f: f.order <= last and not self._is_evaluated(f))

    def take_evaluated(self, batch: int | None = None) -> list[_C.Frame]:
        """Takes the bad frames of forwards that ran without autograd, lagged.

        Args:
            batch: The one that is judged; those that other threads judge meanwhile are
                left to them. None for all.
        """
        self.receive_arrived()

        def is_wanted(frame: _C.Frame) -> bool:
            is_others = frame.batch != batch and frame.batch in self._ending
            return self._is_evaluated(frame) and not (is_others and batch is not None)

        return self._take(is_wanted)

    def take_of(self, batches: Container[object]) -> list[_C.Frame]:
        """Takes the bad frames of forwards of some batches, which are judged alone."""
        return self._take(
            lambda frame: (
                (frame.batch in batches and frame.kind in _OF_CALLS)
                or self._evaluated_weights.get(frame.order) in batches
            )
        )

    def batch_of(self, frame: _C.Frame) -> int:
        """The batch of a frame of a forward that ran without autograd."""
        return self._evaluated_weights.get(frame.order, frame.batch)

    def end_request(self) -> None:
        """Forgets what belongs to a request that was judged."""
        self._unjudged = 0
        self._recorder.forget_calls(True)

    def _is_evaluated(self, frame: _C.Frame) -> bool:
        is_forward = frame.kind in (_C.FrameKind.FORWARD, _C.FrameKind.RECORDED)
        is_in_one = is_forward and frame.batch in self._evaluations
        return is_in_one or frame.order in self._evaluated_weights

    def _take(self, is_wanted: Callable[[_C.Frame], bool]) -> list[_C.Frame]:
        with self._lock:  # threads may end forwards at once
            results = self._recorder.take_step_results()
            if results.bad and not self._bad:
                self.before = results.before
                self.captured_tensors = results.captured_tensors
            self._bad += results.bad
            are_wanted = list(map(is_wanted, self._bad))
            taken = list(itertools.compress(self._bad, are_wanted))
            if taken:
                left = (not is_wanted for is_wanted in are_wanted)
                self._bad = list(itertools.compress(self._bad, left))
        return taken

    def end_step(self, batch_number: int, is_lagged: bool) -> bool:
        """Forgets what belongs to a step that was judged, or will be, lagged.

        Args:
            batch_number: The number of the model's next batch.
            is_lagged: True if the stats of the step may still be on their way.

        Returns:
            True if no stat and no bad frame of the step is left.
        """
        self._unjudged = 0
        self._recorder.end_step()
        self._recorder.restart_row()
        self._recorder.clear_history()
        self._recorder.forget_calls(not is_lagged)
        is_over = not self._bad and not is_lagged
        if is_over:
            self.before, self.captured_tensors = [], None
        if self._evaluations or self._evaluated_weights:
            self._forget_evaluations(batch_number)
        return is_over

    def _forget_evaluations(self, batch: int) -> None:
        """Forgets those whose stats have arrived by the time of a batch."""
        oldest = batch - 2 * MAX_IN_FLIGHT
        self._evaluations = {each for each in self._evaluations if each >= oldest}
        self._evaluated_weights = {
            order: each
            for order, each in self._evaluated_weights.items()
            if each >= oldest
        }


MakeReader = Callable[[Sequence[str]], Callable[[_C.Place], int]]


def _isolated(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that raises no error of the guard's own; it returns 0 then.

    The extension has hidden what it does from the user's modes.
    """

    @functools.wraps(method)
    def isolated(self: ModelWatch, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            if not self.suppresses(error):
                raise
        return 0

    return isolated


class ModelWatch(StepHooks):
    """The hooks of a guard on one model, off until `attach()`.

    Args:
        model: The model. It is held weakly; its hooks hold this object.
        prefix: The beginning of its modules' names in reports.
        wanted: The tensors to scan.
        selection: The modules to watch.
        max_frames: How many frames before a bad one a report shows.
        options: The recorder's, by name.
        on_evaluated: Called after an outermost forward that ran without autograd, with
            the number of its batch.

    Attributes:
        inputs, frames: Those of the forwards that are not judged yet.
        on_forward: Called before each forward of a training step.
        on_forward_end: Called after each outermost forward.
        on_missed: Called once steps pass that nobody judges; see `MissedSteps`.
        on_left: Called with the exception that has left an outermost forward; returns
            True if it is another guard's report of it.
        has_unseen_outputs: The watch is of a replay, and whether the model's outputs
            were finite in the step is not known.
        needs_buffers: The forwards of a model with buffers have to be announced.
        num_given_up: The number of frames when a later forward of the step began and no
            gradient of the earlier ones was left; -1 for none.
        judges_requests: All forwards without autograd are judged as requests.
        is_abandoned: Returns True if nobody has the guard any more, and it has ended.
        is_of_request: Returns True in a forward of a request, also with autograd.
        suppresses: Notes an error of a hook; returns True if it is the guard's own.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        wanted: Wanted,
        selection: Selection,
        max_frames: int,
        options: dict[str, bool],
        on_evaluated: Callable[[ModelWatch, int], None],
    ) -> None:
        self.prefix = prefix
        self.wanted = wanted
        self.modules = ModuleIndex(model, prefix, selection, wanted)
        self.tensors = NamedTensors(prefix, selection)
        self.inputs = ForwardInputs(
            is_listed=wanted.activations, is_held=options.get("captures_tensors", False)
        )
        self.has_seen_loss = self.returns_loss = False
        self.looks_for_loss = True
        self.has_unseen_outputs = False
        self.has_loss_of_step = False
        self.has_submodule_calls = False
        self.on_forward: Callable[[ModelWatch], None] | None = None
        self.on_forward_end: Callable[[ModelWatch], None] | None = None
        self.on_left: Callable[[ModelWatch, Exception], bool] | None = None
        self.on_missed: Callable[[ModelWatch], None] = lambda watch: None
        self._missed = MissedSteps()
        self.needs_buffers = self.judges_requests = False
        self.num_given_up = -1
        self.is_abandoned: Callable[[], bool] = lambda: False
        self.is_of_request: Callable[[], bool] = lambda: False
        self.suppresses: Callable[[Exception], bool] = lambda error: False
        self._rules: MakeReader | None = None
        self._has_looked_for_shards = False
        self._entries: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._on_evaluated = on_evaluated
        super().__init__(model, max_frames, options, MAX_IN_FLIGHT)
        self.frames = UnjudgedFrames(self.recorder, self._process_arrived)
        self.modules.apart = self._attachment.apart

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHooks, (), {"handles": self._attachment.handles}

    after_root = _isolated(StepHooks.after_root)
    close_root = _isolated(StepHooks.close_root)
    on_submodule_call = _isolated(StepHooks.on_submodule_call)
    on_submodule_call_end = _isolated(StepHooks.on_submodule_call_end)
    on_recomputed_end = _isolated(StepHooks.on_recomputed_end)

    # Hooks on and off.

    def attach(self) -> None:
        """Puts the hooks on the selected modules and the root, if any are needed."""
        model, wanted = self._model(), self.wanted
        if model is None:
            return
        is_of_use = wanted.activations or wanted.weights or wanted.loss
        if not is_of_use and self.needs_buffers:
            is_of_use = any(True for _ in buffers_of(model))
        if not is_of_use:
            return
        if not self._attachment.handles:
            self.recorder.is_paused = True  # until all of them are on
            if self.modules.update(model):
                self.tensors.refresh()
                self.follow_rules(self._rules)
            self._attach(model)
        if self.recorder.is_paused:
            self._resume_recorder(model)
        self.recorder.set_gradients_wanted(True)

    def detach(self) -> None:
        """Removes the hooks; those in autograd's graphs do nothing any more."""
        super().detach()
        self._has_looked_for_shards = False

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        self._entries.clear()

    def _walk(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        return self.modules.to_hook()

    def follow_rules(self, rules: MakeReader | None) -> None:
        """Makes the recorder follow rules, also after modules are renamed.

        Args:
            rules: Takes the names by the modules' index and returns the argument of
                `Recorder.set_rules()`; None for no rules.
        """
        self._rules = rules
        names = self.modules.all_names()
        self.recorder.set_rules(None if rules is None else rules(names))

    # A step, from its beginning to its end.

    @_isolated
    def before_root(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Starts a step, and notes what the training loop gives the model."""
        if self.is_abandoned():
            return
        super().before_root(module, args, kwargs)
        root = self._roots.get(get_ident())
        if root is not None and root.depth == 1:
            self.inputs.begin(module, args, kwargs)

    @_isolated
    def root_ended(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the root's call; one that an exception leaves may end the step."""
        error, root = sys.exc_info()[1], self._roots.get(get_ident())
        if root is None or root.is_done or root.depth != 1 or self._is_dry_run:
            error = None
        if args is None or not isinstance(error, Exception):
            if root is not None:
                root.output = output
            super().root_ended(module, args, output)
            return
        assert root is not None
        root.is_left = True
        self.inputs.leave(root.batch)
        super().root_ended(module, args, output)
        is_in_step = self.is_in_step
        is_judged = self.on_left is not None and self.on_left(self, error)
        if is_judged and not is_in_step:
            self.frames.take_evaluated(root.batch)

    def leave(self) -> None:
        """Ends a forward that an exception has left past the hooks: compiled code."""
        model, root = self.model, self._roots.get(get_ident())
        if root is not None and model is not None:
            root.depth, root.is_left = 1, True
            self.inputs.leave(root.batch)
            super().root_ended(model, None, None)

    @property
    def batch_at_hand(self) -> int:
        """The batch of the outermost forward of this thread, or else the last one."""
        root = self._roots.get(get_ident())
        return self.recorder.last_batch if root is None else root.batch

    @contextlib.contextmanager
    def own_batch(self) -> Iterator[int]:
        """Yields the batch of the forward that this thread runs, or one of its own.

        No other thread's frames are of it.
        """
        root = self._roots.get(get_ident())
        if root is not None:
            yield root.batch
            return
        root = self._begin_root()
        self.recorder.in_step = True
        try:
            yield root.batch
        finally:
            self.recorder.in_step = False
            self._begin_batch()
            self._end_root(root)

    @property
    def evaluated(self) -> object:
        """The output of the outermost forward of this thread."""
        root = self._roots.get(get_ident())
        return None if root is None else root.output

    @property
    def is_in_step(self) -> bool:
        """True in a forward of a training step, rather than one to be judged alone.

        That of a reentrant checkpoint runs without autograd; backward runs it again.
        That of a request may run with autograd.
        """
        if self.is_of_request():
            return False
        if torch.is_grad_enabled():
            return True
        model = self.model
        is_training = model is not None and model.training
        return is_training and not self.judges_requests and is_in_function()

    def _before_step(self) -> None:
        self._announce_forward()
        if not self.is_in_step:
            self.recorder.forget_parameters()  # it is a judgement of its own
        elif self._missed.begin_forward() and self.frames.is_first_told():
            self.on_missed(self)
        # The model may have been sharded since its hooks were put on. Its parameters
        # are scanned once for each optimizer's step then, and not when gathered.
        if self._has_looked_for_shards or not self.wanted.weights:
            return
        self._has_looked_for_shards = True
        model = self.model
        if model is not None:
            self.recorder.lists_parameters = not is_sharded(model)
            self.update_plan()

    def _announce_forward(self) -> None:
        model = self.model
        if self.frames.is_in_step and model is not None and torch.is_grad_enabled():
            self._look_for_gradients(model)
        is_training = torch.is_grad_enabled() or (model is not None and model.training)
        if self.on_forward is not None and is_training:
            self.on_forward(self)

    def _look_for_gradients(self, model: nn.Module) -> None:
        """Notes where none is left as a later forward of a step begins.

        If a backward ran before, the loop has given up what it had computed.
        """
        first = first_parameter_of(model)
        if first is not None and first.grad is not None:
            return  # of most steps of several forwards
        if all(each.grad is None for each in self.tensors.parameters(model, True)[1]):
            self.num_given_up = _C.Recorder.num_frames()

    @_isolated
    def before_entry(self, module: nn.Module, args: object) -> None:
        """Begins a step in the call of a submodule, where the root is not running."""
        if not self.recorder.in_step:
            self._announce_forward()

    def _begin_submodule_call(self, index: int) -> None:
        super()._begin_submodule_call(index)
        if not self.is_in_step:
            self.recorder.forget_parameters()
        elif self._missed.begin_forward() and self.frames.is_first_told():
            self.on_missed(self)
        self.has_submodule_calls = True
        module = self.module_at(index)
        is_new = self.on_forward is not None and module not in self._entries
        if is_new and module is not None and not has_compiled():
            self._entries.add(module)
            self._attachment.add_before(self, "before_entry", module)

    def _record_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        # A trace, which is checked without autograd, is to be the same then.
        looks = self.looks_for_loss or torch.is_grad_enabled() or is_jit_tracing()
        loss = model_loss_in(output) if looks else None
        if self.modules.needs_hook(0, module):
            # First: a hook of the program's on the gradient, behind ours, may raise.
            super()._record_root(module, args, kwargs, output)
        self.inputs.end(self._running_batch, args, kwargs, output, loss)
        self.note_loss(loss is not None)
        if loss is not None and self.wanted.loss and not self.wanted.activations:
            self.record(_C.FrameKind.RECORDED, (["loss"], [loss]))

    def _root_plan(self) -> dict[int, bool]:
        model = self.model
        return {
            ROOT: model is not None and self.modules.needs_hook(0, model),
            LOSS: self.wanted.loss,
        }

    def note_loss(self, has_loss: bool) -> None:
        """Notes whether the root has returned a loss."""
        self.returns_loss |= has_loss
        self.has_seen_loss |= has_loss
        self.has_loss_of_step |= has_loss

    def _send(self) -> None:
        is_in_step = self.is_in_step
        self.frames.note_forward(is_in_step)
        if is_in_step:
            self._missed.end_forward(self.model)

    def _end_step(self, is_recomputed: bool = False) -> None:
        super()._end_step(is_recomputed)
        if self.on_forward_end is not None and not is_recomputed:
            self.on_forward_end(self)
        if self.is_paused:
            return  # by another thread, meanwhile
        if not (is_recomputed or self.is_in_step):
            root = self._roots.get(get_ident())
            batch = self.batch_at_hand
            with self.frames.evaluated(batch):
                self._scan_shards(batch)
                if root is None or not root.is_left:  # that is judged with its step
                    self._on_evaluated(self, batch)
            self.recorder.forget_parameters()

    def _scan_shards(self, batch: int) -> None:
        """Scans the weights where the modules' calls do not list them."""
        model = self.model
        is_listed = not self.wanted.weights or self.recorder.lists_parameters
        if model is None or is_listed:
            return
        self.record(_C.FrameKind.WEIGHTS, self.tensors.parameters(model))
        self.frames.note_evaluated_weights(batch)

    def end_judgement(self, is_lagged: bool) -> None:
        """Forgets what belongs to the step that was judged, or will be, lagged."""
        self.has_loss_of_step = False
        self._missed.restart()
        self.num_given_up = -1
        self.inputs.end_step(self.frames.end_step(self.batch_number, is_lagged))

    def name_at(self, index: int) -> str:
        """The qualified name of a module by its index."""
        return self.modules.name_at(index)

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, or None if it is gone."""
        return self.modules.module_at(index)


def models_of(watches: Iterable[ModelWatch]) -> dict[str, nn.Module]:
    """The watched models that still exist, by the prefix of their modules' names."""
    # A model may have a length, and be false.
    return {w.prefix: model for w in watches if (model := w.model) is not None}
