"""Guards the models that a program only runs, as each of them first runs.

Which modules a program calls is not known before it does. So a hook on all modules
looks for an outermost forward without autograd of a module that has no guard, gives it
one, and calls the hooks that the forward would have begun with.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import _C
from ..base.modules import is_scripted, modules_in
from ..guard.guards_of_process import num_guards_of
from ..guard.kinds import TRIPWIRE
from ..guard.program_guard import ProgramGuard
from ..guard.watching.entries import entries_of
from ..torch_internals.call_arguments import keywords_of_call
from ..torch_internals.module_internals import forward_pre_hooks
from ..torch_internals.running import is_jit_tracing
from .script_models import find_outermost, guards_of, have_detectors, named_by_class

_log = logging.getLogger("overflow_fast")
_MOST_MODELS = 16  # all objects are searched for what holds each
_NO_HOOKS = "%s is not watched: TorchScript calls no hooks."
# The hook takes about a microsecond a module: it goes after the tokens of some texts.
_MOST_CALLS = 4096


class RequestGuard:
    """The guard of the models that a program runs without autograd.

    It is one for all of them, made anew with each new model: with several, names of
    modules begin with the class of their model. A program's own guard stays alone.
    Unless `watch` is given, outputs alone are looked at, and all modules where a bad
    request is run again.

    Args:
        arguments: The arguments of `OverflowGuard` but models and optimizers.
        isolated: Calls a function, and lets no error of the guard's own out.

    Attributes:
        guard: The guard, or None.
        has_own: The program has a guard or a detector on what it runs.
    """

    def __init__(
        self, arguments: Mapping[str, Any], isolated: Callable[..., None]
    ) -> None:
        # All modules cost a token of a small model half of its time and more.
        self._arguments, self._isolated = {"watch": TRIPWIRE, **arguments}, isolated
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._num_models = self._num_calls = 0
        self.guard: ProgramGuard | None = None
        self.has_own = False
        self._handle = register_module_forward_pre_hook(self._before_forward)

    def stop_looking(self) -> None:
        """Guards no further models."""
        self._handle.remove()

    def remove(self) -> None:
        """Removes the hook and the guard.

        Raises:
            NonFiniteError: For a verdict that came late, if the policy is to raise.
        """
        self.stop_looking()
        if self.guard is not None:
            self.has_own |= not self.guard.enabled  # it gave way to the program's
            self.guard.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and module.training:
            return
        if module in self._known:
            if module in self._roots:
                self._num_calls += 1
                if self._num_calls > _MOST_CALLS:
                    self.stop_looking()
            return
        if not (_C.is_unwatched() or is_jit_tracing()):
            self._isolated(self._look_at, module, args)

    def _look_at(self, module: nn.Module, args: Any) -> None:
        with self._lock:
            is_in_forward = self.guard is not None and self.guard.is_in_forward
            if module in self._known or is_in_forward:
                return
            before = set(forward_pre_hooks(module))
            self._add(module)
            hooks = dict(forward_pre_hooks(module))
        added = [hook for key, hook in hooks.items() if key not in before]
        keywords = keywords_of_call(module)
        if self.guard is None or keywords is None:
            return
        self.guard.begin_within_forward()  # the call that runs has done nothing yet
        for hook in added:
            hook(module, args, keywords)

    def _add(self, module: nn.Module) -> None:
        """Makes the guard watch the model that a module is, or is called of."""
        if is_scripted(module):
            self._known.add(module)
            _log.warning(_NO_HOOKS, module.original_name)
            return
        (root, *_), _ = find_outermost([module], [])
        if all(each is not module for each in entries_of(root)):
            root = module
        self._known.update([module, *modules_in(root)])
        self._roots.update([root, module])
        self._num_models, self._num_calls = self._num_models + 1, 0
        if self._num_models >= _MOST_MODELS:
            self.stop_looking()
        guard, inside = self.guard, set(modules_in(root))
        earlier = [] if guard is None else guards_of([guard], inside)
        if num_guards_of(inside) > len(earlier) or have_detectors([root]):
            self.has_own = True
            return
        models = [] if guard is None else guard.models
        models = [*(each for each in models if each not in inside), root]
        made = models[0] if len(models) == 1 else named_by_class(models)
        if guard is not None:
            guard.remove()
        self.guard = ProgramGuard(made, **self._arguments)
        if guard is not None:
            self.guard.go_on_from(guard)
