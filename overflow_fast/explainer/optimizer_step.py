"""Makes an optimizer's step again, on copies, where it has made weights non-finite.

1. `explain_update()` is of a weight that was finite a step before: the gradients of
   that step are gone, and 0 is in their place. `explain_seen_update()` is of a step
   that has just been made.
2. Both make an `_Again`, of which a `_Twin` is the optimizer for a copy of the weight,
   with copies of the optimizers that it holds.
3. If the step of the twin is non-finite as well, its operations say why, the step in
   float64 whether the dtype is it, and steps with other settings are remedies.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.modules import stepped_by
from ..base.text import counted, dtype_name
from ..base.tree import path_text, tensors
from ..guard.optimizers.held_optimizers import optimizers_in
from ..guard.report import notes
from ..guard.report.causes import (
    BAD_SETTING,
    BAD_WEIGHTS,
    RANGE_OVERFLOW,
    UNDEFINED,
    UNDERFLOW,
)
from ..guard.report.explanation import Explanation
from ..guard.report.findings import OF_OTHERS, REPLACED
from ..guard.report.gist import plain_number
from ..guard.report.remedy import Remedy
from ..guard.undo.kept_objects import ATOMS
from ..guard.undo.optimizer import OptimizerSnapshot
from ..guard.verdict.optimizer_settings import nonfinite_in
from ..guard.verdict.verdict import BadEntry
from ..guard.watching.judged_tensors import state_of
from ..scanner.ops import scan
from ..torch_internals.replaying import with_torch_function, without_function_modes
from .bad_step import BadStep
from .named_tensors import state_by_name
from .op_call import OpCall
from .op_table import OpTable
from .op_trace import OpTrace
from .remedies.rule_attempts import update_remedies
from .tensor_kinds import summary_of
from .torch_calls import TorchCalls
from .trace_back import trace_back
from .users_lines import op_at

_log = logging.getLogger("overflow_fast")
# A usual eps that the dtype holds.
_EPS = {torch.float16: 1e-4, torch.bfloat16: 1e-8, torch.float32: 1e-8}
_BETWEEN = (
    "{} was finite when the step before was judged: the optimizer's step made it "
    "non-finite, or code that wrote to it since"
)
_BY_OTHERS = (
    "{} was finite when the step before was judged, and no optimizer of the guard has "
    "it: other code has written to it since"
)
_NOT_AGAIN = "The step could not be made again on a copy of its optimizer."
_PUT = (
    "{} is another parameter than in the optimizer's last step{}: code outside of it "
    "has put this one there since, which holds {}"
)
_WRITTEN = (
    "code outside of the optimizer's step has written to it since: its version counter "
    "has risen by {}"
)


def group_of(optimizer: Any, parameter: torch.Tensor) -> int | None:
    """The place of the parameter group that has a parameter, or None."""
    for place, group in enumerate(optimizer.param_groups):
        if any(parameter is each for each in group["params"]):
            return place
    return None


def explain_update(step: BadStep, found: Explanation) -> Explanation:
    """Explains a weight that was finite a step before.

    The step is made again with the state as it is now and gradients of 0. That shows
    what the update divides by; what it was given before is gone.

    Args:
        step: The step.
        found: What is said of the weight so far.
    """
    named = state_by_name(step.models)
    parameter = named[found.tensor]
    found = Explanation(
        module=found.module,
        tensor=found.tensor,
        evidence=[_BETWEEN.format(found.tensor)],
    )
    for optimizer in step.optimizers:
        place = group_of(optimizer, parameter)
        if place is not None:
            before = step.last_steps.shape_before(optimizer, parameter)
            if before is not None:
                shape = f", of shape {list(parameter.shape)} in place of {list(before)}"
                grown = shape * (parameter.shape != before)
                held = summary_of(parameter.detach()).nonfinite_text()
                grown += _in_new_rows(~parameter.detach().isfinite(), before)
                put = _PUT.format(found.tensor, grown, held)
                found = replace(found, phase="weights", cause=BAD_WEIGHTS.name)
                return replace(found, evidence=[put], notes=[REPLACED])
            now = optimizer.param_groups[place]
            *_, last = [{}, *step.last_steps.settings(optimizer, place)]
            group = {**now, **last}
            made = _made_again(_Again(optimizer, group, parameter), place, found)
            times = step.last_steps.writes_since(optimizer, parameter)
            found.evidence += [_WRITTEN.format(times)] * bool(times)
            if made is None:
                _add_bad_state(optimizer, parameter, found)
            return made or found
    own, stepping = set(map(id, named.values())), step.optimizers
    if stepping and all(own & {*map(id, stepped_by(each))} for each in stepping):
        # None steps copies, as an engine's does.
        found = replace(found, phase="weights", cause=BAD_WEIGHTS.name)
        said = [_BY_OTHERS.format(found.tensor)]
        return replace(found, evidence=said, notes=[OF_OTHERS])
    return found


def _in_new_rows(bad: torch.Tensor, before: torch.Size) -> str:
    """That all bad values are in rows that the parameter before it did not have."""
    is_longer = bad.shape[1:] == before[1:] and bad.shape[:1] > before[:1]
    if not is_longer or bool(bad[: before[0]].any()):
        return ""
    return f", non-finite in its new rows alone, from row {before[0]} (from 0) on"


def explain_seen_update(
    first: BadEntry,
    optimizer: Any,
    parameters: Mapping[str, torch.Tensor],
    kept: OptimizerSnapshot,
) -> Explanation:
    """Explains what a step, which has just been made, has made of finite gradients.

    Incurs a CPU-GPU sync.

    Args:
        first: The weight, or the part of its state, that has become non-finite.
        optimizer: The optimizer.
        parameters: Its parameters, by name.
        kept: What it steps, as that was before.
    """
    names = [n for n in parameters if first.fqn == n or first.fqn.startswith(f"{n}.")]
    name = max(names, key=len, default="")
    found = Explanation("optimizer", tensor=first.fqn)
    found.module = name.rpartition(".")[0]
    parameter = parameters.get(name)
    place = None if parameter is None else group_of(optimizer, parameter)
    if parameter is None or place is None or parameter.grad is None:
        return found
    (stat,) = scan([parameter.grad])
    largest = stat.abs_max or 0.0
    size = f"finite, up to {largest:.3g} in magnitude" if largest else "0 throughout"
    found.evidence.append(given := f"the gradient of {name} is {size}")
    group, state = dict(optimizer.param_groups[place]), first.fqn.removeprefix(name)
    again = _Again(optimizer, group, parameter, parameter.grad, state, kept)
    made = _made_again(again, place, found) or found
    if made.cause == UNDEFINED.name and not (made.reason or largest):
        made.reason = _of_zeros(parameters, kept)
        made.evidence.remove(given)
    return made


def _of_zeros(parameters: Mapping[str, torch.Tensor], kept: OptimizerSnapshot) -> str:
    """Names the matrices that were 0, where a weight's gradient is 0 throughout."""
    given = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    num = len(_zeros_in(given)) - 1
    are = "is that" if num == 1 else "are those"
    others = f", as {are} of {counted(num, 'other weight')}" * bool(num)
    before = {n: kept.held(p) for n, p in parameters.items() if p.dim() > 1}
    zeros = _zeros_in({n: p for n, p in before.items() if p is not None})
    more = f" and {counted(len(zeros) - 1, 'other weight')}" * (len(zeros) > 1)
    was = "were" if more else "was"
    which = f", and `{zeros[0]}`{more} {was} 0" if zeros else ""
    return f"its gradient is 0 throughout{others}{which}"


