"""Forms of an expression that are the same in exact arithmetic, and stay in range."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..statement_names import written
from .source_rewrites import (
    Edit,
    SourceFile,
    Written,
    atom,
    following,
    loads,
    preceding,
    statement_of,
    target_of,
)

_DIVISIONS = {"div", "divide", "true_divide"}
_LOG_2 = "0.6931471805599453"
_OF_VALUE = "exact_argument"  # a variable for an argument that is needed twice
Forms = Iterator[tuple[str, list[Edit]]]


def exact_forms(source: SourceFile, node: ast.AST) -> Forms:
    """Yields edits of an expression, or of those around it, to an equal form.

    Args:
        source: The file.
        node: The call that failed, or whose result has lost a value.
    """
    for each in (node, *source.around(node)):
        if isinstance(each, ast.stmt):
            break
        found = _closed_form(source, each, node)
        if found is not None:
            text, code, edits = found
            yield text, [*edits, Edit(each, code)]
            return
    yield from _less_its_maximum(source, node)


def _closed_form(
    source: SourceFile, whole: ast.AST, node: ast.AST
) -> tuple[str, str, list[Edit]] | None:
    """An equal form of an expression: in words, as code, and what else changes.

    None if none is known.
    """
    written = Written(source, whole)
    if written.is_in_place or not written.nodes:
        return None
    if written.name in ("log", "log1p"):
        for form in _OF_LOG if written.name == "log" else _OF_LOG1P:
            inner = _Inner(source, written.nodes[0])
            found = form(source, inner)
            if found is not None:
                return *found, inner.edits
    if written.name in ("atanh", "arctanh"):
        inner = _Inner(source, written.nodes[0])
        of = inner.argument_of("tanh")
        return (
            ("use the argument of tanh itself", f"({of})", inner.edits) if of else None
        )
    if written.name in _DIVISIONS and len(written.nodes) == 2:
        found = _of_quotient(source, written, node) or _of_norm(source, written)
        return None if found is None else (*found, [])
    return None


class _Inner:
    """An argument, with the expression that gave a variable its value.

    Args:
        source: The file.
        node: The argument.
        outer: The expression that it is of, or None.

    Attributes:
        node: The argument, or the expression that gave it its value.
        written: The same, as it is written.
        edits: They give a name to what another line calls: it is not called twice.
    """

    def __init__(
        self, source: SourceFile, node: ast.AST, outer: _Inner | None = None
    ) -> None:
        self._source = source
        self.node = _defined(source, node)
        self.written = Written(source, self.node)
        self._given = node
        self._comes_elsewhere = outer is not None and outer._is_elsewhere
        self._is_elsewhere: bool = self._comes_elsewhere or self.node is not node
        self.edits: list[Edit] = [] if outer is None else outer.edits

    def argument_of(self, name: str) -> str:
        """The argument of a function that this is a call of, or ""."""
        is_it = self.written.name == name and bool(self.written.nodes)
        if not is_it or self._source.text_of(self.written.nodes[0]) == "self":
            return ""  # that is a module
        return self._text_of(self.written.nodes[0], self._is_elsewhere)

    @property
    def text(self) -> str:
        """Its code, as it was given."""
        return self._text_of(self._given, self._comes_elsewhere)

    def _text_of(self, node: ast.AST, is_elsewhere: bool) -> str:
        text = self._source.text_of(node)
        if not is_elsewhere or not any(map(_is_call, ast.walk(node))):
            return text
        name = f"{_OF_VALUE}_{len(self.edits) + 1}" if self.edits else _OF_VALUE
        self.edits.append(Edit(node, f"({name} := {text})"))
        return name

    def operands_of(self, name: str) -> tuple[ast.AST, ast.AST] | None:
        """The two operands of an operator that this is, or None."""
        if self.written.name != name or len(self.written.nodes) != 2:
            return None
        left, right = self.written.nodes
        return left, right


def _is_call(node: ast.AST) -> bool:
    """True for a call, but of a function of Python's own `math`."""
    of = getattr(getattr(node, "func", None), "value", None)
    return isinstance(node, ast.Call) and getattr(of, "id", "") != "math"


def _defined(source: SourceFile, node: ast.AST) -> ast.AST:
    """The expression that gave a variable its value, if nothing of it changed since."""
    statement = statement_of(source, node)
    if not isinstance(node, ast.Name) or statement is None:
        return node
    between: list[ast.stmt] = []
    for each in reversed(preceding(source, statement)):
        value = getattr(each, "value", None)
        if isinstance(value, ast.expr) and target_of(each, value) == node.id:
            names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            is_kept = not any(written(other) & names for other in between)
            return value if is_kept else node
        if node.id in written(each):
            return node
        between.append(each)
    return node


