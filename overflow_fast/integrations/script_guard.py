"""Guards the models that a program trains, without a change to the program.

The flow:

1. While the program runs, the constructor of `torch.optim.Optimizer` notes each
   optimizer that is made. Where a Trainer makes one, the Trainer gets the guard's
   callback, and no more is done.
2. All objects of the program are searched at once for the models that hold the
   optimizer's parameters, and one guard is made of all that no forward has used yet.
   So the first step is guarded, whatever the program does next.
3. Until such a model's first forward the program may wrap it, as DDP and engines do. A
   hook on the forwards of all modules finds the wrapper then, and a guard of it takes
   the place of the one there is. After that the hook is removed.
4. An optimizer that no constructor has made (a copy, one that was unpickled) is found
   behind its first step, and guarded from the second one on.
5. Where the program ends, by an exception or not, the guards are removed.

The state:

1. `_pending`: optimizers that no guard has. `_fresh`: guards under which no forward has
   run. Both together are what the next guard is made of.
2. `_known`: optimizers that were noted, none of them twice. `_unrelated`: modules whose
   forward was looked at in vain, until another optimizer is made.
3. `_has_own`: the program guards or detects by itself, and is left alone.

If a search misses a model, the steps of that model are not guarded, and the end of the
run says so where nothing else was (`why_nothing_was_guarded`). If it takes a wrapper
for a model, names of modules in reports begin with the wrapper's.
"""

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

from ..base.modules import modules_in
from ..detector.selection import NoModuleError
from ..guard.guards_of_process import num_guards_of
from ..guard.process import own_rank
from ..guard.program_guard import ProgramGuard
from ..guard.report.coverage import GuardCoverage
from ..guard.report.report import NonFiniteError
from ..guard.report.run_lines import summary
from .script_models import (
    each_once,
    find_outermost,
    find_trained,
    guards_of,
    have_detectors,
    holds_one_of,
    inside,
    is_made_by_another,
    modules_of,
    named_by_class,
    stepped_ids,
    without_inner,
)
from .script_requests import RequestGuard
from .script_trainers import add_callback, trainer_on_stack

_log = logging.getLogger("overflow_fast")
# Searches of all objects that the garbage collector knows, as optimizers are made. With
# more optimizers, the rest are searched for at the first forward of what they step: if
# it is too small, wrappers around a model are found a little later; chosen.
_MAX_SEARCHES = 16
_NO_STEP = "its optimizers made no step"
_NO_OPTIMIZER = (
    "it made no torch.optim.Optimizer in this process, and ran no module without "
    "autograd"
)


def _num_judged(coverage: GuardCoverage) -> int:
    return coverage.steps or coverage.requests


class UnusableArgumentsError(SystemExit):
    """Ends a program that cannot be guarded as its command line asks; says why."""


