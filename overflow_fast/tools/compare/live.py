"""`compare_live()`: two models on one batch, side by side, or one against float32."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.modules import Handles, named_modules, step_of
from ...base.tensors import devices_of, model_loss_in
from ...base.text import dtype_name
from ...base.torch_ops import base_of, has
from ...base.tree import CALL_DEPTH, NotRebuilt, find, mapped, tensors_in
from ...detector.observers import without_observers
from ...explainer.ambient import applied
from ...explainer.effects.rule import EffectRule, StoppedError
from ...explainer.op_call import OpCall
from ...explainer.op_trace import ModuleStack, OpObserver, OpTrace
from ...explainer.snapshot import Snapshot
from ...explainer.users_lines import Sites, code_at
from ...explainer.wider import FLOATS
from ...guard.kept_calls.ambient import Ambient
from ...guard.undo.random import RandomStates
from ...torch_internals.replaying import uncompiled_calls, without_cached_casts
from ...torch_internals.running import (
    graph_task_id,
)
from ..precision.copies import check_model, to_float32
from ..precision.layers import expected_error, floats_in
from .compare_runs import (
    StepContext,
    as_sentences,
    differing_settings,
    find_root_difference,
    left_out_remarks,
    setting_remarks,
    step_remarks,
    ties_of,
)
from .comparison import Comparison, RootDifference
from .judged_rows import (
    FLAGGED,
    INTRODUCED,
    PROPAGATED,
    TensorDifference,
    coarser,
    differences_of,
    epsilon,
    error_of_layer,
    judge_all,
)
from .matching import Matched, Pair, StepTensor, mapped_name, match
from .recordings import RankStep, RecordedTensor, Source, row_line
from .run_settings import modes
from .summary import (
    Measures,
    Summary,
    estimated,
    fetch,
    measured,
    summarize,
    values_of,
)
from .tensor_hooks import BACKWARD, StepPath, TensorHooks

# The first operation within a module whose result differs between two models.


_MAX_OPS = 5000  # of one module's call; chosen, not measured
_ROUNDINGS = 3  # of its inputs, weights and result, as `_LEAF` of judged_rows.py


@dataclass
class _Op:
    """An operation of a trace.

    Attributes:
        name: Its name.
        sites: The lines that led to it.
        results: Its results' summaries and dtypes; none of memory nobody has written.
        reads: The operations whose results it was given, by their places.
        fills: Whether it was given a number at the end of its result's dtype.
    """

    name: str
    sites: Sites
    results: list[tuple[Summary, str]]
    reads: frozenset[int] = frozenset()
    fills: bool = False

    @property
    def text(self) -> str:
        """Its name, its line and the line's text."""
        file, line, code = code_at(self.sites)
        return f"{self.name} at {file}:{line} `{code}`" if file else self.name


class _Ops(OpObserver):
    """Summarizes the results of the operations of a trace."""

    def __init__(self) -> None:
        self.found: list[_Op] = []
        self._made: dict[int, int] = {}  # the last that returned a tensor, by its id

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and summarizes its results; see `OpObserver`."""
        given = {self._made.get(id(tensor), -1) for tensor in op.arguments}
        output = op.run()
        if len(self.found) < _MAX_OPS:
            results = [] if op.is_empty else _summaries(output)
            place, made = len(self.found), tensors_in(output)
            fills = any(_is_end(n, t) for _, n in find(op.args, (float,)) for t in made)
            self.found.append(
                _Op(str(op.func), modules.lines(), results, frozenset(given), fills)
            )
            self._made.update((id(tensor), place) for tensor in made)
        return output


def _is_end(number: float, tensor: torch.Tensor) -> bool:
    """True for the largest number of a tensor's dtype, as fill values are."""
    if not tensor.dtype.is_floating_point:
        return False
    return math.isclose(abs(number), torch.finfo(tensor.dtype).max, rel_tol=1e-3)


def _summaries(output: Any) -> list[tuple[Summary, str]]:
    found = []
    for each in tensors_in(output):
        if each.dtype.is_floating_point:
            values = values_of(each)
            if not isinstance(values, str):
                numbers = fetch([summarize(values)])[0]
                found.append((numbers, dtype_name(each.dtype)))
    return found