def twice(text: str) -> tuple[str, str]:
    """Code that evaluates an argument, and code that reads its value again."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, (ast.Name, ast.Attribute, ast.Constant)):
        return text, text
    return f"({_OF_VALUE} := {text})", _OF_VALUE


def functional_name(source: SourceFile, name: str) -> str:
    """A function of torch.nn.functional, by the names that a file has for it."""
    for prefix in ("F", "nn.functional", "torch.nn.functional"):
        if prefix.partition(".")[0] in source.imports:
            return f"{prefix}.{name}"
    return ""


# Arguments of a logarithm.


def _log_of_exp(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("exp")
    return ("use the argument of exp itself", f"({of})") if of else None


def _log_of_cosh(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("cosh")
    if not of:
        return None
    first, again = twice(of)
    code = (
        f"({atom(first)}.abs() + (-2 * {atom(again)}.abs()).exp().log1p() - {_LOG_2})"
    )
    return "write log cosh x as |x| + log1p(exp(-2 |x|)) - log 2", code


def _log_of_expm1(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("expm1")
    return _of_expm1(of) if of else None


def _of_expm1(of: str) -> tuple[str, str]:
    first, again = twice(of)
    code = f"({atom(first)} + (-(-{atom(again)}).expm1()).log())"
    return "write log expm1 x as x + log(-expm1(-x))", code


def _log_of_softmax(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("softmax")
    if not of:
        return None
    return "use log_softmax", f"{atom(of)}.log_softmax({inner.written.argument})"


def _log_of_sigmoid(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of, function = inner.argument_of("sigmoid"), functional_name(source, "logsigmoid")
    pair = inner.operands_of("sub")
    if pair is not None and _is_number(pair[0], 1):
        of = _Inner(source, pair[1], inner).argument_of("sigmoid")
        of = f"-{atom(of)}" if of else ""
    return ("use logsigmoid", f"{function}({of})") if of and function else None


def _log_of_sum(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    total = _sum_of(source, inner.node)
    of = "" if total is None else _logarithm(source, _Inner(source, total.of, inner))
    if total is None or not of:
        return None
    if not total.dim:
        return "use logsumexp", f"{atom(of)}.flatten().logsumexp(0)"
    keeps = ", keepdim=True" * total.keeps
    return "use logsumexp", f"{atom(of)}.logsumexp({total.dim}{keeps})"


def _logarithm(source: SourceFile, inner: _Inner) -> str:
    """The logarithm of an exp, or of a product with one, such as a density; or ""."""
    of = inner.argument_of("exp")
    if of:
        return of
    for name, sign in (("mul", "+"), ("div", "-")):
        pair = inner.operands_of(name)
        factors = [_Inner(source, each, inner) for each in pair or ()]
        if not any(_has_exp(source, each) for each in factors):
            continue
        logs = [_logarithm(source, each) or _log_of_factor(each) for each in factors]
        return f"{atom(logs[0])} {sign} {atom(logs[1])}" if all(logs) else ""
    return ""


def _has_exp(source: SourceFile, inner: _Inner) -> bool:
    if inner.written.name == "exp":
        return True
    pair = inner.operands_of("mul") or inner.operands_of("div") or ()
    return any(_has_exp(source, _Inner(source, each)) for each in pair)


def _log_of_factor(inner: _Inner) -> str:
    """The logarithm of a tensor, or "" for what may be a number."""
    names = {n.id for n in ast.walk(inner.node) if isinstance(n, ast.Name)}
    return f"{atom(inner.text)}.log()" if names - {"math"} else ""


def _log_of_one_and_exp(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    for name in ("add", "sub"):
        pair = inner.operands_of(name)
        for side in (0, 1) if pair is not None else ():
            assert pair is not None
            if not _is_number(pair[side], 1):
                continue
            of = _Inner(source, pair[1 - side], inner).argument_of("exp")
            if not of:
                continue
            if name == "add":
                return _softplus(source, of)
            if side == 0:
                return "use -expm1 instead of 1 - exp", f"(-{atom(of)}.expm1()).log()"
            return _of_expm1(of)
    return None


def _log1p_of_exp(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("exp")
    return _softplus(source, of) if of else None


def _softplus(source: SourceFile, of: str) -> tuple[str, str] | None:
    function = functional_name(source, "softplus")
    return ("use softplus", f"{function}({of})") if function else None


def _log_of_product(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    of = inner.argument_of("prod")
    if not of:
        return None
    return (
        "use the sum of logarithms",
        f"{atom(of)}.log().sum({inner.written.argument})",
    )


def _log_of_tanh(source: SourceFile, inner: _Inner) -> tuple[str, str] | None:
    """Of 1 - tanh(x)^2, as squashed Gaussian policies have it."""
    pair, function = inner.operands_of("sub"), functional_name(source, "softplus")
    if pair is None or not _is_number(pair[0], 1) or not function:
        return None
    power = Written(source, pair[1])
    is_two = len(power.nodes) == 2 and _is_number(power.nodes[1], 2)
    if power.name != "square" and not (power.name == "pow" and is_two):
        return None
    of = _Inner(source, power.nodes[0], inner).argument_of("tanh")
    if not of:
        return None
    first, again = twice(of)
    code = f"(2 * ({_LOG_2} - {atom(first)} - {function}(-2 * {atom(again)})))"
    return "write log(1 - tanh(x)^2) as 2 (log 2 - x - softplus(-2 x))", code


_Form = Callable[[SourceFile, _Inner], tuple[str, str] | None]
_OF_LOG: tuple[_Form, ...] = (
    *(_log_of_exp, _log_of_cosh, _log_of_expm1, _log_of_softmax, _log_of_sigmoid),
    *(_log_of_sum, _log_of_one_and_exp, _log_of_tanh, _log_of_product),
)
_OF_LOG1P: tuple[_Form, ...] = (_log1p_of_exp,)


def _is_number(node: ast.AST, value: float) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


# Softmax that is written out.


@dataclass(frozen=True)
class _Sum:
    """A sum along a dimension, or of all: of what, along which, and if it is kept."""

    of: ast.AST
    dim: str
    keeps: bool


def _of_quotient(
    source: SourceFile, written: Written, node: ast.AST
) -> tuple[str, str] | None:
    """Softmax, where an exp is divided by its sum."""
    above, total = written.nodes[0], _sum_of(source, written.nodes[1])
    power = Written(source, above)
    if total is None or power.name != "exp" or not power.nodes or not total.dim:
        return None
    is_same = source.text_of(above) == source.text_of(total.of)
    if not is_same or not total.keeps or node not in (above, total.of):
        return None
    return "use softmax", f"{atom(source.text_of(power.nodes[0]))}.softmax({total.dim})"


def _of_norm(source: SourceFile, written: Written) -> tuple[str, str] | None:
    """F.normalize, where a tensor is divided by its own norm."""
    above, function = written.nodes[0], functional_name(source, "normalize")
    norm = _Inner(source, written.nodes[1]).written
    is_own = norm.name in ("norm", "vector_norm") and bool(norm.nodes)
    is_own = is_own and source.text_of(norm.nodes[0]) == source.text_of(above)
    if not is_own or not function or norm.keyword("keepdim") != "True":
        return None
    power = "".join(source.text_of(each) for each in norm.nodes[1:2])
    power = norm.keyword("p") or norm.keyword("ord") or power
    if len(norm.nodes) > 2 or power not in ("", "2", "2.0"):
        return None
    dim, text = norm.keyword("dim"), source.text_of(above)
    code = f"{function}({text}, dim={dim})"
    return ("use normalize, which divides by at least 1e-12", code) if dim else None


def _less_its_maximum(source: SourceFile, node: ast.AST) -> Forms:
    """Yields an exp less its maximum, where the result is divided by its sum later."""
    power = Written(source, node)
    if power.name != "exp" or not power.nodes:
        return
    dim = _dim_of_later_sum(source, node)
    if dim:
        of = power.operands[0]
        less = f"({of} - {of}.amax({dim}, keepdim=True))"
        yield "subtract the maximum before exp", [Edit(node, power.with_operands(less))]


def _dim_of_later_sum(source: SourceFile, node: ast.AST) -> str:
    """The dimension along which a variable is summed that is divided by it, or ""."""
    statement = statement_of(source, node)
    name = target_of(statement, node)
    if statement is None or not name:
        return ""
    dims, num_used = [], 0
    reads = [r for each in following(source, statement) for r in loads(each, {name})]
    for read in reads:
        around = [e for e in source.around(read) if not isinstance(e, ast.Attribute)]
        total = _sum_of(source, around[0])
        if total is not None and total.of is read and total.keeps and total.dim:
            dims.append(total.dim)
        written = Written(source, around[0])
        num_used += written.name in _DIVISIONS and written.nodes[0] is read
    is_ratio = len(dims) == 1 and num_used == 1 and len(reads) == 2
    return dims[0] if is_ratio else ""


def _sum_of(source: SourceFile, node: ast.AST) -> _Sum | None:
    written = Written(source, node)
    if written.name != "sum" or not isinstance(node, ast.Call) or not written.nodes:
        return None
    rest = [source.text_of(each) for each in written.nodes[1:]]
    dim = written.keyword("dim") or "".join(rest[:1])
    keeps = written.keyword("keepdim") or "".join(rest[1:2])
    return _Sum(written.nodes[0], dim, keeps == "True")
