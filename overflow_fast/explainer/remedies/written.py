"""Writes what was tried in place of torch calls, with the program's own expressions.

Flow: `rule_edits` asks a `Writer` for each call of a place; what it writes must be the
same in each turn of a loop. A writer fills the names of a rule's expression with nodes
of the file, and returns the edit of the call's own node. Nothing here is run. What has
no text that says the same is a `NotWrittenError`, and is told in words.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...base.source_files import installed_name, is_of_program
from ...base.torch_ops import has, op_of
from ..syntax import expression_of
from ..torch_calls import SAME, Key, TorchCall, Value
from ..users_lines import Site
from .edited_lines import inner_place
from .patterns import OPERATORS, Found, Input, parsed
from .rules import safe_argument, with_numbers
from .source import Edit, NotWrittenError, SourceText, node_at, rebuilt, unparsed

_MOST_TEXT = 60  # characters; a longer call is cut short where it is only named
_MOST_TURNS = 64  # of a loop, whose texts are compared


def short_text(call: TorchCall) -> str:
    """How a call is written, or else its name."""
    node = node_at(call.sites[0])
    text = call.name if node is None else unparsed(node)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 4]} ..."


def rule_edits(
    root: TorchCall,
    calls: Sequence[TorchCall],
    found_of: Callable[[TorchCall], Found | None],
) -> tuple[Edit, ...]:
    """The edits that put an expression in place of the calls of a key.

    Raises:
        NotWrittenError: If it has no text, or another one in each turn of a loop.
    """
    alike = [*first_turns(call for call in calls if call.key == root.key)]
    found = [found_of(call) for call in alike]
    if not all(found):
        raise NotWrittenError("it differs from one turn of a loop to another")
    pairs = zip(alike, found, strict=True)
    texts = [Writer(c, calls).edits(f) for c, f in pairs if f is not None]
    if any(each != texts[0] for each in texts):
        raise NotWrittenError("it reads values of earlier turns of a loop")
    return texts[0]


def first_turns(calls: Iterable[TorchCall]) -> Iterator[TorchCall]:
    """Yields calls, and of each key those of the first turns of a loop alone."""
    turns = Counter[Key]()
    for call in calls:
        turns[call.key] += 1
        if turns[call.key] <= _MOST_TURNS:
            yield call


_IS_CALL = re.compile(r"CALL\([^()]*\)")
_OF_VALUE = "exact_argument"  # a variable for what is needed twice, or elsewhere
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Writer(ast.NodeTransformer):
    """Writes another expression for that of a call.

    Attributes:
        node: The expression or augmented assignment of the file that is replaced.
        expression: How the call is written: the same, but of what a module of torch
            calls, with the module's arguments and attributes.
    """

    def __init__(self, root: TorchCall, calls: Sequence[TorchCall]) -> None:
        self._root, self._calls, self._names = root, calls, dict[str, Any]()
        self._numbers: dict[str, float] = {}
        self._read: set[ast.AST] = set()  # what may be computed once, and stands here
        self._kept: dict[ast.AST, ast.Name] = {}  # names of what else may be so
        is_inner = len(root.sites) == 2 and bool(inner_place(root))
        self._site = root.sites[-1] if is_inner else root.sites[0]
        if not is_of_program(self._site.file):
            raise NotWrittenError("it is in an installed package")
        self._source = SourceText.of(self._site.file)
        self.node = node_at(self._site)
        if self.node is None:
            raise NotWrittenError("its code is not known")
        if root.name == "__setitem__":
            self.node = self._source.parents[self.node].value  # type: ignore[attr-defined]
        self.expression: Any = self.node
        if is_inner:
            made = _of_torch_module(root.sites[0], self.node)
            named = [n for n in ast.walk(made) if getattr(n, "id", "") == "F"]
            self.expression = rebuilt(made, {n: self._module("F") for n in named})

    def edits(self, found: Found) -> tuple[Edit, ...]:
        """The edit that puts an expression in the place of the call."""
        self._numbers = found.numbers
        new = self.written(found)
        if self._root.is_in_place and not _IS_CALL.fullmatch(found.new):
            new = self._in_place(new)
        return self.edits_to(new)

    def _in_place(self, new: Any) -> ast.AST:
        """The call, which writes as it did, with the second operand of an expression.

        Where the first one is another, too, a statement that writes the whole.

        Raises:
            NotWrittenError: If there is none, or autograd has kept what was there, or
                only a part is written to.
        """
        target = operand_of(self._root, 0, self.expression)
        is_same = isinstance(new, ast.BinOp) and target is not None
        is_same = is_same and OPERATORS.get(type(new.op)) == self._root.plain_name
        is_same = is_same and ast.unparse(new.left) == ast.unparse(target)
        node = self.node
        is_statement = isinstance(node, ast.AugAssign)
        if is_same and isinstance(node, ast.AugAssign):
            return ast.AugAssign(node.target, node.op, new.right)
        if is_same:
            other: ast.AST = self.with_operands(self._root, {1: new.right})
            return other
        if is_statement and self._is_fresh(target):
            return ast.Assign([target], new)
        is_part = isinstance(target, ast.Subscript)  # which may be a copy
        if is_part or not is_statement or self._root.operands[0].requires_grad:
            raise NotWrittenError("it writes to its argument")
        return ast.Expr(ast.Call(ast.Attribute(target, "copy_"), [new], []))

    def _is_fresh(self, target: ast.AST) -> bool:
        """True if a statement has assigned what is written to, as a new tensor."""
        made = self._root.operands[0].call
        if made is None or has(made.name, "moves"):
            return False
        given = self._source.parents.get(node_at(made.sites[0]))
        names = given.targets if isinstance(given, ast.Assign) else []
        is_own = [ast.unparse(each) for each in names] == [ast.unparse(target)]
        return is_own and made.sites[0].code is self._site.code

    def edits_to(self, new: ast.expr) -> tuple[Edit, ...]:
        """The edit that writes an expression in place of the call.

        With those that give a name to what may be computed once alone.
        """
        kept: list[tuple[Any, ast.Name]] = list(self._kept.items())
        named = {node: ast.NamedExpr(name, node) for node, name in kept}
        new = rebuilt(new, {each: named.pop(each) for each in self._read & set(named)})
        file = self._site.file
        edits = [Edit.of(file, node, by_name) for node, by_name in named.items()]
        return (Edit.of(file, self.node, new), *edits)

    def _once(self, node: Any, call: TorchCall) -> Any:
        """An expression, or the name of its value where that may be computed once."""
        is_other = self._has_other_names(node, call)
        if not (is_other or any(map(self._is_costly, ast.walk(node)))):
            return node
        if not is_other and self._is_inside(node) and node not in self._read:
            self._read.add(node)
            return node
        if node not in self._kept:
            self._check_nameable(node, call)
            number = f"_{len(self._kept) + 1}" if self._kept else ""
            self._kept[node] = ast.Name(f"{_OF_VALUE}{number}")
        return self._kept[node]

    def _check_nameable(self, node: ast.AST, call: TorchCall) -> None:
        """Raises NotWrittenError if a name may have another value at the changed place.

        As where it is computed later, or in other turns of a loop.
        """
        times = {sum(e.key == of.key for e in self._calls) for of in (call, self._root)}
        is_later = call.sites[0].line > self._site.line
        kinds = (*_SCOPES, ast.FunctionDef, ast.AsyncFunctionDef)
        around = self._source.around(node)
        scope = next((each for each in around if isinstance(each, kinds)), None)
        is_placed = node in self._source.parents and not isinstance(scope, _SCOPES)
        if len(times) > 1 or is_later or not is_placed:
            raise NotWrittenError("an argument of it may be computed once alone")

    def _is_inside(self, node: ast.AST) -> bool:
        return any(e is self.node for e in (node, *self._source.around(node)))

    def _is_costly(self, node: ast.AST) -> bool:
        """True for a call that may do more than compute a value, as of a module."""
        if not isinstance(node, ast.Call) or node in self._pure:
            return False
        return not hasattr(torch.Tensor, getattr(node.func, "attr", ""))

    @functools.cached_property
    def _pure(self) -> set[ast.AST]:
        """The expressions of torch calls that return the same each time."""
        own = [c for c in self._calls if c.sites[0].code is self._site.code]
        alike = [c.sites[0] for c in own if not has(c.name, "random")]
        return {node_at(site) for site in {s.instruction: s for s in alike}.values()}

    # What the names of an expression stand for.

    def written(self, found: Found) -> Any:
        """An expression of a rule, with nodes of the file for its names."""
        if found.moved is not None:
            inner = self.written(found.names["y"])
            return self.with_operands(found.moved, {0: inner})
        outer, self._names = self._names, found.names
        written = self.visit(copy.deepcopy(parsed(found.code)))
        self._names = outer
        return written

    def visit_Name(self, node: ast.Name) -> Any:
        """Writes what a name stands for."""
        name, of = node.id, self._names.get(node.id)
        if isinstance(of, Found):
            return self.written(of)
        if name in self._names:
            return self.text_of(of) if isinstance(of, Input) else _constant(of)
        if name == "SAFE":
            return ast.Constant(safe_argument(self._names["f"]))
        if name in self._numbers:
            return ast.Name(with_numbers(name, self._numbers))
        if name == "inf":
            return parsed('float("inf")')
        if name == "value" or name in self._root.kwargs:
            return self._keyword(name)
        if name in ("where", "masked_fill"):
            return ast.Attribute(self._module("torch"), name)
        return self._module(name) if name in ("torch", "F") else node

    def visit_Call(self, node: ast.Call) -> Any:
        """Writes a call; arguments at its end that say nothing are left out."""
        name = getattr(node.func, "id", "")
        if name == "f":
            call = self._names["f"]
            place = int(call.plain_name == "div")
            return self.with_operands(call, {place: self.visit(node.args[0])})
        if name in ("CALL_ON", "CALL_SECOND"):
            place = int(name == "CALL_SECOND")
            return self.with_operands(self._root, {place: self.visit(node.args[0])})
        if name == "CALL":
            return self._changed(node)
        if name == "log":
            of = self._names[getattr(node.args[0], "id", "")]
            if not isinstance(of.value, Value):
                return _constant(math.log(of.value))
            return ast.Call(ast.Attribute(self.text_of(of), "log"), [], [])
        made: Any = self.generic_visit(node)
        while made.args and _is_none(made.args[-1], False):
            made.args.pop()
        return made

    def _module(self, name: str) -> ast.expr:
        """The name that the file has for a module."""
        whole = head = "torch.nn.functional" if name == "F" else name
        while head and head not in self._source.imports:
            head = head.rpartition(".")[0]
        if not head:
            raise NotWrittenError(f"the file does not import {whole}")
        return parsed(self._source.imports[head] + whole.removeprefix(head))

    def _changed(self, node: ast.Call) -> Any:
        """The call with other keywords, and a number in place of -inf."""
        whole, new = self.expression, {each.arg: each.value for each in node.keywords}
        if not (new or node.args):
            return self._once(_value_of(self.node), self._root)
        lows = [self.visit(each) for each in node.args]
        if self._root.name == "__setitem__":
            return lows[0]
        if not isinstance(whole, ast.Call):
            raise NotWrittenError("the call is an operator")
        made = rebuilt(whole, {self._low_in(whole): low for low in lows})
        made = ast.Call(made.func, list(made.args), list(made.keywords))
        for place, name in enumerate(parameters_of(self._root.func)[: len(made.args)]):
            if name in new:
                made.args[place] = self.visit(new.pop(name))
        made.keywords = [each for each in made.keywords if each.arg not in new]
        for key, value in new.items():
            if not _is_none(value):
                made.keywords.append(ast.keyword(key, self.visit(value)))
        return made

    def _low_in(self, call: ast.Call) -> ast.expr:
        """Where -inf is written in a call, or else the argument that is -inf."""
        for inner in ast.walk(call):
            if isinstance(inner, ast.expr) and ast.unparse(inner).lower() in _LOWS:
                return inner
        for place, value in enumerate(self._root.args):
            node = operand_of(self._root, place, call)
            if node is not None and type(value) is float and value == -math.inf:
                return node  # type: ignore[no-any-return]
        raise NotWrittenError("-inf is written elsewhere")

    def text_of(self, leaf: Input) -> Any:
        """The expression of an input of a call."""
        is_number = not isinstance(leaf.value, Value)
        node = operand_of(leaf.call, leaf.place, self.expression_of(leaf.call))
        if is_number and (node is None or isinstance(node, ast.Constant)):
            return _constant(leaf.value)
        if node is None:
            raise NotWrittenError(f"an input of {leaf.call.name} has no text")
        return self._once(node, leaf.call)

    def expression_of(self, call: TorchCall) -> Any:
        """How a call is written in the changed function."""
        if call is self._root:
            return self.expression
        if call.sites[0].code is not self._site.code:
            raise NotWrittenError("it reads values of another function")
        return node_at(call.sites[0])

    def _has_other_names(self, node: ast.AST, call: TorchCall) -> bool:
        """True if a name in an expression has another value by the changed place."""
        site = call.sites[0]
        first, last = sorted((site.line, self._site.line))
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return site.code is self._site.code and any(
            first <= each.lineno < last and each.id in names
            for each in self._source.stores
        )

    def _keyword(self, name: str) -> Any:
        for each in getattr(self.expression, "keywords", ()):
            if each.arg == name:
                return self._once(each.value, self._root)
        value = self._root.kwargs.get(name, 1)
        if isinstance(value, Value):
            raise NotWrittenError(f"{name} has no text")
        return _constant(value)

    def with_operands(self, call: TorchCall, new: dict[int, ast.expr]) -> Any:
        """The expression of a call with other operands, by their places."""
        node = self.expression_of(call)
        old = [operand_of(call, place, node) for place in new]
        if node is None or None in old or isinstance(node, _SCOPES):
            raise NotWrittenError(f"{call.name} has no text")
        return rebuilt(_value_of(node), dict(zip(old, new.values(), strict=True)))

    def name_of(self, call: TorchCall, place: int) -> str:
        """The text of an operand that says the same at the changed place; else ""."""
        node = operand_of(call, place, self.expression_of(call))
        is_same = node is not None and not self._has_other_names(node, call)
        return ast.unparse(node) if is_same else ""


def _of_torch_module(site: Site, outer: Any) -> ast.expr:
    """The call that a module of torch makes, with the arguments of its own call.

    Args:
        site: The call within the module's forward.
        outer: The call of the module.

    Raises:
        NotWrittenError: If its forward does more than to return that.
    """
    source, inner = SourceText.of(site.file), node_at(site)
    around = [] if inner is None else list(source.around(inner))
    forward = next((each for each in around if isinstance(each, ast.FunctionDef)), None)
    is_torchs = installed_name(site.file).startswith("torch/nn/modules/")
    is_whole = bool(around) and isinstance(around[0], ast.Return)
    if not (is_torchs and is_whole and isinstance(outer, ast.Call) and forward):
        raise NotWrittenError("it is in an installed package")
    names = [each.arg for each in forward.args.args]
    given = {names[0]: outer.func, **dict(zip(names[1:], outer.args, strict=False))}
    given |= {each.arg: each.value for each in outer.keywords if each.arg}
    reads = [n for n in ast.walk(inner) if isinstance(n, ast.Name)]
    made = rebuilt(inner, {n: given[n.id] for n in reads if n.id in given})
    kept = [each for each in made.keywords if each.arg != "_stacklevel"]
    return ast.Call(made.func, made.args, kept)


# Of `0 < x` torch is given x first, as of `x > 0`.
_COMPARISONS = {ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le"}


def operand_of(call: TorchCall, place: int, node: Any) -> Any:
    """The expression of an operand of a call, or None."""
    node = _value_of(node)
    if isinstance(node, ast.BinOp):
        sides = [node.left, node.right]
        return sides[place] if _is_in_order(call, sides) else sides[1 - place]
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        names = [_COMPARISONS.get(type(each)) for each in node.ops]
        if len(names) > 1 or names == [None]:
            return None
        return sides[place if names == [call.name] else 1 - place]
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return node.value if place == 0 else getattr(node, "slice", None)
    if not isinstance(node, ast.Call) or any(
        isinstance(each, ast.Starred) for each in node.args
    ):
        return None
    given = list(node.args)
    if isinstance(node.func, ast.Attribute) and _is_method(call.func):
        given.insert(0, node.func.value)
    if place < len(given):
        return given[place]
    parameters = op_of(call.plain_name).parameters or ("input", "other")
    wanted = parameters[place] if place < len(parameters) else ""
    return {SAME.get(k.arg or "", k.arg): k.value for k in node.keywords}.get(wanted)


def _value_of(node: Any) -> Any:
    """The expression of what an augmented assignment writes, or the node itself."""
    if isinstance(node, ast.AugAssign):
        return ast.BinOp(node.target, node.op, node.value)
    return node


def _is_in_order(call: TorchCall, sides: Sequence[ast.expr]) -> bool:
    """False for such as `2 * x`, which torch is given as x and 2."""
    if not has(call.name, "commutes") or len(call.operands) < 2:
        return True
    first, second = call.operands[:2]
    if isinstance(second, Value) or not isinstance(first, Value):
        return True
    node = None if first.call is None else node_at(first.call.sites[0])
    are = [each is node or getattr(each, "id", "") in call.variables for each in sides]
    are_numbers = [isinstance(each, ast.Constant) for each in sides]
    if not (any(are) or any(are_numbers)):
        raise NotWrittenError("it is not known which factor is a number")
    return are[0] or are_numbers[1]


def _is_method(function: Any) -> bool:
    """True for a method of tensors, which is called on its first argument."""
    name = getattr(function, "__name__", "")
    return getattr(torch.Tensor, name, None) is function


def parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters; none where it does not tell."""
    with contextlib.suppress(TypeError, ValueError):
        return list(inspect.signature(function).parameters)
    return []


def _constant(value: Any) -> ast.expr:
    plain = tuple(value) if isinstance(value, torch.Size) else value
    if not isinstance(plain, (type(None), bool, int, float, str, tuple, list)):
        raise NotWrittenError("an argument has no text")
    return expression_of(repr(plain))


def _is_none(node: Any, *others: Any) -> bool:
    is_constant = isinstance(node, ast.Constant)
    return is_constant and any(node.value is each for each in (None, *others))


_LOWS = {f"-{name}.inf" for name in ("torch", "math", "np", "numpy")} | {
    *("float('-inf')", "-float('inf')", "-inf"),
}
