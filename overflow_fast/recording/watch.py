"""One watched model of a guard: its frames, gathered until a step is judged."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from .. import _C
from ..core.names import is_sharded
from ..core.selection import Named, NamedTensors, Selection
from ..core.tensors import loss_in
from ..torch_internals.compiler import has_compiled
from ..torch_internals.module_internals import own_parameters
from . import traced_walk
from .batch import Given, weakly
from .hooks import CopiedHooks
from .loop_batches import LoopBatches
from .modules import ModuleIndex
from .steps import StepHooks

# So many copies of stats may be on their way before the host waits for one.
_MAX_IN_FLIGHT = 64
# After so many forwards without a judgement their stats are sent.
_MAX_FORWARDS_UNSENT = 64
# Of so many forwards before a judgement the inputs are held.
_MAX_BATCHES = 8
# More than anybody accumulates gradients over.
_MANY_UNJUDGED = 1000
_log = logging.getLogger("overflow_fast")


# See `ModelWatch.follow_rules()`.
MakeReader = Callable[[Sequence[str]], Callable[[_C.Place], int]]


class ForwardCapture(Protocol):
    """Keeps the outermost forwards of a step, for a replay."""

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """Keeps what a forward is given."""

    def end(self, output: Any) -> None:
        """Keeps what it returned."""

    def clear(self) -> None:
        """Forgets the step."""


class Wanted(NamedTuple):
    """What a guard looks at; see `OverflowGuard`."""

    activations: bool = False
    grad_outputs: bool = False
    gradients: bool = False
    weights: bool = False
    buffers: bool = False
    loss: bool = False
    optimizer_state: bool = False


def _shielded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook out of which no error of the guard's own comes; it returns 0 then."""

    @functools.wraps(method)
    def shielded(self: ModelWatch, *args: Any) -> Any:
        with self.shield():
            return method(self, *args)
        return 0

    return shielded