def ops_within(
    model: nn.Module, module: str, call: int, run: Callable[[], Any]
) -> list[_Op]:
    """Runs a step, and records the operations of one call of a module.

    Args:
        model: The model.
        module: The module's name.
        call: Which of its calls.
        run: Runs the step.
    """
    owner = [each for name, each in named_modules(model) if name == module][-1]
    ops, calls = _Ops(), [0]
    trace = OpTrace({}, ops)

    def begin(*_: object) -> None:
        if calls[0] == call:
            trace.__enter__()
        calls[0] += 1

    def end(*_: object) -> None:
        if calls[0] == call + 1:
            trace.__exit__(None, None, None)
            calls[0] += 1 << 30

    with (
        owner.register_forward_pre_hook(begin),
        owner.register_forward_hook(end, prepend=True, always_call=True),
    ):
        run()
    return ops.found


def first_difference(ops: list[_Op], others: list[_Op]) -> str:
    """Names the first operation that differs, or "" if none does or it is not known.

    What a fill value that follows the dtype alone makes different, as finfo.min does,
    is no difference, nor what is computed from that, until values are not finite.
    """
    worst, filled = 0.0, set[int]()
    for place, (mine, its) in enumerate(zip(ops, others, strict=False)):
        if mine.name != its.name:
            if any(has(base_of(each.name), "same") for each in (mine, its)):
                return ""
            return f"{mine.text}, where the reference runs {its.text}"
        for (own, dtype), (other, its_dtype) in zip(
            mine.results, its.results, strict=False
        ):
            kind = coarser(dtype, its_dtype)
            step = epsilon(kind) and expected_error(getattr(torch, kind), _ROUNDINGS)
            relative = estimated(own, other).relative
            if relative >= FLAGGED * max(step, worst, 2e-7):
                is_finite = (own.num_nan, own.num_inf) == (other.num_nan, other.num_inf)
                follows = (mine.fills and its.fills) or bool(filled & mine.reads)
                if not (follows and is_finite):
                    return mine.text
                filled.add(place)
                continue
            worst = max(worst, relative)
    return ""


# Each layer computed again in float32, from the inputs that it had.


def float32_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with half-precision weights and buffers in float32.

    Raises:
        ValueError: If the model is wrapped, sharded, quantized or not initialized.
    """
    check_model(model)
    with torch.no_grad():
        made = copy.deepcopy(model)
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.data = to_float32(tensor.data)
            tensor.grad = None
    return made


class LocalShadow:
    """Hooks that measure the error that each leaf makes of its own.

    Args:
        model: The model.
        shadow: Its float32 copy.

    Attributes:
        errors: The relative L2 difference to float32, by module name and call.
    """

    def __init__(self, model: nn.Module, shadow: nn.Module) -> None:
        twins = dict(named_modules(shadow))
        self._twins = {
            module: (name, twins[name])
            for name, module in named_modules(model)
            if not any(True for _ in module.children())
        }
        self._devices = devices_of([model])
        self._given: dict[nn.Module, tuple[Any, Any]] = {}
        self._calls: dict[str, int] = {}
        self._handles = Handles()
        self.errors: dict[tuple[str, int], float] = {}

    def __enter__(self) -> LocalShadow:
        for module in self._twins:
            self._handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._end, prepend=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.remove_all()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if graph_task_id() < 0:
            with torch.no_grad():
                try:
                    given = mapped((args, kwargs), _widened, CALL_DEPTH, anew=True)
                except NotRebuilt:
                    return  # it is not computed again
                self._given[module] = given
            self._states = RandomStates(self._devices)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task_id() >= 0 or module not in self._given:
            return
        name, twin = self._twins[module]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        args, kwargs = self._given.pop(module)
        if self._states.drawn():
            return  # what it draws is not drawn again
        with torch.no_grad():
            try:
                found = floats_in(twin.forward(*args, **kwargs))
            except Exception:
                return  # not all code runs in float32
            finally:
                self._states.restore()
            pairs = list(zip(floats_in(output), found, strict=False))
            errors = [
                measured(mine, its, coarser(*map(dtype_name, (mine.dtype, its.dtype))))
                for mine, its in pairs
                if mine.shape == its.shape and mine.dtype != its.dtype
            ]
        if errors:
            self.errors[name, call] = max(each.relative for each in errors)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, in float32 where it is half precision."""
    return to_float32(tensor.detach())