def _zeros_in(named: Mapping[str, torch.Tensor]) -> list[str]:
    stats = scan(each.detach() for each in named.values())
    return [n for n, s in zip(named, stats, strict=True) if s.abs_max == 0]


@dataclass(frozen=True)
class _Again:
    """An optimizer's step, made again on copies.

    Attributes:
        optimizer: The optimizer.
        group: The settings of its step, for the parameter.
        parameter: The parameter.
        gradient: Its gradient in that step; None where it is gone: 0 is in its place.
        state: The part of its state that is looked at; "" for the parameter itself.
        kept: What the optimizer steps, as that was before; None if that is not known.
    """

    optimizer: Any
    group: dict[str, Any]
    parameter: torch.Tensor
    gradient: torch.Tensor | None = None
    state: str = ""
    kept: OptimizerSnapshot | None = None

    @property
    def given(self) -> str:
        """The gradients that it is given, in words."""
        if self.gradient is None:
            return "gradients of 0"
        is_once = not _needs_closure(type(self.optimizer).step)
        return "the same gradients" if is_once else "the gradients that it has left"

    @property
    def how_tried(self) -> str:
        """A remedy's words on gradients that are not the step's; "" of its own."""
        gone = ", tried with gradients of 0 as the step's own are gone"
        return gone * (self.gradient is None)

    def held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor before the step; None if they are not known."""
        return None if self.kept is None else self.kept.held(tensor)

    def attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        """The attributes of an optimizer, as they were before if that is known."""
        before = {} if self.kept is None else self.kept.attributes(optimizer)
        return {**vars(optimizer), **before}

    def part(self, optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that is looked at, of an optimizer and its parameter."""
        if not self.state:
            return parameter.detach()
        named = dict(zip(*state_of(optimizer, {id(parameter): ""}), strict=True))
        return named.get(self.state, torch.zeros(()))  # which is not bad

    def is_finite(self, **changed: Any) -> bool:
        """True if its part is finite after the step, with some settings changed."""
        return _Twin(self, self.parameter.dtype, **changed).is_finite_after_step()