class ModelWatch(StepHooks):
    """The hooks of a guard on one model, off until `attach()`.

    Args:
        model: The model. It is held weakly; its hooks hold this object.
        prefix: What the names of its modules begin with in reports.
        wanted: What to look at.
        selection: Which modules.
        max_frames: How many frames before a bad one a report shows.
        options: The recorder's, by name.
        on_evaluated: Called after an outermost forward that ran without autograd.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        wanted: Wanted,
        selection: Selection,
        max_frames: int,
        options: dict[str, bool],
        on_evaluated: Callable[[ModelWatch], None],
    ) -> None:
        self.prefix = prefix
        self.wanted = wanted
        self.selection = selection
        self.modules = ModuleIndex(model, prefix)
        self._rules: MakeReader | None = None
        self.tensors = NamedTensors(prefix, selection)
        self.batches: dict[int, tuple[object, object]] = {}
        self.given: dict[int, Given] = {}
        self._given: Given = (None, None)
        self.loop_batches = LoopBatches()
        self.before: list[_C.Frame] = []
        self.held: object = None
        self.has_seen_loss = False
        self.capture: ForwardCapture | None = None
        self.has_submodule_calls = False
        self.on_forward: Callable[[ModelWatch], None] | None = None
        self.on_forward_end: Callable[[ModelWatch], None] | None = None
        self.shield: Callable[[], AbstractContextManager[None]] = nullcontext
        self._bad: list[_C.Frame] = []
        self._evaluations: set[int] = set()
        self._evaluated_weights: dict[int, int] = {}  # batches by the frame's order
        self._sends_judged = 0
        self._forwards = 0
        self._unjudged = 0
        self._has_looked_for_shards = False
        self._entries: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._on_evaluated = on_evaluated
        super().__init__(model, max_frames, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHooks, (), {"handles": self._attachment.handles}

    def _start(self) -> None:
        super()._start()
        self._max_in_flight = _MAX_IN_FLIGHT

    after_root = _shielded(StepHooks.after_root)
    root_ended = _shielded(StepHooks.root_ended)
    close_root = _shielded(StepHooks.close_root)
    on_submodule_call = _shielded(StepHooks.on_submodule_call)
    on_submodule_call_end = _shielded(StepHooks.on_submodule_call_end)
    on_recomputed_end = _shielded(StepHooks.on_recomputed_end)

    # Hooks on and off.

    @property
    def is_attached(self) -> bool:
        """Whether the model has this object's hooks."""
        return bool(self._attachment.handles)

    def attach(self) -> None:
        """Puts the hooks on the selected modules and the root, if any are needed."""
        model = self.model
        wanted = self.wanted
        needs_hooks = wanted.activations or wanted.weights or wanted.loss
        needs_hooks |= self.on_forward is not None and _has_buffers(model)
        if model is None or not needs_hooks:
            return
        self._recorder.is_paused = False
        self._recorder.set_gradients_wanted(True)
        if not self.is_attached:
            self._look_up(model)
            self._attach(model)

    def _look_up(self, model: nn.Module) -> None:
        """Takes in modules that were inserted, replaced or renamed."""
        if self.modules.update(model):
            self.tensors.refresh()
            self.follow_rules(self._rules)

    @_shielded
    def before_root(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Starts a step, and notes what the training loop hands to the model."""
        super().before_root(module, args, kwargs)
        if self._depth == 1 and self.capture is not None:
            self.capture.begin(module, args, kwargs or {})
        if self._depth == 1 and self.wanted.activations:
            self._given = weakly(args), weakly(kwargs)

    def _before_step(self) -> None:
        self._tell_of_forward()
        if not torch.is_grad_enabled():
            self._recorder.forget_parameters()  # it is a judgement of its own
        # The model may have been sharded since its hooks were put on. Its parameters
        # are looked at once for each optimizer's step then, and not when gathered.
        if self._has_looked_for_shards or not self.wanted.weights:
            return
        self._has_looked_for_shards = True
        model = self.model
        if model is not None:
            self._recorder.lists_parameters = not is_sharded(model)
            self.update_plan()

    def _tell_of_forward(self) -> None:
        model = self.model
        is_training = torch.is_grad_enabled() or (model is not None and model.training)
        if self.on_forward is not None and is_training:
            self.on_forward(self)

    @_shielded
    def before_entry(self, module: nn.Module, args: object) -> None:
        """Begins a step in the call of a submodule, where the root is not running."""
        if not self._recorder.in_step:
            self._tell_of_forward()

    def _begin_submodule_call(self, call: object, index: int) -> None:
        super()._begin_submodule_call(call, index)
        if not torch.is_grad_enabled():
            self._recorder.forget_parameters()
        self.has_submodule_calls = True
        module = self.module_at(index)
        is_new = self.on_forward is not None and module not in self._entries
        if is_new and module is not None and not has_compiled():
            self._entries.add(module)
            self._attachment.add_before(self, "before_entry", module)

    def rest(self) -> None:
        """Takes the hooks off until the next `attach()`.

        Where there is compiled code they stay and do nothing: all of it would be
        compiled again when they are put back.
        """
        if not has_compiled():
            self._remove_hooks()
        self._silence()

    def detach(self) -> None:
        """Takes the hooks off; those in autograd's graphs fall silent."""
        self._remove_hooks()
        self._has_looked_for_shards = False
        self._silence()

    def _remove_hooks(self) -> None:
        self._attachment.remove()
        self._entries.clear()

    def _silence(self) -> None:
        self._recorder.is_paused = True
        self._recorder.set_gradients_wanted(False)
        self._recorder.in_step = False
        self._depth = 0

    def _walk(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        for index, module in self.modules.present():
            if self._needs_hook(index, module):
                yield index, module

    def _needs_hook(self, index: int, module: nn.Module) -> bool:
        # A weight is scanned where it is used, because it is in the cache there.
        is_of_use = self.wanted.activations or (
            self.wanted.weights and bool(own_parameters(module))
        )
        return is_of_use and self.selection.takes(self.names[index])

    def follow_rules(self, rules: MakeReader | None) -> None:
        """Has the recorder follow rules, also when modules get other names.

        Args:
            rules: Takes the names by the modules' index and returns what
                `Recorder.set_rules()` takes; None for no rules.
        """
        self._rules = rules
        self._recorder.set_rules(None if rules is None else rules(self.all_names()))

    # What is recorded.

    @property
    def recorder(self) -> _C.Recorder:
        """The recorder that has the frames' entries."""
        return self._recorder

    def record(self, kind: _C.FrameKind, named: Named) -> None:
        """Scans named tensors as one frame. Does not incur a CPU-GPU sync."""
        names, tensors = named
        if tensors:
            self._recorder.record(kind, names, tensors)

    def _record_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        self.given[self.batch_number] = self._given
        if len(self.given) > _MAX_BATCHES:
            del self.given[next(iter(self.given))]
        if self._options["captures_tensors"]:
            self.batches[self.batch_number] = (args, kwargs)
            if len(self.batches) > _MAX_BATCHES:
                del self.batches[next(iter(self.batches))]
        if self.capture is not None:
            self.capture.end(output)
        loss = loss_in(output)
        self.has_seen_loss |= loss is not None
        if self._needs_hook(0, module):
            super()._record_root(module, args, kwargs, output)
        if loss is not None and self.wanted.loss and not self.wanted.activations:
            self.record(_C.FrameKind.RECORDED, (["loss"], [loss]))

    def _root_plan(self) -> dict[int, bool]:
        model = self.model
        return {
            traced_walk.ROOT: model is not None and self._needs_hook(0, model),
            traced_walk.LOSS: self.wanted.loss,
        }

    def note_loss(self, has_loss: bool) -> None:
        """Takes in whether compiled code has seen the root return a loss."""
        self.has_seen_loss |= has_loss

    def _send(self) -> None:
        # What is to be judged with its optimizer's step is sent with it, at once.
        self._forwards += 1
        self._unjudged += torch.is_grad_enabled()
        if self._unjudged == _MANY_UNJUDGED:
            _log.warning(
                "%d forwards, and none was judged: the guard needs the optimizer that "
                "steps, or `check()` after each step.",
                _MANY_UNJUDGED,
            )
        if not torch.is_grad_enabled() or self._forwards >= _MAX_FORWARDS_UNSENT:
            self.send()

    def _end_step(self, is_recomputed: bool = False) -> None:
        super()._end_step(is_recomputed)
        if self.on_forward_end is not None and not is_recomputed:
            self.on_forward_end(self)
        if not torch.is_grad_enabled() and not is_recomputed:
            self._evaluations.add(self._recorder.last_batch)
            self._scan_shards()
            self._on_evaluated(self)
            self._recorder.forget_parameters()

    def _scan_shards(self) -> None:
        """Scans the weights where the modules' calls do not list them."""
        model = self.model
        if not self.wanted.weights or self._recorder.lists_parameters:
            return
        if model is not None:
            self.record(_C.FrameKind.WEIGHTS, self.tensors.parameters(model))
            order = _C.Recorder.num_frames()
            self._evaluated_weights[order] = self._recorder.last_batch

    def send(self, with_captured: bool = False) -> None:
        """Starts the copy of the stats on devices; does not wait.

        Args:
            with_captured: Also of what replays of CUDA graphs have written, which waits
                for the device.
        """
        self._forwards = 0
        self._recorder.send(with_captured)

    # What is asked when a step is judged.

    def receive(self, is_lagged: bool) -> None:
        """Takes in the stats of what ran; incurs the sync, unless it is lagged.

        Lagged, the host waits only for what was sent before the call before.
        """
        sends = self._recorder.num_sends
        self._process_arrived(sends - self._sends_judged if is_lagged else 0)
        self._sends_judged = sends

    def take_bad(self, last: int) -> list[_C.Frame]:
        """Takes the bad frames of training, up to the one whose order is `last`."""
        return self._take(lambda f: f.order <= last and not self._is_evaluated(f))

    def take_evaluated(self) -> list[_C.Frame]:
        """Takes the bad frames of forwards that ran without autograd, lagged."""
        self._process_arrived(1)
        return self._take(self._is_evaluated)

    def _is_evaluated(self, frame: _C.Frame) -> bool:
        is_forward = frame.kind in (_C.FrameKind.FORWARD, _C.FrameKind.RECORDED)
        is_in_one = is_forward and frame.batch in self._evaluations
        return is_in_one or frame.order in self._evaluated_weights

    def _take(self, is_wanted: Callable[[_C.Frame], bool]) -> list[_C.Frame]:
        results = self._recorder.take_step_results()
        if results.bad and not self._bad:
            self.before, self.held = results.before, results.captured_tensors
        self._bad += results.bad
        taken = [frame for frame in self._bad if is_wanted(frame)]
        if taken:
            self._bad = [frame for frame in self._bad if not is_wanted(frame)]
        return taken

    def end_judgement(self, is_lagged: bool) -> None:
        """Forgets what belongs to the step that was judged, or will be, lagged."""
        self._unjudged = 0
        if self.capture is not None:
            self.capture.clear()
        self._recorder.end_step()
        self._recorder.clear_history()
        self._recorder.forget_calls(not is_lagged)
        if not self._bad and not is_lagged:
            self.before, self.held = [], None
            self.batches.clear()
            self.given.clear()
        oldest = self.batch_number - 2 * _MAX_IN_FLIGHT
        self._evaluations = {batch for batch in self._evaluations if batch >= oldest}
        self._evaluated_weights = {
            order: batch
            for order, batch in self._evaluated_weights.items()
            if batch >= oldest
        }

    # What reports ask.

    @property
    def names(self) -> list[str]:
        """The names of the modules in their model, by their index."""
        return self.modules.names

    def name_at(self, index: int) -> str:
        """The qualified name of a module by its index."""
        return self.modules.name_at(index)

    def count_modules(self) -> tuple[int, int]:
        """How many modules the model has now, and how many of them are looked at."""
        model = self.model
        if model is None:
            return len(self.modules.order), 0
        indices = {id(module): index for index, module in self.modules.present()}
        known = [indices.get(id(module)) for module in model.modules()]
        watched = [
            index
            for index in known
            if index is not None and self.selection.takes(self.names[index])
        ]
        return len(known), len(watched)

    def all_names(self) -> list[str]:
        """The qualified names of all modules, by their index."""
        return [self.name_at(index) for index in range(len(self.names))]

    def module_at(self, index: int) -> nn.Module | None:
        """The module of an index, if it is still there."""
        return self.modules.module_at(index)

    # Bad frames are gathered; no hook looks at one.

    def on_frame(self, frame: _C.Frame) -> None:
        """Is never called."""

    def _choose_watch(self, batch: int) -> None:
        pass


def _has_buffers(model: nn.Module | None) -> bool:
    return model is not None and any(True for _ in model.buffers())
