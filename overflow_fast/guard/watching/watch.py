"""The watch over one model of a guard: its hooks, rules and unjudged frames.

A step, as the hooks of a model see it:

1. `attach()` puts hooks on the selected modules and the root, and `detach()` removes
   them. In between they record a frame for each call; see `detector/steps.py`.
2. `before_root()` begins an outermost forward: what the training loop gives the model
   is noted, and `on_forward` lets the guard keep what a skip puts back.
3. `_record_root()` scans what the root returns, and finds the loss in it.
4. `root_ended()` ends the forward; `leave()` ends one that an exception has left.
5. `_end_step()`: a forward of training waits for its optimizer's step. One without
   autograd is handed to `on_evaluated`, which judges it at once or, within
   `guard.request()`, adds it to its request.
6. At the optimizer's step the guard takes the bad frames out of `frames`, and
   `end_judgement()` forgets what belongs to the step.

The state:

- `modules`, `tensors`: the names of modules, parameters and buffers.
- `inputs`: what the last forwards were given; `frames`: what nobody has judged yet.
- `_roots`: the forward that runs in each thread.
- `_rules`: the rules of `allow`, which are put on the recorder again when modules are
  renamed.
- `_missed`: the changes of weights that nobody has judged; `num_given_up`: where in the
  step the loop gave up its earlier forwards.
- `has_loss_of_step`, `has_seen_loss`, `returns_loss`: whether a loss was seen in this
  step, ever, and among what the model returns.
- `_has_looked_for_shards`: it is known whether the weights are sharded, which decides
  where they are scanned. FSDP may shard a model after the guard was made, so this is
  looked up at the first forward after `attach()`.

Hooks run in the program's threads, and several forwards may run at once.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.losses import model_loss_in
from ...base.modules import buffers_of, first_parameter_of, is_sharded
from ...detector.compiled_boundary import EVALUATED, LOSS, ROOT
from ...detector.hooks import CopiedHooks
from ...detector.selection import Selection, Wanted
from ...detector.steps import StepHooks
from ...torch_internals.compiler import has_compiled
from ...torch_internals.running import is_in_function, is_jit_tracing
from .entries import entries_of
from .forward_inputs import ForwardInputs
from .missed_steps import MissedSteps
from .module_index import ModuleIndex
from .named_tensors import NamedTensors
from .unjudged_frames import MAX_IN_FLIGHT, UnjudgedFrames

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
        on_part: Called with a part of the model that the program calls without
            autograd, and its arguments: from its second call on, where it has a root.
        on_unjudged: Called where steps pass that nobody judges: see `MissedSteps`; with
            the first bad frame where many forwards were bad since the last judgement.
            None where that was said.
        on_left: Called with the exception that has left an outermost forward; returns
            True if it is another guard's report of it.
        has_unseen_outputs: The watch is of a replay, and whether the model's outputs
            were finite in the step is not known.
        needs_buffers: The forwards of a model with buffers have to be announced.
        num_given_up: The number of frames when a later forward of the step began, of
            whose gradients none was left then, or is left by now; -1 for none.
        is_served: The model is not trained: its requests list the weights that were
            written to since one before.
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
        self.on_part: Callable[[nn.Module, Any, Any], None] = lambda *_: None
        self.on_left: Callable[[ModelWatch, Exception], bool] | None = None
        self.on_unjudged: Callable[[ModelWatch, _C.Frame | None], None] | None = None
        self._missed = MissedSteps()
        self._has_run = False  # with autograd, in any step
        self.needs_buffers = self.judges_requests = self.is_served = False
        self.num_given_up = -1
        # The number of frames when a later forward of the step began, and a gradient
        # that it has met.
        self._met: tuple[int, weakref.ref[torch.Tensor]] | None = None
        self.is_abandoned: Callable[[], bool] = lambda: False
        self.is_of_request: Callable[[], bool] = lambda: False
        self.suppresses: Callable[[Exception], bool] = lambda error: False
        self._rules: MakeReader | None = None
        self._has_looked_for_shards = False
        self._entries: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._part: nn.Module | None = None
        self._on_evaluated = on_evaluated
        super().__init__(model, max_frames, options, MAX_IN_FLIGHT)
        self.frames = UnjudgedFrames(self.recorder, self._process_arrived)
        self.modules.apart = self._attachment.apart

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHooks, ()

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
            if type(model).forward is nn.Module.forward:  # its parts are called
                for each in entries_of(model):
                    self._add_entry(each)
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
            self.frames.receive_arrived()
            self.frames.take_of({root.batch})

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

    def own_batch(self) -> int:
        """The batch of the forward that this thread runs, or one that no hook begins.

        No other thread's frames are of it.
        """
        root = self._roots.get(get_ident())
        return self.pass_batch() if root is None else root.batch

    @property
    def called(self) -> nn.Module | None:
        """The module whose outermost call this thread runs, or else ran last."""
        return self._part if get_ident() not in self._roots else self.model

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
        self._begin_forward()
        # The model may have been sharded since its hooks were put on. Its parameters
        # are scanned once for each optimizer's step then, and not when gathered.
        if self._has_looked_for_shards or not self.wanted.weights:
            return
        self._has_looked_for_shards = True
        model = self.model
        if model is not None:
            self.recorder.lists_parameters = not is_sharded(model)
            self.update_plan()

    def _begin_forward(self) -> None:
        """Notes whether it is of a step; one that is none is a judgement of its own."""
        is_in_step = self.is_in_step
        self.recorder.is_evaluation = self.is_served and not is_in_step
        if not (is_in_step or self.is_served):
            self.recorder.forget_parameters()
        if is_in_step and self.on_unjudged is not None and self._missed.begin_forward():
            self.on_unjudged(self, None)

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
        self.note_given_up()
        gradient, num = next(self._gradients(model), None), _C.Recorder.num_frames()
        if gradient is None:
            self.num_given_up = num
        else:
            self._met = num, weakref.ref(gradient)

    def note_given_up(self) -> None:
        """Notes whether a gradient that a forward has met is gone, or another tensor.

        What backward adds up stays the same tensor.
        """
        model = self.model
        if self._met is None or model is None:
            return
        num, reference = self._met
        gradient = reference()
        if gradient is None or all(e is not gradient for e in self._gradients(model)):
            self.num_given_up, self._met = num, None

    def _gradients(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Yields the gradients that there are; of the first one, no list is made.

        What `functional_call` has put in a weight's place has none: torch warns there.
        """
        first = first_parameter_of(model)
        if first is not None and first.is_leaf and first.grad is not None:
            yield first.grad
        for each in self.tensors.parameters(model, True)[1]:
            if each.is_leaf and each.grad is not None:
                yield each.grad

    @_isolated
    def before_entry(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Begins a step in the call of a submodule, where the root is not running."""
        if self.recorder.in_step:
            return
        self._announce_forward()
        if not torch.is_grad_enabled():
            outer = self._submodule_calls.around(-1)
            if outer.identity is not None and self.module_at(outer.module) is module:
                self.on_part(module, args, kwargs)

    def _begin_submodule_call(self, index: int) -> None:
        super()._begin_submodule_call(index)
        self._begin_forward()
        self.has_submodule_calls = True
        self._part = self.module_at(index)
        if self._part is not None:
            self._add_entry(self._part)

    def _add_entry(self, module: nn.Module) -> None:
        is_new = self.on_forward is not None and module not in self._entries
        if is_new and not has_compiled():
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
            EVALUATED: self.judges_requests and not self.wanted.activations,
        }

    def note_loss(self, has_loss: bool) -> None:
        """Notes whether the root has returned a loss."""
        self.returns_loss |= has_loss
        self.has_seen_loss |= has_loss
        self.has_loss_of_step |= has_loss

    def _send(self) -> None:
        is_in_step = self.is_in_step
        self.frames.note_forward(is_in_step)
        self._has_run |= is_in_step
        if not is_in_step or self.on_unjudged is None:
            return
        first = self.frames.first_of_left_out()
        if first is not None:
            self.on_unjudged(self, first)
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
            self.recorder.is_evaluation = False
            if not self.is_served:
                self.recorder.forget_parameters()

    def _scan_shards(self, batch: int) -> None:
        """Scans the weights where the modules' calls do not list them."""
        if not self.recorder.lists_parameters:
            self._scan_weights(batch)

    def _scan_weights(self, batch: int) -> None:
        model = self.model
        if model is not None and self.wanted.weights:
            self.record(_C.FrameKind.WEIGHTS, self.tensors.parameters(model))
            self.frames.note_evaluated_weights(batch)

    def take_weights(self, batch: int) -> list[_C.Frame]:
        """Takes the bad weights that a bad forward of a request has not listed.

        They were written to past their version counters. All are listed again in the
        next one. Incurs the sync.
        """
        if not (self.is_served and self.wanted.weights):
            return []  # each forward has listed all, or none
        self.recorder.forget_parameters_but_of(batch)
        self.recorder.is_evaluation = True
        self._scan_weights(batch)
        self.recorder.is_evaluation = False
        self.recorder.forget_parameters()
        self.frames.send()
        self.frames.receive(is_lagged=False)
        return self.frames.take_of({batch})

    def end_judgement(self, is_lagged: bool) -> None:
        """Forgets what belongs to the step that was judged, or will be, lagged."""
        self.has_loss_of_step = False
        self._note_uncalled()
        self._missed.restart()
        self.num_given_up, self._met = -1, None
        self.inputs.end_step(self.frames.end_step(self.batch_number, is_lagged))

    def _note_uncalled(self) -> None:
        """Notes where a model is trained that never runs itself: its parts do.

        A tripwire has no hooks on these that would announce a forward.
        """
        model = self.model
        if self.wanted.activations or self._has_run or model is None:
            return
        self.has_submodule_calls |= any(True for _ in self._gradients(model))

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