class _Twin:
    """An optimizer of the same kind and state for a copy of one parameter.

    Optimizers among its attributes, which share groups or state with it, are twins as
    well. A closure that its step cannot do without has the same gradient.

    Args:
        again: The step that it is to make.
        dtype: The dtype of the copies.
        changed: Settings to change.
    """

    def __init__(self, again: _Again, dtype: torch.dtype, **changed: Any) -> None:
        self._again, parameter = again, again.parameter
        before = again.held(parameter)
        value = (parameter.detach() if before is None else before).to(dtype, copy=True)
        value[~value.isfinite()] = 0
        self._parameter = nn.Parameter(value)
        given = torch.zeros_like(value) if again.gradient is None else again.gradient
        self._gradient = given.to(dtype, copy=True)
        self._parameter.grad = self._gradient.clone()
        found = (each for _, each in optimizers_in(again.optimizer))
        own = [each for each in found if isinstance(each, Optimizer)]
        twins = dict[int, Any]()  # by the identity of what they stand for
        for each in own:
            twins[id(each)] = twin = type(each).__new__(type(each))
            Optimizer.__setstate__(twin, {"defaults": dict(each.defaults)})
            step = type(each).step
            vars(twin)["step"] = MethodType(getattr(step, "__wrapped__", step), twin)
            if id(each.param_groups) not in twins:
                twins[id(each.param_groups)] = self._groups_of(each, changed)
            if id(each.state) not in twins:
                state = {self._parameter: self._state_of(each, dtype)}
                twins[id(each.state)] = defaultdict(dict, state)
        for each in own:
            for name, value in again.attributes(each).items():
                if id(value) in twins or type(value) in ATOMS:
                    vars(twins[id(each)])[name] = twins.get(id(value), value)
        self._optimizer = twins[id(again.optimizer)]

    def _groups_of(
        self, optimizer: Optimizer, changed: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The group of the parameter alone, of which the first optimizer's is known."""
        again, place = self._again, group_of(optimizer, self._again.parameter)
        if place is None:
            return []
        is_first = optimizer is again.optimizer
        group = again.group if is_first else optimizer.param_groups[place]
        return [{**group, **changed, "params": [self._parameter]}]

    def _state_of(self, optimizer: Optimizer, dtype: torch.dtype) -> dict[str, Any]:
        """Copies of the parameter's state before the step, as far as that is known."""
        parameter, held = self._again.parameter, self._again.held
        kept = dict(optimizer.state.get(parameter, {}))
        if held(parameter) is not None:
            # State of which nothing is held was made in that step.
            parts = {k: v for k, v in kept.items() if isinstance(v, torch.Tensor)}
            old = {key: held(each) for key, each in parts.items()}
            known = {key: each for key, each in old.items() if each is not None}
            kept = {**kept, **known} if known or not old else {}
        return {k: _copied(v, parameter.dtype, dtype) for k, v in kept.items()}

    def step(self) -> None:
        """Makes the class's own step, without hooks."""
        step = self._optimizer.step
        closure = [self._loss] if _needs_closure(step) else []
        with torch.no_grad(), with_torch_function():  # which is off in hooks of ours
            step(*closure)

    def _loss(self) -> Any:
        """The closure: it has called backward, and its loss can call it as well."""
        self._parameter.grad = self._gradient.clone()
        with torch.enable_grad():
            loss: Any = (self._parameter * self._gradient).sum()
        loss.register_hook(lambda _: setattr(self._parameter, "grad", None))
        return loss

    @property
    def part(self) -> torch.Tensor:
        """The copy of what is looked at."""
        return self._again.part(self._optimizer, self._parameter)

    def is_finite_after_step(self) -> bool:
        """Makes the step; True if the copy is finite then."""
        self.step()
        return bool(self.part.isfinite().all())


def _needs_closure(step: Any) -> bool:
    """True for a step that cannot be made without a closure, such as SAM's."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _copied(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(new, copy=True) if value.dtype == old else value.clone()


def _instead(optimizer: Any, wrong: Mapping[str, float]) -> dict[str, Any]:
    """The defaults of settings that are not finite, or 0 where these are not either."""
    names = dict.fromkeys((name.partition("[")[0] for name in wrong), 0.0)
    known = {name: optimizer.defaults.get(name, 0.0) for name in names}
    return {k: 0.0 if nonfinite_in({k: each}) else each for k, each in known.items()}


def _by_settings(
    again: _Again, place: int, wrong: Mapping[str, float], found: Explanation
) -> Explanation:
    """The explanation where a nan or inf among its settings made the step's result.

    Args:
        again: The step.
        place: The place of the parameter's group.
        wrong: The settings of the step that are not finite, by name.
        found: What is said of the parameter so far.
    """
    name, was, last = type(again.optimizer).__name__, "is", ""
    if again.gradient is None:  # it is of an earlier step than that at hand
        was, last = "was", " in the last step"
    texts = [f"{_named(place, n)} of {name} {was} {v}{last}" for n, v in wrong.items()]
    made = f"that step made again with {again.given} is non-finite as well"
    found = replace(found, phase="optimizer", cause=BAD_SETTING.name)
    return replace(found, evidence=[*texts, made])


def _named(place: int, name: str) -> str:
    key, bracket, rest = name.partition("[")
    return f"param_groups[{place}]['{key}']{bracket}{rest}"


def _made_again(again: _Again, place: int, found: Explanation) -> Explanation | None:
    """The explanation if the same elements become non-finite again.

    Args:
        again: The step.
        place: The place of the parameter's group.
        found: What is said of the parameter so far, which gets a note if no copy of
            the optimizer can make the step.
    """
    try:
        with without_function_modes():  # the program's see none of it
            return _explained(again, place, found)
    except Exception as error:
        _log.debug("The step of an optimizer was not made again: %s", error)
        found.notes.append(_NOT_AGAIN)
        return None


def _explained(again: _Again, place: int, found: Explanation) -> Explanation | None:
    """See `_made_again()`."""
    optimizer, group, parameter = again.optimizer, again.group, again.parameter
    twin = _Twin(again, parameter.dtype)
    table = OpTable([])
    with OpTrace({}, table), TorchCalls() as calls:
        twin.step()
    now = again.part(optimizer, parameter)
    bad, is_bad_now = ~twin.part.isfinite(), ~now.isfinite()
    if not bool((bad & is_bad_now).any()):
        return None
    wrong = nonfinite_in(group)
    is_tried = again.held(parameter) is not None  # else its state may be bad as well
    if wrong and not (is_tried and not again.is_finite(**_instead(optimizer, wrong))):
        return _by_settings(again, place, wrong, found)
    root_op = trace_back(table.sources(twin.part))
    made = None if root_op is None else root_op.source
    if not isinstance(made, OpCall):
        return None
    is_finite = _Twin(again, torch.float64).is_finite_after_step()
    beyond = _beyond(made)  # the step's own code may cast to a narrow dtype
    ran = made.details.op if made.details else None
    if ran is not None and len(ran.operands) > 1 and again.held(parameter) is None:
        ran = replace(ran, operands=[])  # the weight may be one, which is 0 in a copy
    num, most = int(bad.sum()), int(is_bad_now.sum())
    found = replace(
        found,
        phase="optimizer",
        cause=RANGE_OVERFLOW.name if is_finite or beyond else UNDEFINED.name,
        module="",
        op=op_at(made.name, made.sites, ran),
    )
    dtype = dtype_name(now.dtype)
    width = f"in float64 it is finite: a number is 0 or inf in {dtype}" * is_finite
    width = beyond or width
    eps, own = "", group.get("eps")
    if isinstance(own, float) and not float(torch.tensor(own, dtype=now.dtype)):
        eps = f"eps={own:g} is 0 in {dtype}" * is_finite
        if eps:
            found.cause, width = UNDERFLOW.name, f"in float64 it is finite: {eps}"
        other = _EPS.get(now.dtype, 1e-8)
        remedy = Remedy(
            f"use eps={other:g} instead of {own:g}{again.how_tried}",
            f"{type(optimizer).__name__}(..., eps={other:g})",
            is_finite=again.is_finite(eps=other),
        )
        found.remedies = [remedy]
    found.remedies += update_remedies(
        made, calls.calls, again.how_tried, again.is_finite
    )
    found.remedies.sort(key=lambda each: not each.is_finite)
    rows = _rows_of_zeros(bad, again.gradient)
    found.reason = eps or width or rows
    values = f"{num} of these {most} values" if most > 1 else "that value"
    found.evidence.append(
        f"the step made again with {again.given} makes {values} non-finite; "
        f"{width or 'in float64 as well'}"
    )
    return found


def _rows_of_zeros(bad: torch.Tensor, gradient: torch.Tensor | None) -> str:
    """How many rows of the gradient are 0, where all bad values lie in such rows."""
    if gradient is None or gradient.dim() < 2 or gradient.layout != torch.strided:
        return ""
    is_zero = (gradient == 0).flatten(1).all(1)
    num, is_there = int(is_zero.sum()), is_zero[bad.flatten(1).any(1)].all()
    text = f"{num} of {len(is_zero)} rows of its gradient are 0, where these values lie"
    return text * (0 < num < len(is_zero) and bool(is_there))


def _beyond(op: OpCall) -> str:
    """The result of an operation that is beyond its dtype, or ""."""
    ran = op.details.op if op.details and op.details.is_overflow else None
    if ran is None or ran.true_value is None or ran.limit is None:
        return ""
    what = f"{ran.outputs[0].dtype}'s maximum {ran.limit:.5g}"
    is_beyond = abs(ran.true_value) > ran.limit
    return f"{plain_number(ran.true_value)} is beyond {what}" * is_beyond


def _add_bad_state(optimizer: Any, parameter: torch.Tensor, found: Explanation) -> None:
    """Adds which parts of the weight's state are non-finite where the weight is."""
    places = ~parameter.detach().isfinite()
    texts = []
    for path, tensor in tensors(dict(optimizer.state.get(parameter, {}))):
        if tensor.shape != parameter.shape or not tensor.is_floating_point():
            continue
        bad = ~tensor.detach().isfinite()
        if bool((bad & places).any()):
            what = summary_of(tensor.detach()).nonfinite_text()
            texts.append(f"{path_text(path)} {what}")
    if texts:
        name = type(optimizer).__name__
        found.evidence.append(
            f"the state of {name} holds, there too: {'; '.join(texts)}"
        )
        found.notes.append(notes.BAD_STATE)
