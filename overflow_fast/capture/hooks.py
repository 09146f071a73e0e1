"""Hooks of a recorder on a model, and the search for the outermost call."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _C
from ..core.modules import modules_in, tensors_of
from ..core.selection import Named
from ..text import drop_own_frames
from ..torch_internals.compiler import has_compiled
from ..torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    share_key,
)
from ..torch_internals.running import (
    running_modules,
    with_torch_function,
    without_function_modes,
    without_operator_modes,
    without_saving_hooks,
)
from . import compiled as traced
from . import traced_walk
from .coverage import Coverage, warn_of_scripted


def modules_once(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yields each module once with its index in `named_modules()`."""
    yield from enumerate(modules_in(model))


def modules_as_applied(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yields a module as often as `model.apply` visits it: once for each parent."""
    index = {id(module): i for i, module in enumerate(modules_in(model))}
    visited: list[nn.Module] = []
    model.apply(visited.append)
    for module in visited:
        yield index[id(module)], module


class Attachment:
    """The hooks of one owner on one model. Holds modules weakly.

    Around each call of the root, `before_root(module, args, kwargs)` is called on the
    owner, `after_root(module, args, kwargs, output)` when it has returned, and
    `root_ended(module, args, output)`, also when the forward raised.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def attach(
        self,
        owner: Any,
        model: nn.Module,
        walk: Callable[[nn.Module], Iterator[tuple[int, nn.Module]]] = modules_once,
    ) -> None:
        """Registers a frame hook on the modules that `walk` yields, and the root's.

        Code that was compiled before is compiled again at its next call.
        """
        traced.register()
        for index, module in walk(model):
            if module is model or isinstance(module, torch.jit.ScriptModule):
                continue  # TorchScript has no forward hooks
            hook = functools.partial(_C.run_hook, _C.FrameHook(owner, index))
            self.handles.append(module.register_forward_hook(hook, with_kwargs=True))
            share_key(module, self.handles[-1], self.handles[0].id)
        before, after, ended = (
            functools.partial(_C.run_paused, StepBoundaryHook(owner, name))
            for name in ("before_root", "after_root", "root_ended")
        )
        self.handles += [
            model.register_forward_hook(after, with_kwargs=True),
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(ended, always_call=True),
        ]
        move_hook_to_front(forward_pre_hooks(model), self.handles[-2].id)
        traced.recompile()

    def add_before(self, owner: Any, name: str, module: nn.Module) -> None:
        """Calls a method of the owner before each call of one more module."""
        hook = functools.partial(_C.run_paused, StepBoundaryHook(owner, name))
        self.handles.append(module.register_forward_pre_hook(hook))
        move_hook_to_front(forward_pre_hooks(module), self.handles[-1].id)

    def remove(self) -> None:
        """Removes every hook; calling it again does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class StepBoundaryHook:
    """Calls a method of its owner, found by name.

    In a copy of the model this is the method of the owner of the copy's hooks; a copied
    bound method would be the original owner's.

    Args:
        owner: The object that has the method.
        name: The method's.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        if self.owner.is_paused:
            return
        try:
            getattr(self.owner, self.name)(*arguments)
        except FloatingPointError as error:  # a NonFiniteError
            drop_own_frames(error)
            raise error


def root_hooks(model: nn.Module) -> Iterator[StepBoundaryHook]:
    """Yields the hooks of all owners that have this model as their root."""
    for hooks in (forward_pre_hooks(model), forward_hooks(model)):
        for hook in list(hooks.values()):
            if _is_partial_of(hook, _C.run_paused):
                yield hook.args[0]


def move_hook_to_front(hooks: dict[int, Any], key: int) -> None:
    """Makes a hook the first of its dict.

    `prepend=True` moves its key in the OrderedDict and not in the dict below, and
    dynamo of torch 2.11 takes one hook for another then.
    """
    for other in list(hooks):
        if other != key:
            hooks[other] = hooks.pop(other)


def _is_partial_of(hook: object, function: object) -> TypeGuard[functools.partial[Any]]:
    return isinstance(hook, functools.partial) and hook.func is function


class CopiedHooks:
    """The owner of the hooks in a copy of a model whose original alone is watched.

    The hooks are removed when the copy is first called.
    """

    is_paused = False
    plan = 0
    device = None

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.recorder = _C.Recorder(0)
        self.root_hook = _C.FrameHook(self, 0)
        self.compiled_boundary = self

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHooks, (), {"handles": self.handles}

    def before_root(self, *_: object) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()

    after_root = root_ended = on_frame = before_entry = before_root
    before = returned = ended = evaluation_ended = raised = before_root

    def on_submodule_call(self, *_: object) -> int:
        """Removes the hooks; returns no flags for the `FrameHook`."""
        self.before_root()
        return 0


def outermost_call(is_watched: Callable[[nn.Module], bool]) -> tuple[int, nn.Module]:
    """Finds the outermost running call of a watched module, from the Python stack.

    Args:
        is_watched: Returns whether a module counts.

    Returns:
        An identity of that call, equal as long as it runs, and its module.

    Raises:
        LookupError: If no such call is running.
    """
    calls = [call for call in running_modules() or () if is_watched(call[1])]
    if not calls:
        raise LookupError("no watched module is running")
    return calls[-1]


def hook_of(owner: object, module: nn.Module) -> _C.FrameHook | None:
    """Returns the frame hook of an owner on a module, or None."""
    for hook in forward_hooks(module).values():
        if _is_partial_of(hook, _C.run_hook) and hook.args[0].owner is owner:
            found: _C.FrameHook = hook.args[0]
            return found
    return None


def index_of(owner: object, module: nn.Module) -> int:
    """Returns the index of a module in its owner's hook, or -1."""
    hook = hook_of(owner, module)
    return -1 if hook is None else hook.module


def is_running(module: nn.Module) -> bool:
    """True if another call of a module runs; True if that is not known."""
    calls = running_modules()
    return calls is None or sum(each is module for _, each in calls) > 1


# The owner of the hooks on a model: its recorder, and its copies' state.


class HookOwner:
    """The recorder of a model and the hooks that fill it, off until `_attach()`.

    Args:
        model: The model to watch. It is held weakly; its hooks hold this object.
        max_frames: How many frames the recorder keeps; None for all.
        options: The recorder's, by name.

    Attributes:
        recorder: The recorder, which has the frames' entries. The extension reads it.
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
        self.recorder = _C.Recorder(self._max_frames, **self._options)
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
            self.recorder.record(kind, names, tensors)

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
        self.recorder.is_paused = True
        self.recorder.set_gradients_wanted(False)
        self.recorder.in_step = False

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
        self.recorder.total_calls = total_calls
        self.begin_at(self.batch_number)

    def begin_at(self, batch: int) -> None:
        """Gives the next batch a number, from which the others count."""
        self.batch_number = batch
        self.recorder.begin_batch(batch)

    @property
    def model(self) -> nn.Module | None:
        """The watched model, or None if it is gone."""
        return self._model()

    @property
    def is_attached(self) -> bool:
        """True if the model has this object's hooks."""
        return bool(self._attachment.handles)

    @property
    def device(self) -> torch.device | None:
        """The device of the watched model's first tensor; None without one."""
        model = self.model
        tensors = () if model is None else tensors_of(model)
        return next((tensor.device for tensor in tensors), None)

    def update_plan(self) -> None:
        """Recomputes the flags of `traced_walk` that compiled hooks read."""
        options = self._options
        flags = {
            traced_walk.PARAMETERS: self.recorder.lists_parameters,
            traced_walk.CALLS: options.get("lists_calls", True),
            traced_walk.GRADIENTS: options.get("watches_gradients"),
            traced_walk.STRICT: options.get("strict_compat"),
            **self._root_plan(),
        }
        self.plan = sum(flag for flag, is_set in flags.items() if is_set)

    @property
    def total_calls(self) -> int:
        """The number of frames that were recorded."""
        return self.recorder.total_calls

    @property
    def coverage(self) -> Coverage:
        """The counts of what was scanned so far, and what was not."""
        return Coverage.of(self.recorder)

    # Defined by subclasses.

    def _walk(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules to hook, each with its index in `named_modules()`."""
        return (modules_as_applied if self._is_strict else modules_once)(model)

    def _root_plan(self) -> dict[int, bool]:
        """Returns the flags for the root's frame in compiled code."""
        return {traced_walk.ROOT: True}


# Keeps replays out of sight of whatever watches the program.


@contextlib.contextmanager
def unseen(models: Iterable[nn.Module]) -> Iterator[None]:
    """Pauses guards and takes modes off, but the one that sets the default device.

    Warnings are not shown either: the step has given them already.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_paused(models))
        stack.enter_context(with_torch_function())
        stack.enter_context(without_function_modes())
        stack.enter_context(without_operator_modes())
        stack.enter_context(without_saving_hooks())
        yield


@contextlib.contextmanager
def _paused(models: Iterable[nn.Module]) -> Iterator[None]:
    """Pauses all guards and detectors that watch one of these models."""
    hooks = [h for model in models for m in modules_in(model) for h in root_hooks(m)]
    owners = {id(hook.owner): hook.owner for hook in hooks}.values()
    recorders = [owner.recorder for owner in owners]
    were_paused = [recorder.is_paused for recorder in recorders]
    for recorder in recorders:
        recorder.is_paused = True
    try:
        yield
    finally:
        for recorder, was_paused in zip(recorders, were_paused, strict=True):
            recorder.is_paused = was_paused
