"""Guards the models that a program trains, without a change to the program."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.selection import NoModuleError
from ..guard.guard import OverflowGuard
from ..guard.other_guards import guards_of, modules_of
from ..report.report import NonFiniteError
from .on_import import on_import
from .running_trainers import add_callback, replace_detector, trainer_on_stack
from .trained_models import (
    find_trained,
    have_detectors,
    holds_one_of,
    inside,
    is_made_by_another,
    named_by_class,
    note_wrappers,
    parameters_of,
    without_inner,
)

_log = logging.getLogger("overflow_fast")
_MAX_SEARCHES = 16  # of all objects, before the first forward
_NO_STEP = "its optimizers made no step"
_NO_OPTIMIZER = (
    "it made no torch.optim.Optimizer in this process (those that it starts are not "
    "guarded: run each so, such as `torchrun -m overflow_fast run train.py`)"
)


class UnusableArgumentsError(SystemExit):
    """Ends a program that cannot be guarded as its command line asks; says why."""


class ScriptGuard:
    """Attaches a guard to the models and optimizers that a program trains.

    It is attached when an optimizer is made, so that the first step is guarded. Models
    and optimizers that are made until the first forward share a guard; a module that
    has come to hold a model by then, such as DDP, takes its place. An optimizer that
    was copied or unpickled is guarded from its second step on. Trainers of transformers
    and Lightning get the guard's callback. What the program guards itself is left so.

    Args:
        arguments: The arguments of `OverflowGuard` but models and optimizers.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._pending: list[weakref.ref[Optimizer]] = []
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unrelated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._fresh: list[OverflowGuard] = []  # no forward has run under them
        self._callbacks: list[Any] = []
        self._num_searches = 0
        self._is_guarded = False
        self._why_not = ""
        self._forward_hook: Any = None
        self._guards: list[OverflowGuard] = []
        self._refused: NoModuleError | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Attaches guards within, and removes them at the end.

        Raises:
            NonFiniteError: For a verdict that came late, if the policy is to raise.
            UnusableArgumentsError: If a pattern matches no module.
        """
        step_hook = register_optimizer_step_post_hook(self._after_step)
        original = Optimizer.__init__
        Optimizer.__init__ = self._noting(original)  # type: ignore[method-assign]
        try:
            with on_import("transformers.debug_utils", replace_detector):
                yield
        except BaseException:
            with contextlib.suppress(NonFiniteError):
                self._remove_guards()
            raise
        else:
            self._remove_guards()
        finally:
            Optimizer.__init__ = original  # type: ignore[method-assign]
            step_hook.remove()
            self._stop_looking()

    def why_nothing_was_guarded(self) -> str | None:
        """Returns a reason in words, or None if steps were guarded, or need not be."""
        guards = [*self._guards, *(c.guard for c in self._callbacks if c.guard)]
        if self._is_guarded or any(each.coverage().steps for each in guards):
            return None
        has_one = self._num_searches or self._callbacks
        return self._why_not or (_NO_STEP if has_one else _NO_OPTIMIZER)

    # Called by the program.

    def _noting(self, original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._isolated(self._note, optimizer)

        return __init__

    def _note(self, optimizer: Optimizer) -> None:
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        if (trainer := trainer_on_stack()) is not None:
            self._give_callback(trainer)
        elif not is_made_by_another(optimizer):
            self._pending.append(weakref.ref(optimizer))
            self._unrelated.clear()
            if self._forward_hook is None:
                hook = register_module_forward_pre_hook(self._before_forward)
                self._forward_hook = hook
            if self._num_searches < _MAX_SEARCHES:
                self._attach()

    def _give_callback(self, trainer: Any) -> None:
        callback = add_callback(trainer, self._arguments)
        if callback is not None:
            self._callbacks.append(callback)
        elif not self._callbacks:
            self._is_guarded = True

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Compiled code has nothing of this hook in it.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._isolated(self._look_at, module)
            self._raise_refusal()

    def _look_at(self, module: nn.Module) -> None:
        if module in self._unrelated:
            return
        is_watched = any(module in modules_of(each._loop) for each in self._fresh)
        if is_watched and not self._pending:
            self._note_wrappers()
        elif holds_one_of(module, parameters_of(self._new_optimizers())):
            self._attach()
        else:
            self._unrelated.add(module)
            return
        self._fresh.clear()
        self._stop_looking()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        is_pending = any(each() is optimizer for each in self._pending)
        if is_pending or optimizer not in self._known:
            self._known.add(optimizer)
            self._pending.append(weakref.ref(optimizer))
            self._isolated(self._attach)
            self._pending.clear()
            self._raise_refusal()

    # Guards.

    def _new_optimizers(self) -> list[Optimizer]:
        """The optimizers under which no forward has run."""
        pending = [each for one in self._pending if (each := one()) is not None]
        fresh = [o for guard in self._fresh for o in guard._loop.steps.optimizers]
        return [*fresh, *(each for each in pending if each not in fresh)]

    def _attach(self) -> None:
        """Attaches a guard to all that is new, in place of those on its models."""
        self._num_searches += 1
        optimizers = without_inner(self._new_optimizers())
        models, wrapped = find_trained(optimizers)
        if not models:
            names = ", ".join(sorted({type(o).__name__ for o in optimizers}))
            self._why_not = f"no torch.nn.Module holds the parameters of {names}"
            return
        self._pending.clear()
        loops = guards_of([each for model in models for each in model.modules()])
        earlier = [each for each in self._guards if each._loop in loops]
        if len(earlier) < len(loops) or have_detectors(models):
            self._is_guarded = True
        else:
            self._replace(earlier, models, wrapped)

    def _replace(
        self,
        earlier: Sequence[OverflowGuard],
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
    ) -> None:
        """Makes a guard that goes on where earlier ones have ended."""
        new = {id(inner) for each in optimizers for inner in inside(each)}
        before = [o for each in earlier for o in each._loop.steps.optimizers]
        step = max((guard.step for guard in earlier), default=0)
        for guard in {*earlier, *self._fresh}:
            self._guards.remove(guard)
            self._is_guarded |= guard.coverage().steps > 0
            guard.remove()
        model = models[0] if len(models) == 1 else named_by_class(models)
        kept = [each for each in before if id(each) not in new]
        guard = OverflowGuard(model, [*kept, *optimizers], **self._arguments)
        guard._loop.gives_way = True
        guard.step = step
        self._guards.append(guard)
        self._fresh = [guard]

    def _note_wrappers(self) -> None:
        """Notes the wrappers of optimizers that were made since the guards were."""
        note_wrappers([h for g in self._fresh for h in g._loop._hooks])

    def _remove_guards(self) -> None:
        self._is_guarded |= any(not guard.enabled for guard in self._guards)
        with contextlib.ExitStack() as removals:
            for guard in self._guards:
                removals.callback(guard.remove)

    def _raise_refusal(self) -> None:
        if self._refused is not None and not self._guards:
            raise UnusableArgumentsError(str(self._refused))

    def _stop_looking(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _isolated(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function; its first failure is logged, and none stops the run."""
        try:
            function(*args)
        except NonFiniteError:
            raise
        except NoModuleError as error:  # a later model may have such a module
            self._refused = error
        except Exception as error:
            if not self._why_not:
                _log.warning("No guard: %s", error, exc_info=True)
            self._why_not = f"the guard could not be attached: {error}"
            self._stop_looking()
