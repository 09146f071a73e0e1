"""The owner of the hooks on a model: its recorder, and its copies' state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import _C
from ..core.selection import Named
from ..torch_internals.compiler import has_compiled
from . import traced_walk
from .coverage import Coverage, warn_of_scripted
from .hooks import Attachment, modules_as_applied, modules_once


class HookOwner:
    """The recorder of a model and the hooks that fill it, off until `_attach()`.

    Args:
        model: The model to watch. It is held weakly; its hooks hold this object.
        max_frames: How many frames the recorder keeps; None for all.
        options: The recorder's, by name.
    """

    def __init__(
        self, model: nn.Module, max_frames: int | None, options: dict[str, bool]
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "model must be a module whose forward is Python, got a scripted one: "
                "TorchScript has no hooks; watch the model before it is scripted"
            )
        self.batch_number = 0
        self._max_frames = max_frames
        self._options = options
        self._start()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        warn_of_scripted(model)

    def _start(self) -> None:
        """Creates the state that is never copied or pickled."""
        self._recorder = _C.Recorder(self._max_frames, **self._options)
        self.root_hook = _C.FrameHook(self, 0)
        self._attachment = Attachment()
        self._is_strict = self._options.get("strict_compat", False)

    def _attach(self, model: nn.Module) -> None:
        self._attachment.attach(self, model, self._walk)
        self.update_plan()

    def record(self, kind: _C.FrameKind, named: Named) -> None:
        """Scans named tensors as one frame. Does not incur a CPU-GPU sync."""
        names, tensors = named
        if tensors:
            self._recorder.record(kind, names, tensors)

    def pause(self) -> None:
        """Removes the hooks until they are attached again.

        Where there is compiled code they stay and do nothing: to put them back would
        compile all of it again.
        """
        if not has_compiled():
            self._remove_hooks()
        self._pause_recorder()

    def detach(self) -> None:
        """Removes the hooks; those in autograd's graphs do nothing any more."""
        self._remove_hooks()
        self._pause_recorder()

    def _remove_hooks(self) -> None:
        self._attachment.remove()

    def _pause_recorder(self) -> None:
        self._recorder.is_paused = True
        self._recorder.set_gradients_wanted(False)
        self._recorder.in_step = False

    # A watched model is copied and pickled together with its hooks.

    def __getstate__(self) -> dict[str, Any]:
        return {
            "batch_number": self.batch_number,
            "_max_frames": self._max_frames,
            "_options": self._options,
            "_total_calls": self.total_calls,
            "_handles": self._attachment.handles,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        total_calls, handles = state.pop("_total_calls"), state.pop("_handles")
        self.__dict__.update(state)
        self._model = lambda: None  # set when the copy's root is called
        self._start()
        self._attachment.handles = handles
        self.update_plan()
        self._recorder.total_calls = total_calls
        self.begin_at(self.batch_number)

    def begin_at(self, batch: int) -> None:
        """Gives the next batch a number, from which the others count."""
        self.batch_number = batch
        self._recorder.begin_batch(batch)

    @property
    def model(self) -> nn.Module | None:
        """The watched model, or None if it is gone."""
        return self._model()

    @property
    def recorder(self) -> _C.Recorder:
        """The recorder that has the frames' entries."""
        return self._recorder

    @property
    def is_attached(self) -> bool:
        """True if the model has this object's hooks."""
        return bool(self._attachment.handles)

    @property
    def device(self) -> torch.device | None:
        """The device of the watched model's first tensor; None without one."""
        model = self.model
        tensors = () if model is None else (*model.parameters(), *model.buffers())
        return next((tensor.device for tensor in tensors), None)

    def update_plan(self) -> None:
        """Recomputes the flags of `traced_walk` that compiled hooks read."""
        options = self._options
        flags = {
            traced_walk.PARAMETERS: self._recorder.lists_parameters,
            traced_walk.CALLS: options.get("lists_calls", True),
            traced_walk.GRADIENTS: options.get("watches_gradients"),
            traced_walk.STRICT: options.get("strict_compat"),
            **self._root_plan(),
        }
        self.plan = sum(flag for flag, is_set in flags.items() if is_set)

    @property
    def total_calls(self) -> int:
        """The number of frames that were recorded."""
        return self._recorder.total_calls

    @property
    def coverage(self) -> Coverage:
        """The counts of what was scanned so far, and what was not."""
        return Coverage.of(self._recorder)

    # Defined by subclasses.

    def _walk(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules to hook, each with its index in `named_modules()`."""
        return (modules_as_applied if self._is_strict else modules_once)(model)

    def _root_plan(self) -> dict[int, bool]:
        """Returns the flags for the root's frame in compiled code."""
        return {traced_walk.ROOT: True}