def apply_errors(
    rows: list[TensorDifference], errors: Mapping[tuple[str, int], float]
) -> None:
    """Lets the errors that layers make themselves decide about their outputs."""
    for row in rows:
        place = row.place
        made = errors.get((place.module, place.call))
        if place.role != "output" or made is None:
            continue
        row.made = made
        if made >= FLAGGED * error_of_layer(row):
            row.verdict = INTRODUCED
        elif row.verdict == INTRODUCED:
            row.verdict = PROPAGATED


# Runs two functions in turns, tensor by tensor, so that nothing has to be stored.


@dataclass
class _WaitingTensor:
    """A tensor that waits for its twin: its values only as long as its side waits."""

    entry: StepTensor
    values: torch.Tensor | None


class Lockstep:
    """Two sides, of which one runs at a time; each hands over at a tensor without twin.

    Args:
        names: Patterns of module names of the first side, and what the other has.
        devices: The devices whose random states belong to a side.
        is_serial: Whether backward is run by each side in one go: autograd has one
            thread for each GPU, which must not wait.

    Attributes:
        pairs: The pairs that were compared, with their measures.
        left: What has no twin yet, of each side.
    """

    def __init__(
        self, names: Mapping[str, str], devices: list[torch.device], is_serial: bool
    ) -> None:
        self._names, self._devices, self._is_serial = names, devices, is_serial
        self._condition = threading.Condition()
        self._turn = 0
        self._done = [False, False]
        self._random = [RandomStates(devices)] * 2
        self._waiting: tuple[
            dict[object, _WaitingTensor], dict[object, _WaitingTensor]
        ] = ({}, {})
        self._numbers = [0, 0]
        self.pairs: list[tuple[Pair, Measures | None]] = []

    @property
    def left(self) -> tuple[list[StepTensor], list[StepTensor]]:
        """The entries of both sides that have found no twin."""
        first, second = self._waiting
        return [s.entry for s in first.values()], [s.entry for s in second.values()]

    def sink(self, side: int) -> Callable[[StepPath, torch.Tensor, int | None], None]:
        """Returns what a `TensorHooks` of a side calls with each tensor."""
        return lambda place, tensor, same: self._show(side, place, tensor, same)

    def run(self, side: int, function: Callable[[], None]) -> None:
        """Runs a side in this thread; both have to be run at the same time."""
        self._wait(side)
        try:
            function()
        finally:
            with self._condition:
                self._done[side] = True
                self._pass_on(side)

    def _show(
        self, side: int, place: StepPath, tensor: torch.Tensor, same: int | None
    ) -> None:
        entry, values = self._entry(side, place, tensor, same)
        name = place.module if side else mapped_name(place.module, self._names)
        key = name, place.call, place.role, place.path
        twin = self._waiting[1 - side].pop(key, None)
        if twin is not None:
            mine = _WaitingTensor(entry, values)
            _summarize(mine, twin)
            pair = (twin, mine) if side else (mine, twin)
            self.pairs.append((Pair(pair[0].entry, pair[1].entry), _measures(*pair)))
            return
        shown = self._waiting[side][key] = _WaitingTensor(entry, values)
        if place.phase != BACKWARD or not self._is_serial:
            with self._condition:
                self._pass_on(side)
            self._wait(side)
        if shown.values is not None and entry.summary is None:
            entry.summary = fetch([summarize(shown.values)])[0]
        shown.values = None  # from now on it may be written over

    def _entry(
        self, side: int, place: StepPath, tensor: torch.Tensor, same: int | None
    ) -> tuple[StepTensor, torch.Tensor | None]:
        line = row_line(place, tensor, 0, self._numbers[side], same)
        self._numbers[side] += 1
        entry = StepTensor.of(Source(0, RecordedTensor(line, place)), None)
        values = values_of(tensor)
        if isinstance(values, str):
            entry.why = str(values)
            return entry, None
        return entry, values

    def _pass_on(self, side: int) -> None:
        """Gives the turn to the other side, unless it has ended."""
        if self._turn == side and not self._done[1 - side]:
            self._random[side] = RandomStates(self._devices)
            self._random[1 - side].restore()
            self._turn = 1 - side
            self._condition.notify_all()

    def _wait(self, side: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == side)


def _summarize(*pair: _WaitingTensor) -> None:
    """Finds the ranges and norms of two tensors; equal ones are read once."""
    for shown in pair:
        values, first = shown.values, pair[0]
        if values is None or shown.entry.summary is not None:
            continue
        if shown is not first and _is_equal(first.values, values):
            shown.entry.summary = first.entry.summary
        else:
            numbers = summarize(values, has_sums=pair[1].values is None)
            shown.entry.summary = fetch([numbers])[0]