class ScriptGuard:
    """Attaches a guard to the models and optimizers that a program trains.

    It is attached when an optimizer is made, so that the first step is guarded. Models
    and optimizers that are made until the first forward share a guard; a module that
    has come to hold a model by then, such as DDP, takes its place. An optimizer that
    was copied or unpickled is guarded from its second step on. Trainers of transformers
    and Lightning get the guard's callback. What the program guards itself is left so.
    Until it makes an optimizer, what it runs without autograd is judged as requests.

    Args:
        arguments: The arguments of `OverflowGuard` but models and optimizers.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._pending: list[weakref.ref[Optimizer]] = []
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unrelated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._fresh: list[ProgramGuard] = []  # no forward has run under them
        self._callbacks: list[Any] = []
        self._num_searches = 0
        self._is_guarded = False
        self._has_own = False
        self._why_not = ""
        self._forward_hook: Any = None
        self._guards: list[ProgramGuard] = []
        self._refused: NoModuleError | None = None
        self._requests: RequestGuard | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Attaches guards within, and removes them at the end.

        Raises:
            NonFiniteError: For a verdict that came late, if the policy is to raise.
            UnusableArgumentsError: If a pattern matches no module.
        """
        step_hook = register_optimizer_step_post_hook(self._after_step)
        self._requests = RequestGuard(self._arguments, self._isolated_call)
        original = Optimizer.__init__
        Optimizer.__init__ = self._noting(original)  # type: ignore[method-assign]
        try:
            yield
        except BaseException as error:
            for guard in self._all_guards:
                guard.on_raised(error)
            with contextlib.suppress(NonFiniteError):
                self._remove_guards()
            raise
        else:
            self._remove_guards()
        finally:
            Optimizer.__init__ = original  # type: ignore[method-assign]
            step_hook.remove()
            self._stop_looking()

    def why_nothing_was_guarded(self, elsewhere: str = "") -> str | None:
        """Returns a reason in words, or None if steps were guarded, or need not be.

        Args:
            elsewhere: What is said besides where nothing was there to guard.
        """
        if self._has_steps or self._has_own:
            return None
        has_one = self._num_searches or self._callbacks
        return self._why_not or (_NO_STEP if has_one else _NO_OPTIMIZER + elsewhere)

    def summaries(self) -> list[str]:
        """Writes what was watched, a line for each guard that reported nothing."""
        return [
            summary(coverage, 0, each.num_skipped, each.cost)
            for each in self._all_guards
            if each.last_report is None and own_rank() == 0
            if _num_judged(coverage := each.coverage()) and not coverage.failures
        ]

    @property
    def is_unused(self) -> bool:
        """True if the program guards itself, and no step went by these arguments."""
        return self._has_own and not self._has_steps

    @property
    def _has_steps(self) -> bool:
        judged = (_num_judged(each.coverage()) for each in self._all_guards)
        return self._is_guarded or any(judged)

    @property
    def _all_guards(self) -> list[ProgramGuard]:
        found = [*self._guards, *(c.guard for c in self._callbacks if c.guard)]
        if self._requests is not None and self._requests.guard is not None:
            found.append(self._requests.guard)
        return found

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
        self._end_requests()
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
            self._has_own = True

    def _before_forward(self, module: nn.Module, args: object) -> None:
        # Compiled code has nothing of this hook in it.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._isolated(self._look_at, module)
            self._raise_refusal()

    def _look_at(self, module: nn.Module) -> None:
        if module in self._unrelated:
            return
        watched = list(modules_of(self._fresh))
        is_watched = any(each is module for each in watched)
        if is_watched and not self._pending:
            self._go_over_to_wrappers()
        elif holds_one_of(module, stepped_ids(self._new_optimizers())):
            self._attach()
        elif not set(map(id, watched)).isdisjoint(map(id, modules_in(module))):
            self._go_over_to_wrappers()  # an engine's, which steps copies of weights
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
        fresh = [o for guard in self._fresh for o in guard.optimizers]
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
        wanted = {each for model in models for each in modules_in(model)}
        earlier = guards_of(self._guards, wanted)
        if len(earlier) < num_guards_of(wanted) or have_detectors(models):
            self._has_own = True
        else:
            self._replace(earlier, models, wrapped)

    def _replace(
        self,
        earlier: Sequence[ProgramGuard],
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
    ) -> None:
        """Makes a guard that goes on where earlier ones have ended."""
        new = {id(inner) for each in optimizers for inner in inside(each)}
        before = [o for each in earlier for o in each.optimizers]
        # Engines step an optimizer once to make its state.
        unused = {id(one): one.coverage().steps for one in self._fresh}
        steps = (each.step - unused.get(id(each), 0) for each in earlier)
        step = max(steps, default=0)
        for guard in {*earlier, *self._fresh}:
            self._guards.remove(guard)
            self._is_guarded |= guard.coverage().steps > 0
            guard.remove()
        model = models[0] if len(models) == 1 else named_by_class(models)
        kept = [each for each in before if id(each) not in new]
        guard = ProgramGuard(model, [*kept, *optimizers], **self._arguments)
        guard.step = step
        self._guards.append(guard)
        self._fresh = [guard]

    def _go_over_to_wrappers(self) -> None:
        """Finds the wrappers that were made since the guards were.

        Where an engine steps an optimizer on its own terms, a guard of the engine takes
        the place of the one there is; other wrappers of optimizers are noted.
        """
        for guard in list(self._fresh):
            roots, wrappers = find_outermost(guard.models, guard.optimizers)
            if not guard.note_wrappers(wrappers):
                self._replace([guard], roots, each_once(wrappers))

    def _end_requests(self) -> None:
        """Ends the guard of requests: the program trains, or has ended."""
        found = self._requests
        if found is not None:
            found.remove()
            self._has_own |= found.has_own

    def _remove_guards(self) -> None:
        self._has_own |= any(not guard.enabled for guard in self._guards)
        with contextlib.ExitStack() as removals:
            removals.callback(self._end_requests)
            for guard in self._guards:
                removals.callback(guard.remove)

    def _raise_refusal(self) -> None:
        if self._refused is not None and not self._all_guards:
            raise UnusableArgumentsError(str(self._refused))

    def _isolated_call(self, function: Callable[..., None], *args: Any) -> None:
        self._isolated(function, *args)
        self._raise_refusal()

    def _stop_looking(self) -> None:
        if self._requests is not None:
            self._requests.stop_looking()
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
