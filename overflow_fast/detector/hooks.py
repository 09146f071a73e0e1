"""The hooks of an owner on a model: put on, found again, copied, removed."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _C
from ..base.modules import modules_in
from ..base.source_files import drop_own_frames
from ..torch_internals.compiler import has_compiled
from ..torch_internals.module_internals import (
    asks_for_hooks,
    drop_hooks,
    forward_hooks,
    forward_pre_hooks,
    share_key,
)
from ..torch_internals.running import running_modules
from ..torch_internals.scripting import has_no_hooks, leave_hooks_out
from . import dynamo


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


class _Apart:
    """The frame hooks in a module whose forward asks whether modules have hooks.

    They are on where that makes no difference: such a module takes its fast path where
    nothing is trained. There it is seen from outside.

    Args:
        module: The module.

    Attributes:
        inner: That module and those in it, each with its index in the model.
        is_on: They have their hooks.
        handles: Those of the hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.inner: list[tuple[int, weakref.ref[nn.Module]]] = []
        self.is_on = False
        self.handles: list[RemovableHandle] = []

    def may_be_on(self) -> bool:
        """True if the module is trained."""
        module = self._module()
        if module is None or module.training:
            return module is not None
        is_recorded = torch.is_grad_enabled()
        return is_recorded and any(p.requires_grad for p in module.parameters())

    @property
    def is_training(self) -> bool:
        """True if the module is in training mode."""
        module = self._module()
        return module is not None and module.training


class Attachment:
    """The hooks of one owner on one model. Holds modules weakly.

    Around each call of the root, `before_root(module, args, kwargs)` is called on the
    owner, `after_root(module, args, kwargs, output)` when it has returned, and
    `root_ended(module, args, output)`, also when the forward raised.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self._apart: list[_Apart] = []

    def attach(
        self,
        owner: Any,
        model: nn.Module,
        walk: Callable[[nn.Module], Iterator[tuple[int, nn.Module]]] = modules_once,
        hooks_all: bool = False,
    ) -> None:
        """Registers a frame hook on the modules that `walk` yields, and the root's.

        Code that was compiled before is compiled again at its next call.

        Args:
            owner: The owner.
            model: The model.
            walk: Yields the modules with their indices.
            hooks_all: Also on modules that compute in another way then.
        """
        dynamo.register(self)
        leave_hooks_out(self)
        apart = {} if hooks_all else _apart_in(model)
        for index, module in walk(model):
            if module is model or isinstance(module, torch.jit.ScriptModule):
                continue  # TorchScript has no forward hooks
            if module in apart:
                apart[module].inner.append((index, weakref.ref(module)))
            else:
                self._hook(owner, index, module)
        self._apart = list(dict.fromkeys(apart.values()))
        for each in self._apart:
            if each.is_training:
                self._switch_on(each, owner)
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
        dynamo.recompile()

    def _hook(self, owner: Any, index: int, module: nn.Module) -> RemovableHandle:
        hook = functools.partial(_C.run_hook, _C.FrameHook(owner, index))
        handle = module.register_forward_hook(hook, with_kwargs=True)
        self.handles.append(handle)
        share_key(module, handle, self.handles[0].id)
        return handle

    def _switch_on(self, each: _Apart, owner: Any) -> None:
        each.is_on = True
        found = [(index, ref()) for index, ref in each.inner]
        each.handles = [
            self._hook(owner, i, module) for i, module in found if module is not None
        ]

    def follow_modes(self, owner: Any) -> None:
        """Takes hooks off where they would change what is computed, or puts them on.

        Compiled code would be compiled again each time: there they stay as they are.
        """
        for each in self._apart:
            if each.may_be_on() == each.is_on or has_compiled():
                continue
            if not each.is_on:
                self._switch_on(each, owner)
                continue
            each.is_on = False
            gone = set(map(id, each.handles))
            for handle in each.handles:
                handle.remove()
            self.handles = [h for h in self.handles if id(h) not in gone]

    def apart(self) -> set[int]:
        """The indices of modules that have no hooks, to compute as without any."""
        return {i for each in self._apart if not each.is_on for i, _ in each.inner}

    def adopt(self, handles: list[RemovableHandle]) -> None:
        """Takes over the hooks that a copy of the model has."""
        dynamo.register(self)
        leave_hooks_out(self)
        self.handles = handles

    def add_before(self, owner: Any, name: str, module: nn.Module) -> None:
        """Calls a method of the owner before each call of one more module."""
        if any(ref() is module for each in self._apart for _, ref in each.inner):
            return
        hook = functools.partial(_C.run_paused, StepBoundaryHook(owner, name))
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        move_hook_to_front(forward_pre_hooks(module), self.handles[-1].id)

    def remove(self) -> None:
        """Removes every hook; calling it again does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        dynamo.unregister(self)
        has_no_hooks(self)

    @property
    def living(self) -> list[RemovableHandle]:
        """The handles of modules that still exist; torch cannot copy the others."""
        return [each for each in self.handles if each.hooks_dict_ref() is not None]


