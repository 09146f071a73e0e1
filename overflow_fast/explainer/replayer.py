"""Runs a kept step again, with patches in place and under observers.

    with Replayer(models, calls, start, ranks) as replayer:
        result = replayer.run(StepPart(traced=0), patches, observers)

While it is entered, all that a run may change is kept. Each run begins with it as it
was when the step began; at the end it is put back bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from .. import _C
from ..base.modules import first_parameter_of, gradient_taker
from ..base.shared_models import without_reduction
from ..detector.observers import without_observers
from ..guard.undo.restore_point import RestorePoint
from ..torch_internals.compiled_calls import uncompiled_calls
from ..torch_internals.replaying import without_torch_function
from ..torch_internals.tensor_internals import local_part, sparse_values
from .calls import Call, loss_and_gradients, loss_of_call, part_of
from .effects.rule import LEAST_SECONDS, TIMES_THE_STEP, EffectRule, StoppedError
from .leaves import Leaf, held_leaves
from .named_tensors import modules_by_name, names_of, partitions_of
from .op_call import OpCall
from .op_table import OpTable
from .op_trace import OpTrace
from .replay_ranks import BAD, CLEAN, FAILED, GIVEN, NotJoined, RankCoordinator
from .snapshot import Snapshot
from .tensor_kinds import NAN, NEGATIVE_INF, floats_in, kinds_of, sizes_and_bad
from .torch_calls import TorchCalls
from .trace_back import RootOp, masked_whole, trace_back

# If it is less, explanations of usual steps log a line more; if it is more, a program
# that waits for one says nothing for longer. Chosen, not measured.
LONG_SECONDS = 5.0
_log = logging.getLogger("overflow_fast")


class Patch:
    """A change for one run. It can be pickled, for other ranks to make it, too.

    Attributes:
        is_same_step: Whether weights and batch stay the same.
    """

    is_same_step = True

    @property
    def is_applied(self) -> bool:
        """True if the run has met all that it changes, so that it can be judged."""
        return True

    def applied(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Makes the change while it is entered; undoes it bit for bit.

        Args:
            models: The models, by what their modules' names begin with.
        """
        return nullcontext()

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """The calls to run in place of those of the step."""
        return list(calls)