def _is_equal(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    if first is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first.device == second.device and torch.equal(first, second)


def _measures(mine: _WaitingTensor, its: _WaitingTensor) -> Measures | None:
    """Exact measures, if the values of both are there."""
    if mine.values is None or its.values is None:
        return None
    if mine.values.numel() != its.values.numel():
        return None
    dtype = coarser(mine.entry.dtype, its.entry.dtype)
    return measured(mine.values, its.values, dtype)


Loss = Callable[[nn.Module, Any], torch.Tensor]


class LiveRun:
    """One model's step in a lockstep.

    Args:
        model: The model.
        batch: What it is called with.
        loss: See `compare_live`.
        backward: Whether gradients are computed.

    Attributes:
        is_again: It is a copy, so that its code has no effects again.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, backward: bool
    ) -> None:
        self.model, self._batch, self._backward = model, batch, backward
        self._function = step_of(model, loss)
        self.failures: list[str] = []
        self.arguments: dict[str, dict[str, str]] = {}
        self.error: BaseException | None = None
        self.is_again = False

    def run(self, sink: Any) -> None:
        """Runs the step, and shows its tensors."""
        rule = (
            EffectRule().applied(math.inf)
            if self.is_again
            else contextlib.nullcontext()
        )
        try:
            with TensorHooks(self.model, sink, is_one_thread=True) as hooks, rule:
                self._run(hooks)
            self.failures, self.arguments = hooks.failures, hooks.arguments
        except StoppedError as error:
            self.error = ValueError(
                "model must have no effects but on itself, since a copy of it is run, "
                f"too: {error}"
            )
        except BaseException as error:
            self.error = error

    def forward(self) -> None:
        """Runs the forward alone."""
        self._function(self._batch)

    def _run(self, hooks: TensorHooks) -> None:
        hooks.show_state()
        with torch.set_grad_enabled(self._backward or torch.is_grad_enabled()):
            output = self._function(self._batch)
            if self._backward:
                hooks.show_gradients(self._gradients(output))

    def _gradients(self, output: Any) -> dict[int, torch.Tensor]:
        loss = model_loss_in(output)
        if loss is None:
            raise ValueError(
                "backward=True needs a loss: give loss=, a function of the model and "
                "the batch that returns one"
            )
        own = [each for each in self.model.parameters() if each.requires_grad]
        found = torch.autograd.grad(loss, own, allow_unused=True) if own else ()
        pairs = zip(own, found, strict=True)
        return {id(p): gradient for p, gradient in pairs if gradient is not None}


_NO_SHADOW = (
    "No tensor had another dtype than its float32 shadow: nothing of the model is in "
    "half precision, and autocast applies to both."
)


def compare_models(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    reference_batch: Any,
    loss: Loss | None,
    backward: bool,
    names: Mapping[str, str],
    local: LocalShadow | None = None,
) -> Comparison:
    """Compares two models; see `overflow_fast.compare_live`."""
    if reference_batch is None:
        reference_batch = batch_for(reference, model, batch)
    sides = [
        LiveRun(model, batch, loss, backward),
        LiveRun(reference, reference_batch, loss, backward),
    ]
    steps = [RankStep(0, modes(side.model), []) for side in sides]
    devices = devices_of([model, reference])
    lockstep = Lockstep(names, devices, is_serial=bool(devices))
    result = Comparison(_name(model), _name(reference), [])
    sides[1].is_again = local is not None
    with _undisturbed(model, reference):
        before = RandomStates(devices)
        with local or contextlib.nullcontext():
            _run_both(sides, lockstep, devices)
        drawn = before.drawn()
    for step, side in zip(steps, sides, strict=True):
        step.modes |= {"failures": side.failures, "drawn": drawn}
        step.modes["settings"] |= side.arguments
    has_tf32 = any(step.modes["tf32"] for step in steps)
    known = _conclude(result, lockstep, names, has_tf32)
    pairs = [pair for pair, _ in lockstep.pairs]
    known.ties = ties_of([p.entry for p in pairs], [p.reference for p in pairs])
    known.differing = differing_settings([(steps[0], steps[1])], pairs)
    remarks = step_remarks(0, *([step] for step in steps))
    remarks += [(0, text) for text in setting_remarks(known.differing)]
    result.said += as_sentences(remarks)
    if local is not None:
        apply_errors(result.rows, local.errors)
        if all(row.dtypes[0] == row.dtypes[1] for row in result.rows):
            result.said.insert(0, _NO_SHADOW)
    result.said += both_nonfinite(result.rows)
    result.first = find_root_difference(result.rows, known)
    if result.first is not None and result.first.kind == "forward":
        result.first.op = _first_op(result.first, sides, names)
    return result


def both_nonfinite(rows: Sequence[TensorDifference]) -> list[str]:
    """Names the first tensor that holds nans, or else infs, in both, in a sentence."""
    for kind in ("nan", "inf"):
        for row in rows:
            mine, its = getattr(row, f"num_{kind}")
            if mine and its and row.verdict != INTRODUCED:
                return [
                    f"Both hold {kind}: first at {row.place}, {mine} against {its} "
                    "values. Those are not compared."
                ]
    return []


def _first_op(
    first: RootDifference, sides: list[LiveRun], names: Mapping[str, str]
) -> str:
    """Runs the forward of both again, and looks at the operations of one module."""
    module, call = first.module, first.row.place.call
    found = []
    for side, name in zip(sides, (module, mapped_name(module, names)), strict=True):
        with _undisturbed(side.model), torch.no_grad():
            try:
                with uncompiled_calls(), EffectRule().applied(math.inf):
                    found.append(ops_within(side.model, name, call, side.forward))
            except Exception:
                return ""  # it is named without the operation
    return first_difference(*found)


def batch_for(reference: nn.Module, model: nn.Module, batch: Any) -> Any:
    """The batch on the reference's device, floats of the model's dtype in its dtype."""
    own, its = next(model.parameters(), None), next(reference.parameters(), None)
    if own is None or its is None:
        return batch

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype == own.dtype and own.dtype in FLOATS
        return tensor.to(its.device, its.dtype if is_cast else tensor.dtype)

    return mapped(batch, convert, CALL_DEPTH)


@contextlib.contextmanager
def _undisturbed(*models: nn.Module) -> Iterator[None]:
    """Guards do not see the runs, and everything is as before afterwards."""
    with (
        without_observers(models),
        Snapshot({f"{i}.": m for i, m in enumerate(models)}),
    ):
        yield


def _run_both(
    sides: list[LiveRun], lockstep: Lockstep, devices: list[torch.device]
) -> None:
    ambient = Ambient(sides[1].model, devices)
    is_inference, has_gradients = (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )
    threads = torch.get_num_threads()

    def run_reference() -> None:
        torch.set_num_threads(threads)  # is of each thread
        with (
            torch.inference_mode(is_inference),
            torch.set_grad_enabled(has_gradients),
            without_cached_casts(sides[0].model.parameters()),
            applied(ambient, []),
        ):
            sides[1].run(lockstep.sink(1))

    # Its code reads the program's context variables, which a thread has not.
    run = contextvars.copy_context().run
    other = threading.Thread(
        target=run, args=(lockstep.run, 1, run_reference), daemon=True
    )
    other.start()
    lockstep.run(0, lambda: sides[0].run(lockstep.sink(0)))
    other.join()
    for side in sides:
        if side.error is not None:
            raise side.error


def _conclude(
    result: Comparison, lockstep: Lockstep, names: Mapping[str, str], has_tf32: bool
) -> StepContext:
    """Pairs what is left by order and shape, and judges all rows."""
    rest = match(*lockstep.left, names)
    pairs = [*lockstep.pairs, *((pair, None) for pair in rest.pairs)]
    pairs.sort(key=lambda each: each[0].entry.order)
    result.rows += differences_of([pair for pair, _ in pairs], 0)
    for row, (_, measures) in zip(result.rows, pairs, strict=True):
        if measures is not None and row.measures is not None:
            row.measures = measures
    judge_all(result.rows, [pair for pair, _ in pairs], has_tf32)
    matched = Matched([], rest.only, rest.only_reference, rest.renamed, rest.is_coarse)
    result.num_alone = len(rest.only) + len(rest.only_reference)
    result.said += as_sentences(left_out_remarks(0, result.rows, matched))
    return StepContext(
        missing=matched.missing_modules(), lone_sources=matched.lone_sources()
    )


def _name(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    kind = "" if parameter is None else f" ({dtype_name(parameter.dtype)})"
    return f"{type(model).__name__}{kind}"
