"""The models as they were when a step began, for a skip, a raise or a replay.

A skip and a raise put back here what the step's forwards have changed; a replay, which
starts from the same beginning, does so by `snapshot.rewind()`.

What is kept, so that a clean step stays cheap:

1. Buffers, and frozen parameters, which may hold statistics: small ones are copied when
   a step's first forward begins; larger ones once, and again when they have changed.
2. Trained weights: their versions are noted. One that a forward writes to, as an
   embedding with `max_norm` does, is copied from the next step on.
3. Small weights, and the plain attributes of modules: in steps 1, 2, 4, 8, ..., and in
   each step once a forward was seen to change them, or if the code of their module's
   class may.

`model_restore_point.py` does this for one model. Small modules that a kept function
calls besides the models, such as a loss with a running mean, are kept as these are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...base.modules import buffers_of, modules_in, parameters_of
from ...torch_internals.running import graph_task_id, is_recorded
from .model_restore_point import ModelRestorePoint, Watched, WrittenState
from .tensors import num_bytes
from .writing_modules import writes_of

# Of a module around the models, with its weights; chosen. A larger one, such as a
# teacher, is not copied: a replay begins with it as the step has left it.
_MAX_AROUND = 2**20


class _Lock:
    """A lock that a copied guard has anew."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return _Lock, ()


class _Around:
    """A module that a kept function calls besides the models; it has no hooks.

    Args:
        name: Its name in the function.
        module: The module. It is held weakly.
    """

    is_attached, is_in_step, has_submodule_calls = True, True, False

    def __init__(self, name: str, module: nn.Module) -> None:
        self.prefix, self._module = f"{name}.", weakref.ref(module)

    @property
    def model(self) -> nn.Module | None:
        """The module, or None if it is gone."""
        return self._module()


class RestorePoint:
    """Models as they were when the first forward of a step began.

    Writes of the user between steps belong to it.

    Args:
        watches: The watched models.
        has_optimizers: Their steps end a step; else its judgement does.

    Attributes:
        starts: The beginning of each model, and of each module around them.
        around: What the last function has written to modules around the models.
    """

    def __init__(self, watches: Sequence[Watched], has_optimizers: bool) -> None:
        self._has_optimizers = has_optimizers
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by functions
        self.starts = [ModelRestorePoint(watch) for watch in watches]
        self._of_watch = dict(zip(map(id, watches), self.starts, strict=True))
        self.around: list[WrittenState] = []
        self._num_kept = 0
        self._lock = _Lock()  # copying and comparing let other threads run

    # The course of a step.

    def begin(self) -> None:
        """Makes the current state the beginning, until a forward replaces it."""
        for start in self.starts:
            start.take(is_firm=False)

    def prepare(self) -> None:
        """Keeps models whose forwards no hook announces."""
        for start in self.starts:
            start.prepare()

    def before_forward(self, watch: Watched) -> None:
        """Keeps a model, in a step's first forward.

        What a forward without autograd keeps lasts until a forward with it begins.
        """
        start = self._of_watch[id(watch)]
        if not is_recorded():
            with self._lock:
                if not start.is_firm:
                    start.take(is_firm=watch.is_in_step)
                if graph_task_id() < 0:  # else a backward computes it again
                    start.begin_forward()

    def before_run(self, around: Mapping[str, nn.Module]) -> None:
        """Keeps all models, where a function begins that calls them.

        Args:
            around: Further modules that it may call, by their names in it.
        """
        for name, module in around.items():
            if module not in self._seen and self._is_kept(module):
                self.starts = [each for each in self.starts if each.model is not None]
                watch = _Around(name, module)
                self.starts.append(ModelRestorePoint(watch, has_attributes=True))
            self._seen.add(module)
        for start in self.starts:
            if not (start.is_firm or is_recorded()):
                start.take(is_firm=True)

    def after_run(self) -> None:
        """Notes what the function has written to modules around the models."""
        self.around = []
        for start in self.starts:
            if start not in self._of_watch.values():
                start.end_forward()
                self.around += start.written_state()

    def _is_kept(self, module: nn.Module) -> bool:
        """True for a small module, apart from models, that its forward may change."""
        own, buffers = set(modules_in(module)), buffers_of(module)
        may_change = bool(buffers) or any(writes_of(each).attributes for each in own)
        size = sum(map(num_bytes, (*parameters_of(module), *buffers)))
        if not may_change or size > _MAX_AROUND:
            return False  # of most, before the models are walked through
        models = [each.model for each in self.starts if each.model is not None]
        return all(own.isdisjoint(modules_in(model)) for model in models)

    def after_forward(self, watch: Watched) -> None:
        """Notes what the forward has written to."""
        with self._lock:
            self._of_watch[id(watch)].end_forward()

    def hold(self, watch: Watched) -> None:
        """Keeps the beginning before a non-finite forward without autograd."""
        start = self._of_watch[id(watch)]
        start.is_firm = start.is_taken

    def end_judgement(self) -> None:
        """Ends a judged step, unless an optimizer's step has yet to end it.

        A closure may be judged several times in one.
        """
        for start in self.starts:
            start.tensors.end_judgement()
        if not self._has_optimizers:
            self.end()

    def end(self) -> None:
        """Lets the next forward begin a step: this one was not made."""
        for start in self.starts:
            start.is_firm = False

    def keep(self) -> None:
        """Ends a step that was made.

        Incurs a CPU-GPU sync after steps 1, 2, 4, 8, ... where large buffers have not
        been seen to change.
        """
        self._num_kept += 1
        compares = self._num_kept & (self._num_kept - 1) == 0
        for start in self.starts:
            start.keep(compares)

    # A skipped step, or one that raises.

    def restore(self) -> list[str]:
        """Restores buffers, and the weights that a forward has written to.

        Incurs a CPU-GPU sync for each. The next forward begins a step. During
        backward, recomputed checkpoints may change the buffers again.

        Returns:
            A sentence for each tensor that stays changed.
        """
        with self._lock:
            texts = [text for start in self.starts for text in start.restore()]
            for start in self.starts:
                start.release(is_over=graph_task_id() < 0)
        return texts

    def restore_where(self, flag: torch.Tensor) -> None:
        """Restores them where a flag on the device is not 0. Does not incur a sync."""
        for start in self.starts:
            start.restore_where(flag)

    # What is known of the beginning.

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that are copied, and what was in them."""
        return [pair for start in self.starts for pair in start.pairs()]

    def held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor when the step began; None if that is not known."""
        return next((value for own, value in self.pairs() if own is tensor), None)

    def written_in_step(self, tensor: torch.Tensor) -> bool:
        """True for a trained weight that this step's forward has written to.

        Incurs a CPU-GPU sync if the weight is copied, and the forward has not ended.
        """
        return any(start.is_written(tensor) for start in self.starts)

    def were_weights_rewritten(self) -> bool:
        """True if other code than a forward was seen to write to a trained weight.

        That is since the first forward of the step began. Incurs a CPU-GPU sync for
        each weight that is copied.
        """
        return any(start.tensors.were_rewritten() for start in self.starts)