class Observer:
    """Sees a run on this rank, and changes no value of it."""

    def observing(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Sees what runs while it is entered, with the patches in place.

        Args:
            models: The models, by what their modules' names begin with.
        """
        return nullcontext()

    def on_output(self, call: Call, output: Any) -> None:
        """Sees what a call has returned, before its backward."""


class Tail(Protocol):
    """Code of the program that ran behind the backward of the last call.

    Attributes:
        variables: What it reads of the function that it is of.
    """

    variables: Mapping[str, Any]

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yields its statements; the gradients are those of the replay."""


@dataclass(frozen=True)
class StepPart:
    """The part of a step to run: all calls up to the first bad one, if nothing is said.

    The rank that leads gives it to the others.

    Attributes:
        traced: The place of the last call to run, whose operations are traced; bad
            calls before it are passed over. -1 for none.
        rows: The samples of that call's batch to run alone, without the calls before
            it; None for the whole step.
        is_whole: Run all calls, each with its backward, as the step did.
        has_table: Record the traced call's operations; else it is run eagerly alone.
        looks_back: See `OpTable`.
        has_calls: Record the traced call's torch calls, which rules change.
        has_backward: Run backwards, too.
        patches: The changes to make meanwhile.
    """

    traced: int = -1
    rows: tuple[int, ...] | None = None
    is_whole: bool = False
    has_table: bool = True
    looks_back: bool = False
    has_calls: bool = False
    has_backward: bool = True
    patches: tuple[Patch, ...] = ()


_UP_TO_BAD = StepPart()


@dataclass
class ReplayResult:
    """The result of a run.

    Attributes:
        bad_outputs: What was returned and is non-finite; a loss comes first.
        bad_held: Whether the gradient that came from outside is non-finite.
        bad_gradients: The names of parameters whose gradients are non-finite.
        bad_inner: The non-finite gradients that arrived at the outputs of the module
            whose gradients are looked at.
        bad_buffers: Buffers that became non-finite, by their names, and what the step
            has written to modules that are not watched.
        has_backward: Whether there was a backward.
        has_mask: Whether an output that is no loss has a -inf, which may be meant.
        bad_call: Which of the kept calls was the first bad one, or -1.
        gradients: The gradients of the parameters, by their names.
        gradient_sizes: The largest magnitudes of those that are finite.
        buffer_sizes: Those of the buffers.
        table: The operations, if a call was traced.
        error: What ended it, or None.
        seconds: The time that it took.
        bad_ranks: The ranks whose call was the first bad one.
        losses: What backward was called on, where that is a number.
        num_before: How many operations of the table ran before the program's lines
            behind backward; None where those did not run.
        has_raised: The program's code has raised, as it did in the step.
    """

    bad_outputs: list[torch.Tensor] = field(default_factory=list)
    bad_held: bool = False
    bad_gradients: list[str] = field(default_factory=list)
    bad_inner: list[torch.Tensor] = field(default_factory=list)
    bad_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    has_backward: bool = False
    has_mask: bool = False
    bad_call: int = -1
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient_sizes: dict[str, float] = field(default_factory=dict)
    buffer_sizes: dict[str, float] = field(default_factory=dict)
    table: OpTable | None = None
    error: Exception | None = None
    seconds: float = 0.0
    bad_ranks: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    num_before: int | None = None
    has_raised: bool = False

    @property
    def is_clean(self) -> bool:
        """True if outputs, gradients and buffers are finite, on all ranks."""
        return not (self._is_bad or self.bad_ranks or self.error)

    @property
    def _is_bad(self) -> bool:
        is_bad = self.bad_outputs or self.bad_gradients or self.bad_buffers
        return bool(is_bad or self.bad_inner or self.has_raised)

    @property
    def state(self) -> int:
        """The state of this rank: CLEAN, GIVEN, BAD or FAILED."""
        if self.error is not None:
            return FAILED
        if not self._is_bad:
            return CLEAN
        return GIVEN if self.bad_held and not self.is_forward else BAD

    @property
    def is_forward(self) -> bool:
        """True if it was bad before a backward began."""
        return bool(self.bad_outputs) or (self.has_raised and not self.has_backward)

    def root_op(self, within: str | None = None) -> RootOp | None:
        """Finds the origin of its bad values, where it made a table.

        Args:
            within: The module that was seen to have bad values, which are allowed in
                others, and come before all gradients; None for the first of all.
        """
        table = self.table
        assert table is not None
        if self.bad_outputs:
            targets = self.bad_outputs
            numbers = [s for t in targets if t.numel() == 1 for s in table.sources(t)]
            found = trace_back([s for t in targets for s in table.sources(t)])
            return found or masked_whole(numbers)
        seen = [] if within is None else table.bad_within(within)[:1]
        found = trace_back([s for t in seen for s in table.sources(t)])
        if found is not None:
            return found
        if self.bad_gradients:
            targets = [self.gradients[name] for name in self.bad_gradients]
        else:
            targets = self.bad_inner or table.bad_within(within)[:1]
            targets = targets or list(self.bad_buffers.values())
            if not targets and self.has_raised:
                origins = (trace_back([row]) for row in table.last_bad())
                return next((e for e in origins if e and not _is_asked(e)), None)
        return trace_back([s for t in targets for s in table.sources(t)])

    @property
    def is_in_gradients(self) -> bool:
        """True if gradients alone are bad."""
        is_in_gradients = self.bad_gradients or self.bad_inner
        return not self.bad_outputs and bool(is_in_gradients)


class LastOutputs(Observer):
    """Keeps what the last call of a run has returned.

    Attributes:
        tensors: Its tensors of floats.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def on_output(self, call: Call, output: Any) -> None:
        """See `Observer`."""
        self.tensors = [each.detach().clone() for each in floats_in(output)]


class OutputGradients(Observer):
    """Keeps the non-finite gradients that arrive at the outputs of one module.

    Args:
        name: The module's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.bad: list[torch.Tensor] = []

    @contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Sees the module's outputs, and the gradients of these."""
        module = modules_by_name(models).get(self._name)
        if module is None or isinstance(module, torch.jit.ScriptModule):
            yield
            return
        with module.register_forward_hook(self._on_output):
            yield

    def _on_output(self, module: nn.Module, args: object, output: Any) -> None:
        for tensor in floats_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        with _C.Hidden():
            if any(map(kinds_of, floats_in(gradient))):
                self.bad.append(gradient)


# Runs the step.


class Replayer:
    """Runs the kept calls of a step again while it is entered.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        start: The models as they were when the step began; None for now.
        ranks: The ranks that run them together, each of which enters its own; None for
            this one alone.
        inner: The module whose outputs' gradients are looked at, too; None for none.
        tail: The program's lines behind the last backward, to be run there.

    Attributes:
        state: All that a run may change, kept.
        num_forwards: How many forwards were run.
        buffer_sizes: The largest magnitudes of the buffers that were finite when the
            step began.
        stopped: Why a run was ended before an effect, as a clause, or "".
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        calls: Sequence[Call],
        start: RestorePoint | None = None,
        ranks: RankCoordinator | None = None,
        inner: str | None = None,
        tail: Tail | None = None,
    ) -> None:
        self._tail = tail
        self._begin, self._is_long_said = time.perf_counter(), False
        self._last: Call | None = None
        self._is_at_start = False
        self._inner = None if inner is None else OutputGradients(inner)
        self.models, self.calls = models, list(calls)
        self.ranks = RankCoordinator() if ranks is None else ranks
        self.num_forwards = 0
        self._has_backward = not gradient_taker(models.values())
        self._most_seconds = math.inf
        self._unprofiled = _C.Unprofiled()  # a profiler has seen the step itself
        self.stopped = ""
        variables: dict[str, Any] = {}
        for call in calls:
            variables |= call.around() or {"batch": call.batch}
        if tail is not None:
            variables |= tail.variables
        batches = [tensor for call in calls for _, tensor in call.leaves()]
        self.state = Snapshot(models, start, variables, batches)
        self._around = [] if start is None else start.around

    def __enter__(self) -> Replayer:
        """Keeps the state; raises on all ranks if one cannot."""
        error: Exception | None = None
        self._unprofiled.__enter__()
        try:
            seconds = max((call.seconds for call in self.calls), default=math.inf)
            self._most_seconds = LEAST_SECONDS + TIMES_THE_STEP * seconds
            for call in self.calls:
                call.note_overwritten()
            self.state.take()
            self._is_at_start = True
            channel = self.ranks.channel
            meet = None if channel is None else channel.meet
            self._rule = EffectRule(self.state.iterators, meet)
            self._written = {
                id(call)
                for call in self.calls
                if call.is_overwritten() or call.is_of_inference
            }
            self.buffer_sizes, bad = self._look_at_buffers(names_of(self.models))
            self._bad_before = set(bad)
        except Exception as raised:
            error = raised
        try:
            self.ranks.check(error)
        except BaseException:
            self.__exit__()
            raise
        finally:
            error = None  # its traceback holds this frame, which would hold it
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.state.restore()
        finally:
            self._unprofiled.__exit__()

    @property
    def returns_loss(self) -> bool:
        """True if the calls compute the loss, and not only what it is made of."""
        return all(call.returns_loss for call in self.calls)

    def run(
        self,
        step: StepPart = _UP_TO_BAD,
        patches: Sequence[Patch] = (),
        observers: Sequence[Observer] = (),
    ) -> ReplayResult:
        """Runs calls from the state in which the step began.

        Called by the rank that leads; all others follow.

        Args:
            step: The part of the step to run.
            patches: The changes to make meanwhile, on all ranks.
            observers: They see this rank's run.
        """
        self._say_it_takes_long()
        step = replace(step, patches=tuple(patches))
        self.ranks.order(step)
        return self.follow(step, observers)

    def _say_it_takes_long(self) -> None:
        """Logs a line, once: who waits for an explanation need not look for a hang."""
        seconds = time.perf_counter() - self._begin
        if seconds >= LONG_SECONDS and not self._is_long_said:
            self._is_long_said = True
            _log.warning(
                "What was non-finite is run again to find why, which takes long. "
                "`budget=` limits it."
            )

    def follow(
        self, step: StepPart, observers: Sequence[Observer] = ()
    ) -> ReplayResult:
        """Runs what the rank that leads has ordered; see `run()`."""
        result, outer = ReplayResult(), sys.exc_info()[1]
        begin = time.perf_counter()
        try:
            with self._begun(step, observers) as calls:
                result = self._run_in_order(calls, observers, step)
        except NotJoined:
            raise
        except Exception as error:
            result.error = _without_frames(error, outer)
        result.seconds = time.perf_counter() - begin
        return result

    @contextmanager
    def _begun(
        self, step: StepPart, observers: Sequence[Observer]
    ) -> Iterator[list[Call]]:
        """Begins the step, out of sight of what watches it; yields the calls to run."""
        if not self._is_at_start:
            self.state.begin()
        self._is_at_start = False
        with ExitStack() as stack:
            stack.enter_context(without_observers(self.models.values()))
            weights = (first_parameter_of(each) for each in self.models.values())
            is_of_inference = any(w is not None and w.is_inference() for w in weights)
            stack.enter_context(torch.inference_mode(is_of_inference))
            has_autograd = any(
                c.has_backward is not False or c.has_autograd for c in self.calls
            )
            stack.enter_context(torch.set_grad_enabled(has_autograd))
            stack.enter_context(without_reduction(self.models.values()))
            for patch in step.patches:
                stack.enter_context(patch.applied(self.models))
            for observer in (*observers, *([self._inner] if self._inner else [])):
                stack.enter_context(observer.observing(self.models))
            if step.rows is not None:
                yield [part_of(self.calls[step.traced], step.rows)]
                return
            last = len(self.calls) if step.traced < 0 else step.traced + 1
            calls = patched_calls(self.calls[:last], step.patches)
            self._last = calls[-1] if calls and last == len(self.calls) else None
            yield calls
            self._last = None

    def _run_in_order(
        self, calls: Sequence[Call], observers: Sequence[Observer], step: StepPart
    ) -> ReplayResult:
        """Runs calls up to the first bad one; of a whole step, or a traced one, all.

        One whose backward is given a bad gradient is passed over as long as there are
        others, one of which may have made that.
        """
        result, given, is_traced = ReplayResult(), None, step.traced >= 0
        for place, call in enumerate(calls):
            is_last = place + 1 == len(calls)
            is_listed = is_traced and is_last
            state = self._run_call(result, call, observers, step, is_listed)
            if state == FAILED:
                return result
            if state == CLEAN or step.is_whole:
                continue
            if is_traced and not is_last:
                result = ReplayResult()
                self.state.drop_gradients()
                continue
            result.bad_call = place
            if state == BAD:
                return result
            if given is None:
                given = result
            result = result if is_last else ReplayResult()
            self.state.drop_gradients()
        return given if given is not None and not is_traced else result

    def _run_call(
        self,
        result: ReplayResult,
        call: Call,
        observers: Sequence[Observer],
        step: StepPart,
        is_traced: bool,
    ) -> int:
        """Runs a call; returns the worst of what it has come to on any rank."""
        self.num_forwards += 1
        is_last = call is self._last
        if self._inner is not None:
            self._inner.bad = []
        if id(call) in self._written:  # the user's batch is written to once
            call = call.with_own_batch()
        call = call.without_graph()  # which the step's own backward has freed
        outer = sys.exc_info()[1]
        try:
            with self._traced(result, call, step) if is_traced else nullcontext():
                with call.ambient.applied(self.models.values()), self._watched():
                    output = call.function(call.batch)
                for observer in observers:
                    observer.on_output(call, output)
                roots = self._look_at_output(result, call, output)
                # Where there are others, they may wait for this rank's part in theirs.
                ends = not step.is_whole and self.ranks.is_alone
                is_wanted = step.has_backward and not (result.is_forward and ends)
                if roots and is_wanted and self._has_backward:
                    result.has_backward = True
                    with self._watched():
                        torch.autograd.backward(
                            [root for root, _ in roots],
                            [gradient for _, gradient in roots],
                        )
                    if is_last and self._tail is not None:
                        table = result.table
                        result.num_before = 0 if table is None else len(table.ops)
                        self._run_tail(self._tail)
            with without_torch_function():
                self._look_at_state(result)
        except Exception as error:
            # What handles it may fail itself: a frozen exception takes no attributes.
            if any(type(e) is call.raised for e in _raised_with(error, outer)):
                result.has_raised = True
                self._look_at_state(result)
            else:
                result.error = _without_frames(error, outer)
                self.ranks.tell(error)
        agreed = self.ranks.agree(result.state, result.error)
        state, result.error, result.bad_ranks = agreed
        if isinstance(result.error, StoppedError):
            self.stopped = str(result.error)
        return state

    def _run_tail(self, tail: Tail) -> None:
        """Runs the program's lines behind backward, but for those with effects."""
        for run in tail.parts():
            with contextlib.suppress(StoppedError), self._watched():
                run()

    def _watched(self) -> AbstractContextManager[None]:
        """Ends code of the program before its first effect."""
        return self._rule.applied(self._most_seconds, self.state.set_aside)

    @contextmanager
    def _traced(
        self, result: ReplayResult, call: Call, step: StepPart
    ) -> Iterator[None]:
        """Runs eagerly, and records all operations in the result's table."""
        if not step.has_table:
            with uncompiled_calls():
                yield
            return
        leaves = [Leaf("batch", name, tensor) for name, tensor in call.leaves()]
        named = names_of(self.models)
        leaves += [Leaf(*found) for found in named + partitions_of(named)]
        leaves += [Leaf("gradient", "", held) for held in call.held.values()]
        for leaf in held_leaves(self.models, call.around()):
            leaf.is_kept = self.state.was_kept(leaf.tensor)
            leaves.append(leaf)
        result.table = OpTable(leaves, step.looks_back)
        calls = TorchCalls() if step.has_calls else nullcontext()
        trace = OpTrace(self.models, result.table)
        try:
            with uncompiled_calls(), trace, calls:
                yield
        finally:
            result.table.close()
            result.table.torch_calls = getattr(calls, "calls", [])

    def _look_at_output(
        self, result: ReplayResult, call: Call, output: Any
    ) -> list[tuple[Any, Any]]:
        """Looks at what was returned; says what backward is called on."""
        with _C.Hidden():
            roots, own = loss_and_gradients(call, output), loss_of_call(call, output)
            losses = [root for root, _ in roots]
            floats = floats_in(output)
            if call.returns_loss and losses:
                floats = losses  # what else it returned may be masked
            for tensor in floats:
                kinds = kinds_of(tensor)
                is_loss = call.returns_loss or tensor is own
                result.has_mask |= kinds == NEGATIVE_INF and not is_loss
                if kinds and (is_loss or kinds != NEGATIVE_INF):
                    result.bad_outputs.append(tensor)
            result.bad_held = any(kinds_of(gradient) for _, gradient in roots)
            if not call.returns_loss:  # the other roots are outputs, of any size
                losses = [root for root in losses if root is own]
            result.losses += [loss.detach() for loss in losses if loss.numel() == 1]
        return roots

    def _look_at_state(self, result: ReplayResult) -> None:
        """Looks at this rank's gradients, of sparse ones at the values, and buffers."""
        result.gradients, named = {}, names_of(self.models)
        for kind, name, tensor in named:
            if kind == "buffer" or tensor.grad is None:
                continue
            gradient = local_part(tensor.grad)
            if gradient.layout is torch.sparse_coo:
                gradient = sparse_values(gradient)
            if gradient.layout is torch.strided:
                result.gradients[name] = gradient
        found = sizes_and_bad(result.gradients.items())
        result.gradient_sizes, result.bad_gradients = found
        if self._inner is not None and not result.bad_held:
            result.bad_inner = self._inner.bad  # else it may have come from outside
        result.buffer_sizes, bad = self._look_at_buffers(named)
        result.bad_buffers = {
            name: each for name, each in bad.items() if name not in self._bad_before
        }

    def _look_at_buffers(
        self, named: Sequence[tuple[str, str, torch.Tensor]]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """The sizes of the buffers that are finite, and those that are not."""
        buffers = {name: each for kind, name, each in named if kind == "buffer"}
        now = {each.name: each.now for each in self._around}
        buffers |= {n: e for n, e in now.items() if isinstance(e, torch.Tensor)}
        sizes, bad = sizes_and_bad(buffers.items(), masks=False)
        return sizes, {name: buffers[name] for name in bad}


def _is_asked(root_op: RootOp) -> bool:
    """True for infs that the code has written as a number, as the first of minima."""
    source = root_op.source
    return isinstance(source, OpCall) and source.is_asked and not source.kinds & NAN


def _raised_with(
    error: Exception, outer: BaseException | None
) -> Iterator[BaseException]:
    """Yields an exception of a run, and those that it was raised from or behind.

    Args:
        error: The exception.
        outer: What was handled when the run began, and ends the chain: the program's.
    """
    found: list[BaseException] = [error]
    for each in found:
        yield each
        others = each.__cause__, each.__context__
        found += [
            other
            for other in others
            if other is not None and other is not outer and other not in found
        ]


def _without_frames(error: Exception, outer: BaseException | None) -> Exception:
    """An error that is kept without the frames it came through: they hold the step.

    They hold the result that keeps the error, too, and so one another.
    """
    for each in list(_raised_with(error, outer)):
        each.__traceback__ = None
        if each.__context__ is outer:
            each.__context__ = None
    return error


def patched_calls(calls: Sequence[Call], patches: Sequence[Patch]) -> list[Call]:
    """The calls of a step with patches in place."""
    for patch in patches:
        calls = patch.calls(calls)
    return list(calls)
