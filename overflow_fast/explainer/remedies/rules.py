"""The remedies of torch calls, as a table: a pattern, and what is computed instead.

Both are Python expressions. In a pattern, `x`, `a`, `b` and `c` stand for tensors, `n`
for a number, `e` for a small one that is added to keep a logarithm finite, `d` for
dimensions, `k` for `keepdim`, and `y` and `z` for anything; `f` stands for any function
that computes each element by itself. What is computed may call methods of these,
torch's functions, and

- `LOG(y)`: the logarithm of a value by how it was made, see `LOGS`;
- `CALL(key=value)`: the call itself, with other keywords, none for None; `CALL(LOW)`
  with a number in place of -inf; `CALL_ON(y)` with another first argument, and
  `CALL_SECOND(y)` with another second one;
- EPS, LEAST, SMALL, WIDE, JITTER and LOW: numbers by the dtype; N: one of several
  that are tried;
- `SAFE`: an argument of `f` at which it is finite; `DIM`: see `ratio_dim`.

The same expression is computed in a replay and written out in the report. A new remedy
is one row.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...base.torch_ops import has, op_of
from ..torch_calls import TorchCall, Value
from .source import node_at

# The logarithm of a value, by how the value was made, and the remedy in words.
# fmt: off
_OF_TANH = "2 * (0.6931471805599453 - x - F.softplus(-2 * x))"
_TANH = "write log(1 - tanh(x)^2) as 2 (log 2 - x - softplus(-2 x))"
_OF_EXPM1 = "x + (-(-x).expm1()).log()"
_EXPM1 = "write log expm1 x as x + log(-expm1(-x))"
LOGS = {
    "exp(x)": ("x", "use the argument of exp itself"),
    "softmax(x, d)": ("x.log_softmax(d)", "use log_softmax"),
    "sigmoid(x)": ("F.logsigmoid(x)", "use logsigmoid"),
    "1 - sigmoid(x)": ("F.logsigmoid(-x)", "use logsigmoid"),
    "1 + y": ("F.softplus(LOG(y))", "use softplus"),
    "exp(x) - 1": (_OF_EXPM1, _EXPM1),
    "expm1(x)": (_OF_EXPM1, _EXPM1),
    "1 - exp(x)": ("(-x.expm1()).log()", "use -expm1 instead of 1 - exp"),
    "cosh(x)": ("x.abs() + (-2 * x.abs()).exp().log1p() - 0.6931471805599453",
                "write log cosh x as |x| + log1p(exp(-2 |x|)) - log 2"),
    "1 - tanh(x) ** 2": (_OF_TANH, _TANH),
    "1 - square(tanh(x))": (_OF_TANH, _TANH),
    "sum(y, None)": ("LOG(y).flatten().logsumexp(0)", "use logsumexp"),
    "sum(y, d, k)": ("LOG(y).logsumexp(d, k)", "use logsumexp"),
    "cumsum(y, d)": ("LOG(y).logcumsumexp(d)", "use logcumsumexp"),
    "prod(y, d, k)": ("LOG(y).sum(d, k)", "use the sum of logarithms"),
    "mean(y, None)": (
        "LOG(y).flatten().logsumexp(0) - torch.tensor(LOG(y).numel()).log()",
        "use logsumexp"),
    "mean(y, d, k)": (
        "LOG(y).logsumexp(d, k) - torch.tensor(LOG(y).shape[d]).log()",
        "use logsumexp"),
    "y * z": ("LOG(y) + LOG(z)", ""),
    "y / z": ("LOG(y) - LOG(z)", ""),
    "y ** n": ("n * LOG(y)", ""),
    "sqrt(y)": ("LOG(y) / 2", ""),
    "square(y)": ("2 * LOG(y)", ""),
    "y + e": ("LOG(y)", ""),
    "a + b": ("torch.logaddexp(LOG(a), LOG(b))", "use logaddexp"),
}
# fmt: on


@dataclass(frozen=True)
class Rule:
    """An expression to compute in place of a call.

    Attributes:
        pattern: The call and what made its inputs; "*" for any call.
        new: What is computed.
        text: In words; "" for those of the `LOG`.
        when: Whether it may be of use; None for always.
        has_chosen: Whether it chooses a value where the call has none.
        settles: Whether guarded forms are worse wherever it helps.
    """

    pattern: str
    new: str
    text: str
    when: Callable[[TorchCall], bool] | None = None
    has_chosen: bool = False
    settles: bool = False

    @property
    def is_exact(self) -> bool:
        """True if it is equal in exact arithmetic, where the call has a value."""
        return self in (*EXACT, *CANCELLED) and not self.has_chosen

    @property
    def clamps(self) -> bool:
        """True if it clamps what is no count, nor a sum that stands for one."""
        is_clamp = re.search(r"\b[xy](\.abs\(\))?\.clamp\(|CALL\(\)\.clamp", self.new)
        by_what = (_counts, _is_by_sum, _is_by_at_least_0)
        return is_clamp is not None and self.when not in by_what

    def stops_gradient(self, call: TorchCall) -> bool:
        """True if what it clamps in place of a call has a gradient."""
        return self.clamps and any(value.requires_grad for value in call.inputs)


def is_count(of: Any) -> bool:
    """True for what counts: an integer, or made of integers and booleans."""
    if not isinstance(of, Value):
        return isinstance(of, int)
    if not of.dtype.is_floating_point:
        return True
    made = of.call
    if made is None or not (has(made.name, "moves") or has(made.name, "whole")):
        return False
    return all(map(is_count, made.inputs))


_DEPTH = 8  # calls deep; chosen, not measured


def is_at_least_0(of: Any, depth: int = _DEPTH) -> bool:
    """True for what is never below 0, by how it was made: a norm, a sum of squares."""
    if not isinstance(of, Value):
        return isinstance(of, (bool, int, float)) and of >= 0
    made = of.call
    if of.dtype is torch.bool or made is None or not (made.inputs and depth):
        return of.dtype is torch.bool
    name, operands = made.plain_name, made.operands
    first, second = (*operands, None, None)[:2]
    is_even = type(second) in (int, float) and second % 2 == 0
    is_square = (name == "mul" and first is second) or (name == "pow" and is_even)
    is_kept = name == "clamp" and is_at_least_0(second, depth - 1)
    if has(name, "at_least_0") or is_square or is_kept:
        return True
    parts: list[Any] = []
    if name in ("pow", "clamp"):
        parts = [first]
    elif any(has(name, kind) for kind in ("linear", "bilinear", "divides")):
        parts = operands if has(name, "promotes") else made.inputs
    elif any(has(name, kind) for kind in ("measure", "moves", "same")):
        parts = made.inputs
    return bool(parts) and all(is_at_least_0(each, depth - 1) for each in parts)


def _is_by_at_least_0(call: TorchCall) -> bool:
    return is_at_least_0(call.operands[-1])


def _counts(call: TorchCall) -> bool:
    return is_count(call.operands[1])


def _is_by_sum(call: TorchCall) -> bool:
    by = call.operands[1]
    return isinstance(by, Value) and by.call is not None and by.call.name == "sum"


def _is_by_own_least(call: TorchCall) -> bool:
    of, by = call.operands[:2]
    made = by.call if isinstance(by, Value) else None
    return made is not None and made.name in ("min", "amin") and of in made.inputs


def _is_cold(call: TorchCall) -> bool:
    made = call.inputs[0].call
    return made is not None and made.operands[1] == 0


def _is_by_count(call: TorchCall) -> bool:
    count, node = call.operands[1], node_at(call.sites[0])
    parts = ast.iter_child_nodes(node) if isinstance(node, ast.AST) else ()
    # A 0 that the line itself writes counts nothing: it is the cause.
    is_written = any(isinstance(e, ast.Constant) and e.value == count for e in parts)
    return type(count) is int and not is_written


def _narrows(call: TorchCall) -> bool:
    given, made = call.inputs[:1], call.results[:1]
    are_floats = all(value.dtype.is_floating_point for value in (*given, *made))
    return not made or (are_floats and _most_of(call) < _max_of(given[0].dtype))


def _most_of(call: TorchCall) -> float:
    return _max_of(call.results[0].dtype)


def _max_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _may_be_no_power(call: TorchCall) -> bool:
    power = call.operands[1]
    return isinstance(power, Value) or bool(power < 1 or power != int(power))


def _smooths(call: TorchCall) -> bool:
    return bool(call.kwargs.get("label_smoothing"))


def _has_weights(call: TorchCall) -> bool:
    return isinstance(call.kwargs.get("weight"), Value)


def _has_no_weights(call: TorchCall) -> bool:
    return not _has_weights(call)


def _is_of_nothing(call: TorchCall) -> bool:
    return any(0 in value.shape for value in call.inputs)


def _has_low(call: TorchCall) -> bool:
    given = (*call.args, *call.kwargs.values())
    return any(type(each) is float and each == -math.inf for each in given)


def _rounds_to_zero(call: TorchCall) -> bool:
    small = [n for n in call.operands if isinstance(n, float) and n]
    return any(not torch.tensor(n, dtype=call.dtype) for n in small)


def _rules(*rows: tuple[Any, ...]) -> tuple[Rule, ...]:
    """Makes rules of rows: pattern, expression, words, when; of `f|g(y)` two."""
    found = []
    for pattern, new, text, *when in rows:
        names, bracket, rest = pattern.partition("(")
        for name in names.split("|"):
            words = text.replace("{}", name)
            found.append(Rule(f"{name}{bracket}{rest}", new, words, *when))
    return tuple(found)


# fmt: off
_BEFORE = "scale before the product"
_FIRST = "leave values out before the call, not only after it"
_NORMALIZE = "use normalize, which divides by at least 1e-12"
_COLD = "divide by at least N, which is near the limit at 0"
# Equal in exact arithmetic, where the call has a value.
EXACT = _rules(
    ("log(y)", "LOG(y)", ""),
    ("log2(y)", "LOG(y) / 0.6931471805599453", ""),
    ("log10(y)", "LOG(y) / 2.302585092994046", ""),
    ("log1p(y)", "F.softplus(LOG(y))", "use softplus"),
    ("x / norm(x, 2, d, True)", "F.normalize(x, dim=d)",
     _NORMALIZE, None, True),
    ("where(c, f(y), z)", "where(c, f(where(c, y, SAFE)), z)", _FIRST),
    ("where(c, z, f(y))", "where(c, z, f(where(c, SAFE, y)))", _FIRST),
    ("masked_fill(f(y), c, n)", "masked_fill(f(masked_fill(y, c, SAFE)), c, n)",
     _FIRST),
    ("softmax|log_softmax|cross_entropy(y / n, z)", "CALL_ON(y / max(n, N))", _COLD,
     _is_cold, True, True),
    ("(a @ b) * n", "(a * n) @ b", _BEFORE),
    ("(a @ b) / n", "(a / n) @ b", _BEFORE),
    ("einsum(z, a, b) * n", "torch.einsum(z, a * n, b)", _BEFORE),
    ("einsum(z, a, b) / n", "torch.einsum(z, a / n, b)", _BEFORE),
    ("mean(y)", "y.sum() / max(y.numel(), 1)",
     "return 0 where there is nothing to average", _is_of_nothing, True, True),
    ("exp(y)", "CALL_ON(y - y.detach().amax(DIM, keepdim=True))",
     "subtract the maximum before exp"),
)

_LIKE = "dtype=y.dtype, device=y.device"
_KEPT = "z[z != ignore_index]"
_AT_ZERO = "divide by EPS where the divisor is 0"
_BY_SIZE = _AT_ZERO.replace("EPS", "N")
_BY_EPS, _BY_MORE = "divide by at least EPS", "divide by at least N"
_TO_N = "clamp the logarithm's argument to at least N"
_OF_DATA = f"{_TO_N}, below the data's positive numbers"
_NO_CORRECTION = "use no correction, which divides by n"
_AT_LEAST = "torch.copysign(x.abs().clamp(min=SMALL), x)"
_TO_LEAST = "divide by a magnitude of at least SMALL"
_NONE = "return 0 where there is nothing to average"
# What a later line leaves out, left out before it is computed. Tried where the loss is
# finite, and kept where it stays the same to the bit alone: where an entry is used,
# another number gives another loss. A mask may be made of the very inf that it looks
# for, which the second form of a row keeps.
_LOSSES = (
    "mse_loss|smooth_l1_loss|huber_loss|binary_cross_entropy_with_logits|kl_div|"
    "poisson_nll_loss")
SELECTS = _rules(
    (f"{_LOSSES}(x, y)", "CALL_SECOND(where(y.isnan(), 0, y))", _FIRST),
    ("y - x", "y - where(x.isnan(), 0, x)", _FIRST),
    ("x - y", "where(x.isnan(), 0, x) - y", _FIRST),
    ("x * y", "where(x.isnan(), 0, x) * y", _FIRST),
    ("y / x", "where(x == 0, 0, y / where(x == 0, 1, x))", _FIRST),
    ("y / x", "where(x == 0, (y / x).detach(), y / where(x == 0, 1, x))", _FIRST),
    ("log|log2|log10(y)", "where(y > 0, CALL_ON(where(y > 0, y, 1)), 0)", _FIRST),
    ("log|log2|log10(y)", "where(y > 0, CALL_ON(where(y > 0, y, 1)), -inf)", _FIRST),
    ("rsqrt|reciprocal(y)", "where(y > 0, CALL_ON(where(y > 0, y, 1)), 0)", _FIRST),
)
# Of what is kept for later steps, which may divide by it.
KEPT = _rules(
    ("y / x", "where(x == 0, 1, y / where(x == 0, 1, x))",
     "take 1 where the divisor is 0"),
)
# Guarded forms of a call, the mildest first.
GUARDS = _rules(
    ("cross_entropy|nll_loss(y, z)",
     "CALL(reduction='sum') / (z != ignore_index).sum().clamp(min=1)",
     "divide the sum by a count of at least 1", _has_no_weights),
    ("cross_entropy|nll_loss(y, z)",
     f"CALL(reduction='sum') / weight[{_KEPT}].sum().clamp(min=1e-8)",
     "divide the sum by a sum of weights of at least 1e-8", _has_weights),
    ("ctc_loss(*)", "CALL(zero_infinity=True)", "pass zero_infinity=True"),
    ("y / x", "y / x.clamp(min=1)", "divide by a count of at least 1", _counts),
    ("y / n", "y / max(n, 1)", "divide by a count of at least 1", _is_by_count),
    ("y / x", "y.clamp(min=EPS) / x.clamp(min=EPS)",
     "clamp to at least EPS what is divided by its own minimum", _is_by_own_least),
    ("y / x", "y / x.clamp(min=N)", _BY_MORE, _is_by_at_least_0),
    ("y / x", "y / x.clamp(min=EPS)", _BY_EPS, _is_by_at_least_0),
    ("y / x", "y / x.clamp(min=SMALL)", _BY_EPS.replace("EPS", "SMALL"),
     _is_by_at_least_0),
    ("y / x", "y / where(x == 0, N, x)", _BY_SIZE),
    ("y / x", "y / where(x == 0, EPS, x)", _AT_ZERO),
    ("y / x", f"y / {_AT_LEAST}", _TO_LEAST),
    ("y / x", "y / x.clamp(min=1)", "divide by a sum of at least 1", _is_by_sum),
    ("reciprocal(x)", "1 / where(x == 0, N, x)", _BY_SIZE),
    ("reciprocal(x)", "1 / where(x == 0, EPS, x)", _AT_ZERO),
    ("reciprocal(x)", f"1 / {_AT_LEAST}", _TO_LEAST),
    ("addcdiv(x, y, z)", "x + value * y / (z + EPS)", "add EPS to the divisor"),
    ("y ** z", "(y + EPS) ** z", "add EPS to the base of the power", _may_be_no_power),
    ("y ** z", "y.clamp(min=EPS) ** z", "clamp the base to at least EPS",
     _may_be_no_power),
    ("std(*)", "CALL(unbiased=None, correction=0)", _NO_CORRECTION),
    ("std(y, d)", "(y.var(d, correction=0) + EPS).sqrt()",
     "use no correction, and add EPS inside the root"),
    ("std(y, d)", "(y.var(d) + EPS).sqrt()",
     "add EPS inside the root of the deviation"),
    ("var|var_mean(*)", "CALL(unbiased=None, correction=0)", _NO_CORRECTION),
    ("logit(y)", "CALL(eps=WIDE)", "pass eps=WIDE to {}"),
    ("sqrt|rsqrt(y)", "CALL_ON(y + EPS)", "add EPS inside the {}"),
    ("sqrt|rsqrt|lgamma|digamma(y)", "CALL_ON(y.clamp(min=EPS))",
     "clamp the argument of {} to at least EPS"),
    ("log|log2|log10(y)", "CALL_ON(y.clamp(min=N))", _OF_DATA),
    ("log|log2|log10(y)", "CALL_ON(y.clamp(min=EPS))",
     "clamp the logarithm's argument to at least EPS"),
    ("log|log2|log10(y)", "CALL_ON(y.clamp(min=LEAST))",
     "clamp the logarithm's argument to at least LEAST"),
    ("xlogy(x, y)", "torch.xlogy(x, y.clamp(min=LEAST))",
     "clamp the logarithm's argument to at least LEAST"),
    ("log1p(y)", "CALL_ON(y.clamp(min=WIDE - 1))",
     "clamp the logarithm's argument to at least WIDE"),
    ("acos(y)", "torch.atan2((1 - y * y).clamp(min=EPS ** 2).sqrt(), y)",
     "write acos as atan2 of both sides, the other one at least EPS"),
    ("acos|asin|atanh|erfinv(y)", "CALL_ON(y.clamp(WIDE - 1, 1 - WIDE))",
     "clamp the argument of {} to a magnitude of 1 - WIDE"),
    ("acosh(y)", "CALL_ON(y.clamp(min=1 + WIDE))",
     "clamp the argument of {} to at least 1 + WIDE"),
    ("exp|expm1|exp2(y)", "CALL_ON(y.clamp(max=N))",
     "clamp the argument of {} to N"),
    ("sinh|cosh(y)", "CALL_ON(y.clamp(-N, N))",
     "clamp the argument of {} between -N and N"),
    ("poisson_nll_loss(y)", "CALL_ON(y.clamp(max=N))",
     "clamp the rate's logarithm to N"),
    ("softmax|log_softmax(y)", "CALL_ON(y.clamp(min=LOW))",
     "clamp the scores to at least LOW"),
    ("logdet|slogdet|det|inverse|cholesky(y)",
     f"CALL_ON(y + JITTER * torch.eye(y.shape[-1], {_LIKE}))",
     "add JITTER to the diagonal"),
    ("eigh|svd|eig(y)",
     f"CALL_ON(y + torch.diag(torch.linspace(0, 1e-3, y.shape[-1], {_LIKE})))",
     "add numbers from 0 to 1e-3 to the diagonal, which no two values share"),
    ("to(y)", "CALL_ON(y.clamp(-N, N))",
     "clamp to what the dtype holds before the cast", _narrows),
    ("mean|mse_loss|l1_loss|smooth_l1_loss|huber_loss|median|kl_div|"
     "binary_cross_entropy_with_logits|binary_cross_entropy(*)",
     "torch.nan_to_num(CALL())", _NONE, _is_of_nothing),
    ("nanmean|nanmedian(y, d)",
     "CALL_ON(y.masked_fill(y.isnan().all(d, keepdim=True), 0))", _NONE),
)
# Of an optimizer's step, where no gradient needs EPS inside the root: there it would be
# as large as its root.
UPDATES = _rules(
    ("rsqrt(y)", "(y.sqrt() + EPS).reciprocal()",
     "add EPS to the root, not inside the rsqrt"))
# Of what made the infs that a call was given, in its place.
MASKS = _rules(("*", "CALL(LOW)", "mask with LOW instead of -inf", _has_low))
# Of what made a mask, by which a 0 of the data was selected.
SELECTED = _rules(
    ("*", "CALL() & (y != 0)", "leave out with the mask what is 0"))
# Of a loss that gives a weight to each class, those of a mask's -inf among them.
SMOOTHED = _rules(
    ("cross_entropy(*)", "CALL(label_smoothing=0.0)",
     "pass label_smoothing=0.0: it gives a weight to masked classes, too", _smooths))
# Of a sum before a call, one of whose terms is a number that its dtype does not hold.
ROUNDED = _rules(
    ("y + n", "y + EPS", "add EPS, which the dtype holds", _rounds_to_zero))
# Of a difference of squares before a call, in which rounding has left a negative one.
_OF_SQUARES = "use var, which subtracts the mean before it squares"
CANCELLED = _rules(
    ("mean(x ** 2, d) - mean(x, d) ** 2", "x.var(d, correction=0)", _OF_SQUARES),
    ("mean(x ** 2, None) - mean(x, None) ** 2", "x.var(correction=0)", _OF_SQUARES),
    ("mean(square(x), d) - square(mean(x, d))", "x.var(d, correction=0)", _OF_SQUARES))
# Of what a layer returns as it is, to what needs a number above 0.
_LINK = "use softplus, which is above 0 and has a gradient everywhere"
LINKS = _rules(
    ("*", "F.softplus(CALL())", _LINK, None, True, True),
    ("log|log2|log10|sqrt|rsqrt|lgamma|digamma|poisson_nll_loss(y)",
     "CALL_ON(F.softplus(y))", _LINK, None, True, True))
# Of what made a value that became 0.
LOST = _rules(
    ("*", "CALL().clamp(min=EPS)", "clamp the result of CALL to at least EPS"))
# fmt: on
RULES = (
    *EXACT,
    *SELECTS,
    *KEPT,
    *GUARDS,
    *UPDATES,
    *MASKS,
    *SMOOTHED,
    *SELECTED,
    *ROUNDED,
    *CANCELLED,
    *LINKS,
    *LOST,
)

# Of LEAST the reciprocal is a number of the dtype, of SMALL its square, too, as the
# derivatives of a logarithm and of a quotient are.
_NUMBERS = {  # EPS, LEAST, SMALL, WIDE, JITTER, LOW
    torch.float64: (1e-12, 1e-300, 1e-150, 1e-7, 1e-9, -1e9),
    torch.float32: (1e-8, 1e-30, 1e-18, 1e-6, 1e-6, -1e9),
    torch.bfloat16: (1e-6, 1e-30, 1e-18, 1e-2, 1e-2, -1e9),
    torch.float16: (1e-4, 6e-5, 1e-2, 1e-3, 1e-3, -1e4),
}
_NAMES = ("EPS", "LEAST", "SMALL", "WIDE", "JITTER", "LOW", "N")
# The largest arguments of exp, the mildest first; a loss of exp(80) is of no use. The
# third bounds what several exp in a row multiply, and is seldom near a true loss.
_LARGEST = {torch.float64: (80, 20), torch.float16: (10, 5)}
# The smallest divisors of scores: those of 10 stay in float16.
_COLDEST = {torch.float16: (1e-2,)}


def numbers_of(rule: Rule, call: TorchCall, small: float = 0.0) -> tuple[float, ...]:
    """The numbers that are tried for N in place of a call.

    Args:
        rule: The rule.
        call: The call.
        small: A number that is small beside others that it is given; 0 for none.
    """
    if re.search(r"\bN\b", rule.new) is None:
        return (0.0,)
    if call.name == "to":  # of integers none is known
        is_float = call.results[0].dtype.is_floating_point
        return (_most_of(call),) if is_float else ()
    if rule.text == _COLD:
        return _COLDEST.get(call.dtype, (1e-3,))
    if rule.text in (_BY_SIZE, _BY_MORE, _OF_DATA):
        return (power_below(small),) if small else ()
    return _LARGEST.get(call.dtype, (20, 5, 2))


def power_below(number: float) -> float:
    """The power of 10 that is next below a number above 0."""
    return 10.0 ** math.floor(math.log10(number))


def named_numbers(dtype: torch.dtype, chosen: float = 0.0) -> dict[str, float]:
    """The numbers that EPS and the other names stand for."""
    numbers = (*_NUMBERS.get(dtype, _NUMBERS[torch.float32]), chosen)
    return dict(zip(_NAMES, numbers, strict=True))


def with_numbers(text: str, numbers: Mapping[str, float]) -> str:
    """A text with numbers for the names of such."""
    for name, value in numbers.items():
        is_plain = 0.1 <= abs(value) < 1e4 or not value
        number = f"{value:g}" if is_plain else f"{value:.0e}"
        if value % 1 == 0 and 1e4 <= abs(value) < 1e6 and float(number) != value:
            number = f"{value:.0f}"
        number = number.replace("e-0", "e-").replace("e+0", "e")
        text = re.sub(rf"\b{name}\b", number, text)
    return text


def safe_argument(call: TorchCall) -> float:
    """An operand whose result and derivative are finite."""
    return op_of(call.name).safe