def _apart_in(model: nn.Module) -> dict[nn.Module, _Apart]:
    """The modules within those whose forward asks for hooks, and these themselves."""
    found: dict[nn.Module, _Apart] = {}
    for module in modules_in(model):
        if module not in found and module is not model and asks_for_hooks(module):
            found.update(dict.fromkeys(modules_in(module), _Apart(module)))
    return found


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
        if self.owner.is_seen_alone():
            return
        if self.owner.is_paused and not self.owner.resumes(self.name, arguments[0]):
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
    dynamo of torch 2.11 takes one hook for another then. Another thread may move them.
    """
    for other in list(hooks):
        if other != key and (hook := hooks.pop(other, None)) is not None:
            hooks[other] = hook


def _is_partial_of(hook: object, function: object) -> TypeGuard[functools.partial[Any]]:
    return isinstance(hook, functools.partial) and hook.func is function


class CopiedHooks:
    """The owner of the hooks in a copy of a model whose original alone is watched.

    The hooks are removed when the copy is first called. No handles are copied: that of
    a part of the model would copy the hooks of all of it, those of the program, too.
    """

    is_paused = False
    plan = 0
    is_seen_alone: Callable[[], bool] = staticmethod(lambda: False)
    device = None

    def __init__(self) -> None:
        self.recorder = _C.Recorder(0)
        self.root_hook = _C.FrameHook(self, 0)
        self.compiled_boundary = self

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHooks, ()

    def before_root(self, *_: object) -> None:
        """Removes the hooks of the modules that run, and of those in them."""
        for call in running_modules() or ():
            for each in modules_in(call[1]):
                drop_hooks(each, self._is_own)

    def _is_own(self, hook: object) -> bool:
        kinds = _C.run_hook, _C.run_paused
        return any(
            _is_partial_of(hook, e) and hook.args[0].owner is self for e in kinds
        )

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
    for hook in list(forward_hooks(module).values()):  # another thread may move them
        if _is_partial_of(hook, _C.run_hook) and hook.args[0].owner is owner:
            found: _C.FrameHook = hook.args[0]
            return found
    return None


def index_of(owner: object, module: nn.Module) -> int:
    """Returns the index of a module in its owner's hook, or -1."""
    hook = hook_of(owner, module)
    return -1 if hook is None else hook.module


def threads_in(module: nn.Module) -> set[int]:
    """The threads in which a call of a module runs."""
    return {
        thread
        for thread, frame in sys._current_frames().items()
        if any(each is module for _, each in running_modules(frame) or ())
    }


def is_running(module: nn.Module) -> bool:
    """True if another call of a module runs; True if that is not known."""
    calls = running_modules()
    return calls is None or sum(each is module for _, each in calls) > 1
