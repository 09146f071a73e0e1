"""Matches patterns of rules against torch calls, and computes what is put instead.

A match is a `Found`: an expression whose names stand for inputs of calls, or for more
expressions. It is computed with the tensors of a replay, and written with the code of
the program in `written`.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.nn import functional

from ...base.torch_ops import has, op_of
from ...torch_internals.tensor_internals import pytree
from ..syntax import expression_of
from ..torch_calls import SAME, TorchCall, Value
from .rules import LOGS, Rule, named_numbers, safe_argument

_LOG = re.compile(r"LOG\((\w)\)")
_MOST_EPSILON = 1e-4  # chosen: more is a part of the sum


@dataclass(frozen=True)
class Input:
    """An input of a call.

    Attributes:
        call: The call.
        place: Its place among the operands.
    """

    call: TorchCall
    place: int

    @property
    def value(self) -> Any:
        """A `Value`, or what else it is."""
        return self.call.operands[self.place]


@dataclass
class Found:
    """An expression and what its names stand for.

    Attributes:
        new: The expression.
        names: An `Input`, another `Found`, the call of `f` or a number, by name.
        calls: The calls that were read.
        moved: A call that moves values, and is to move those of "y" instead; or None.
        has_rest: Whether a call was given more than the pattern has.
        text: In words; "" for nothing of its own.
        numbers: The numbers that EPS and others stand for.
        is_idle: When it was computed, it has left all numbers to the call.
    """

    new: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    calls: list[TorchCall] = field(default_factory=list)
    moved: TorchCall | None = None
    has_rest: bool = False
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    is_idle: bool = False

    def inputs(self) -> Iterator[Input]:
        """The inputs that it is computed of."""
        for name, of in self.names.items():
            if isinstance(of, Found):
                yield from of.inputs()
            elif isinstance(of, Input) and f"LOG_{name}" not in self.names:
                yield of

    @property
    def code(self) -> str:
        """The expression as it is computed."""
        return _LOG.sub(r"LOG_\1", self.new)


def matched(
    rule: Rule,
    call: TorchCall,
    dtype: torch.dtype,
    number: float = 0.0,
    dim: Any = None,
    is_chosen: bool = False,
) -> Found | None:
    """The expression that a rule puts in place of a call; None if it is for another.

    Args:
        rule: The rule.
        call: The call.
        dtype: The dtype that numbers are chosen by.
        number: The number for N.
        dim: The dimensions for DIM.
        is_chosen: Whether it was chosen for a call of the same expression: what is
            written asks for no condition, in whatever turn of a loop.
    """
    found = Found()
    if rule.pattern == "*" and "(y" in rule.new:
        found.names["y"] = Input(call, 0)
    if rule.pattern != "*" and not _matches(parsed(rule.pattern), call, found):
        return None
    if rule.when is not None and not (is_chosen or rule.when(call)):
        return None
    found.new, found.numbers = rule.new, named_numbers(dtype, number)
    found.text = rule.text
    if "LOG(" in rule.new and not _put_logs(found):
        return None
    if "CALL" not in rule.new and (found.has_rest or any(map(_has_more, found.calls))):
        return None  # what the pattern knows nothing of
    if "DIM" in rule.new:
        found.names["DIM"] = dim
    return found


@functools.cache
def parsed(text: str) -> ast.expr:
    """An expression; `f(*)` is a call of anything."""
    return expression_of(text.replace("(*)", "(ANY)"))


OPERATORS = {
    **{ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"},
    **{ast.Pow: "pow", ast.MatMult: "matmul"},
}


def _matches(node: ast.AST, call: TorchCall, found: Found) -> bool:
    name, wanted = _shape(node)
    operands = call.operands
    if name == "f" and has(call.name, "each"):
        found.names["f"] = call
    elif name != call.plain_name:
        return False
    if len(operands) < len(wanted):
        return False
    places = list(range(len(operands)))
    if name == "f" and call.plain_name == "div":  # the divisor is its argument
        places = places[1:]
    orders = [places]
    if has(name, "commutes") and len(operands) == 2:
        orders.append(places[::-1])
    before = dict(found.names), list(found.calls), found.has_rest
    for order in orders:
        found.names, found.calls = dict(before[0]), [*before[1], call]
        rest = [] if name == "f" else [operands[i] for i in order[len(wanted) :]]
        found.has_rest = before[2] or any(
            e is not None and e is not False for e in rest
        )
        pairs = zip(wanted, order, strict=False)
        if all(_stands(each, Input(call, place), found) for each, place in pairs):
            return True
    return False


def _shape(node: ast.AST) -> tuple[str, list[ast.expr]]:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)], [node.left, node.right]
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id, node.args


def _stands(node: ast.expr, leaf: Input, found: Found) -> bool:
    of = leaf.value
    if isinstance(node, ast.Constant):
        return _is_constant(of, node.value)
    if isinstance(node, ast.Name):
        return _takes_name(node.id, leaf, found)
    made = of.call if isinstance(of, Value) else None
    if made is None:
        return False
    passes = has(made.name, "same") and made.name != "detach"  # a gradient, too
    if passes and not has(_shape(node)[0], "moves") and made.args:
        return _stands(node, Input(made, 0), found)
    return _matches(node, made, found)


def _takes_name(name: str, leaf: Input, found: Found) -> bool:
    of = leaf.value
    is_tensor = isinstance(of, Value)
    if name in ("n", "d", "k") and is_tensor and (of.shape or name != "n"):
        return False
    if name == "d" and isinstance(of, bool):
        return False
    if name == "e" and not (type(of) is float and 0 < of <= _MOST_EPSILON):
        return False
    if name in ("x", "a", "b", "c") and not is_tensor:
        return False
    if name in found.names:
        known = found.names[name].value
        is_number = type(known) is type(of) and not is_tensor
        return known is of or (is_number and bool(known == of))
    found.names[name] = leaf
    return True


def _is_constant(of: Any, wanted: Any) -> bool:
    if isinstance(of, Value) or wanted is None or isinstance(wanted, bool):
        return of is wanted
    if wanted == 2 and of in (None, "fro"):  # the default of a norm
        return True
    is_number = isinstance(of, (int, float)) and not isinstance(of, bool)
    return is_number and abs(of - wanted) <= 1e-7 * abs(wanted)  # as float32 has it


def _has_more(call: TorchCall) -> bool:
    """True if a call was given a keyword that no pattern reads, such as a dtype."""
    known = {*(op_of(call.name).parameters or ("input",)), "", "alpha", "value", "out"}
    more = {k: v for k, v in call.kwargs.items() if SAME.get(k, k) not in known}
    is_scaled = call.kwargs.get("alpha", 1) != 1
    return is_scaled or any(v is not None and v is not False for v in more.values())


# The logarithm of a value, by how it was made.

_DEPTH = 12  # calls deep; chosen, not measured


def _put_logs(found: Found, depth: int = _DEPTH) -> bool:
    """Fills in the `LOG`s of an expression; False if none is known by its making."""
    is_known = False
    for name in dict.fromkeys(_LOG.findall(found.new)):
        inner, is_inner = _log_of(found.names[name], depth)
        found.names[f"LOG_{name}"] = inner
        found.calls += inner.calls
        found.text = found.text or inner.text
        is_known |= is_inner
    return is_known


def _log_of(leaf: Input, depth: int) -> tuple[Found, bool]:
    """The logarithm of a value, and whether it is known without computing the value."""
    value = leaf.value
    made = value.call if isinstance(value, Value) else None
    plain = Found("log(y)", {"y": leaf})
    if made is None or depth == 0 or made.is_in_place or not made.args:
        return plain, False
    is_moved = has(made.name, "moves") and made.name != "broadcast_tensors"
    if is_moved and isinstance(made.args[0], Value):
        inner, is_known = _log_of(Input(made, 0), depth - 1)
        moved = _moved(made, value.place, inner)
        return (moved, True) if is_known else (plain, False)
    for pattern, (new, text) in LOGS.items():
        found = Found(new, text=text)
        if not _matches(parsed(pattern), made, found) or found.has_rest:
            continue
        if any(map(_has_more, found.calls)):
            continue
        if "LOG(" not in new or _put_logs(found, depth - 1):
            return found, True
    return plain, False


def _moved(call: TorchCall, place: int, inner: Found) -> Found:
    """An expression whose values a call moves."""
    calls, text = [call, *inner.calls], inner.text
    moved = Found("", {"y": inner}, calls, call, text=text)
    if len(call.results) > 1:
        return Found(f"y[{place}]", {"y": moved}, calls, text=text)
    return moved


# Computes what is put in place of a call.


def _log(of: Any) -> Any:
    return of.log() if isinstance(of, torch.Tensor) else math.log(of)


# What expressions may call, besides methods.
SPACE: dict[str, Any] = {
    **{"torch": torch, "F": functional, "max": max, "log": _log, "inf": math.inf},
    **{"masked_fill": torch.masked_fill, "value": 1},
}


def computed(found: Found, call: TorchCall, args: Any, kwargs: Any) -> Any:
    """Computes an expression in place of a call.

    Args:
        found: The expression.
        call: The call.
        args: The tensors and what else it was given.
        kwargs: The same by name.
    """
    if found.moved is not None:
        return _move(found.moved, computed(found.names["y"], call, args, kwargs))
    space: dict[str, Any] = {**SPACE, **kwargs, **found.numbers}
    space["where"] = functools.partial(_where, found)
    space["CALL"] = _changed(call, args, kwargs)
    space["CALL_ON"] = lambda of: call.func(of, *args[1:], **kwargs)
    space["CALL_SECOND"] = lambda of: call.func(args[0], of, *args[2:], **kwargs)
    for name, of in found.names.items():
        if isinstance(of, Found):
            space[name] = computed(of, call, args, kwargs)
        elif isinstance(of, TorchCall):
            space["f"] = functools.partial(_again, of)
            space["SAFE"] = safe_argument(of)
        else:
            space[name] = _tensor_of(of.value) if isinstance(of, Input) else of
    space["k"] = bool(space.get("k"))
    return eval(_compiled(found.code), space)


def _where(found: Found, condition: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
    """`torch.where`, which may put a number in the place of none."""
    has_first = isinstance(one, torch.Tensor)
    if has_first != isinstance(other, torch.Tensor):
        found.is_idle |= bool((condition if has_first else ~condition).all())
    return torch.where(condition, one, other)


@functools.cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<rule>", "eval")


def _changed(call: TorchCall, args: Any, kwargs: Any) -> Callable[..., Any]:
    """The call with other keywords; a number for -inf, None for no keyword."""

    def again(low: float = -math.inf, **changes: Any) -> Any:
        def lower(of: Any) -> Any:
            return low if type(of) is float and of == -math.inf else of

        new = {k: v for k, v in {**kwargs, **changes}.items() if k != "out"}
        dropped = {k for k, v in changes.items() if v is None}
        new = {k: lower(v) for k, v in new.items() if k not in dropped}
        return call.func(*pytree.tree_map(lower, args), **new)

    return again


def _tensor_of(of: Any) -> Any:
    return of.tensor if isinstance(of, Value) else of


def _move(move: TorchCall, of: Any) -> Any:
    args, kwargs = pytree.tree_map(_tensor_of, (move.args[1:], move.kwargs))
    return move.func(of, *args, **kwargs)


def _again(call: TorchCall, of: torch.Tensor) -> Any:
    """A call with another operand: the divisor of a quotient, else the first."""
    if call.plain_name == "div":
        return _tensor_of(call.operands[0]) / of
    args, kwargs = pytree.tree_map(_tensor_of, (call.args[1:], call.kwargs))
    return call.func(of, *args, **kwargs)
