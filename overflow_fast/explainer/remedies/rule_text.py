"""Writes what is put in place of torch calls with the program's own code.

Nothing here is run. Where the source or the columns are not known (code without a file,
Python 3.10), where an input has a name only elsewhere, or where the calls of one line
would need different texts, a remedy is told in words.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...base.text import installed_name, is_of_program
from ...base.torch_ops import has, op_of
from ...guard.report.remedy import Remedy
from ..syntax import expression_of
from ..torch_calls import SAME, TorchCall, Value
from ..users_lines import Site, source_lines
from .patterns import Found, Input, parsed
from .rules import safe_argument, with_numbers
from .source_file import Edit, Operand, SourceFile

_MOST_TEXT = 60
_MOST_TURNS = 64  # of a loop, whose texts are compared


class NotWrittenError(Exception):
    """Raised where a change has no text that says the same at the changed place."""


# The others are of code that Python cannot write anew.
NOT_WRITTEN = (NotWrittenError, SyntaxError, ValueError, RecursionError)


def rule_edits(
    root: TorchCall,
    calls: Sequence[TorchCall],
    found_of: Callable[[TorchCall], Found | None],
    anywhere: bool = False,
) -> tuple[Edit, ...]:
    """The edits that put an expression in place of the calls of a key.

    Args:
        root: One of the calls.
        calls: All calls of the replay.
        found_of: Returns what is put in place of a call, or None for nothing.
        anywhere: Whether a file of an installed package is as good.

    Raises:
        NotWrittenError: If it has no text, with the reason.
    """
    texts: list[tuple[Edit, ...]] = []
    alike = [call for call in calls if call.key == root.key]
    for call in alike[:_MOST_TURNS]:
        found = found_of(call)
        if found is None:
            raise NotWrittenError("it differs from one turn of a loop to another")
        texts.append(Writer(call, calls, anywhere).edits(found))
    if any(each != texts[0] for each in texts):
        raise NotWrittenError("it reads values of earlier turns of a loop")
    return texts[0]


def node_at(site: Site) -> Any:
    """The expression or augmented assignment that made a call, or None."""
    if not source_lines(site.code):  # the file has another text by now
        return None
    return SourceFile.of(site.file).node_at(site.span)


def shown_at(root: TorchCall) -> tuple[str, int]:
    """The program's file and line that a remedy of a call is of; "" and 0 if none."""
    site = root.sites[-1]
    if not is_of_program(site.file) or not source_lines(site.code):
        return "", 0
    return SourceFile.of(site.file).shown, site.line


def remedy_in_words(text: str, root: TorchCall) -> Remedy:
    """Makes the remedy of a call for which there is no line."""
    file, line = shown_at(root)
    return Remedy(text, file=file, line=line, last_line=line)


def inner_place(root: TorchCall) -> str:
    """The place of a call that an installed package makes, or ""."""
    site = root.sites[0]
    return "" if is_of_program(site.file) else site.text


def short_text(call: TorchCall, place: int | None = None) -> str:
    """How a call or one of its operands is written, or else its name.

    Args:
        call: The call.
        place: The operand's place; None for the call.
    """
    node = node_at(call.sites[0])
    with contextlib.suppress(NotWrittenError):
        node = node if place is None else operand_of(call, place, node)
    file = SourceFile.of(call.sites[0].file)
    text = call.name if node is None else file.text_of(node)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 4]} ..."


_OF_PART = re.compile(r"tuple\((.+)\(e\) if")  # of one of several results
_IS_CALL = re.compile(r"CALL\(.*\)")
_OPERAND = re.compile(r"OPERAND_(\d+)_")
_SCOPES = (
    *(ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.FunctionDef, ast.AsyncFunctionDef),
)


class Writer(ast.NodeTransformer):
    """Writes another expression for that of a call.

    Args:
        root: The call.
        calls: All calls of the replay.
        anywhere: Whether a file of an installed package is as good.

    Attributes:
        node: The expression or augmented assignment of the file that is replaced.
        expression: How the call is written: the same, but of what a module of torch
            calls, with the module's arguments and attributes.

    Raises:
        NotWrittenError: If its code is not known, or an installed package's.
    """

    def __init__(
        self, root: TorchCall, calls: Sequence[TorchCall], anywhere: bool = False
    ) -> None:
        self._root, self._calls = root, calls
        is_inner = len(root.sites) == 2 and bool(inner_place(root)) and not anywhere
        self._site = root.sites[-1] if is_inner else root.sites[0]
        self._file = self._site.file
        if not (anywhere or is_of_program(self._file)):
            raise NotWrittenError("it is in an installed package")
        self._source = SourceFile.of(self._file)
        self._operands: list[ast.AST] = []
        self._named: set[int] = set()  # the operands to name where they stand
        self._names: dict[str, Any] = {}
        self._target: ast.expr | None = None
        self.node: Any = node_at(self._site)
        if self.node is None:
            raise NotWrittenError("its code is not known")
        assigned = self._source.parents.get(self.node)
        if root.name == "__setitem__" and isinstance(assigned, ast.Assign):
            self.node = assigned.value
        self.expression = self.node
        if is_inner:
            self.expression = _of_torch_module(root.sites[0], self.node)

    def edits(self, found: Found) -> tuple[Edit, ...]:
        """The edits: of the root's expression, and of what it takes of other lines."""
        if of_part := _OF_PART.match(found.new):
            return self._edits_behind(of_part[1], int(found.numbers["N"]))
        if self._root.is_in_place and not _IS_CALL.fullmatch(found.new):
            self._target = self._find_target()
        new = self._written(found)
        if self._target is not None:
            target = self._place(self._target)
            new = ast.Call(ast.Attribute(target, "copy_"), [new], [])
        return self.edits_to(new, found.numbers)

    def _edits_behind(self, function: str, place: int) -> tuple[Edit, ...]:
        """The edit that changes one of several results once they have their names."""
        assigned = self._source.parents.get(self.node)
        targets = assigned.targets if isinstance(assigned, ast.Assign) else []
        names = targets[0].elts if targets and isinstance(targets[0], ast.Tuple) else []
        if len(targets) != 1 or not all(isinstance(each, ast.Name) for each in names):
            raise NotWrittenError("its results have no names")
        name = ast.unparse(names[place])
        written = ast.unparse(self.visit(copy.deepcopy(parsed(function))))
        text = f"; {name} = {written}({name})"
        return (Edit(self._file, self.node, (Operand(self.node, True), text)),)

    def _find_target(self) -> ast.expr | None:
        """The expression that the root writes to, if that is to be written to still."""
        if self._root.kwargs.get("out") is not None:
            raise NotWrittenError("it writes to `out`")
        target: ast.expr | None = operand_of(self._root, 0, self.expression)
        if not isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
            return None  # nothing else has it
        is_statement = isinstance(self.node, ast.AugAssign)
        return None if is_statement and self._is_fresh(target) else target

    def _is_fresh(self, target: ast.expr) -> bool:
        """True for a variable whose tensor was computed for it in this function."""
        made = self._root.operands[0].call
        if made is None or has(made.name, "moves"):
            return False
        if made.sites[0].code != self._site.code:
            return False
        given = self._source.parents.get(node_at(made.sites[0]))
        targets = given.targets if isinstance(given, ast.Assign) else []
        return [ast.unparse(each) for each in targets] == [ast.unparse(target)]

    def edits_to(
        self, new: ast.expr, numbers: dict[str, float] | None = None
    ) -> tuple[Edit, ...]:
        """The edits that write an expression in place of the root's."""
        text = ast.unparse(ast.fix_missing_locations(new))
        text = with_numbers(text, numbers or {}).replace("e-0", "e-")
        text = text if '"' in text else text.replace("'", '"')
        read = [self._operands[int(place)] for place in _OPERAND.findall(text)]
        kept = _KeptOnce(self._file, self._kept_once(read), self._is_inside)
        parts: list[str | Operand] = []
        at = 0
        for match in _OPERAND.finditer(text):
            before, after = text[: match.start()], text[match.end() :]
            opens = before.endswith(("(", ", ", "=")) and not before.endswith("==")
            is_bare = opens and after.startswith((")", ","))
            is_bare = is_bare or not (before or after)
            parts.append(text[at : match.start()])
            parts += kept.parts_of(self._operands[int(match[1])], is_bare)
            at = match.end()
        parts.append(text[at:])
        if isinstance(self.node, ast.AugAssign) and self._target is None:
            parts.insert(0, f"{self._source.text_of(self.node.target)} = ")
        own = Edit(self._file, self.node, tuple(filter(None, parts)))
        return own, *kept.edits

    def _kept_once(self, read: Sequence[ast.AST]) -> list[ast.AST]:
        """The operands to evaluate once alone, that are needed twice or elsewhere."""
        times = collections.Counter(map(id, read))
        found = {
            id(each): each
            for each in read
            if id(each) in self._named or self._is_better_named(each, times[id(each)])
        }
        for each in found.values():
            around = self._source.around(each)
            scope = next((s for s in around if isinstance(s, _SCOPES)), None)
            if scope is not None and not hasattr(scope, "name"):
                raise NotWrittenError("an argument of it may be called once alone")
        return list(found.values())

    def _is_better_named(self, node: ast.AST, times: int) -> bool:
        is_simple = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
        if times > 1 and (node is self.node or (times > 2 and not is_simple)):
            return True
        is_elsewhere = times > 1 or not self._is_inside(node)
        return is_elsewhere and any(
            _is_costly(inner, self._pure) for inner in ast.walk(node)
        )

    @functools.cached_property
    def _pure(self) -> set[int]:
        """The expressions of torch calls that return the same each time."""
        sites = {  # a loop makes thousands of calls at one place
            call.sites[0].instruction: call.sites[0]
            for call in self._calls
            if call.sites[0].code is self._site.code and not has(call.name, "random")
        }
        return {id(node_at(site)) for site in sites.values()}

    def _is_inside(self, node: ast.AST) -> bool:
        around = (node, *self._source.around(node))
        return any(each is self.node for each in around)

    # What the names of an expression stand for.

    def _written(self, found: Found) -> ast.expr:
        if found.moved is not None:
            inner = self._written(found.names["y"])
            return self.with_operands(found.moved, {0: inner})
        outer, self._names = self._names, found.names
        written: ast.expr = self.visit(copy.deepcopy(parsed(found.code)))
        self._names = outer
        return written

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Writes what a name stands for."""
        of, name = self._names.get(node.id), node.id
        if isinstance(of, Found):
            return self._written(of)
        if name in self._names:
            return self._text_of(of) if isinstance(of, Input) else _constant(of)
        if name == "SAFE":
            return ast.Constant(safe_argument(self._names["f"]))
        if name == "inf":
            return parsed('float("inf")')
        if name == "value" or name in self._root.kwargs:
            return self._keyword(name)
        if name in ("where", "masked_fill"):
            return ast.Attribute(self._module("torch"), name)
        return self._module(name) if name in ("torch", "F") else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Writes a call; arguments at its end that say nothing are left out."""
        name = getattr(node.func, "id", "")
        if name == "f":
            call = self._names["f"]
            place = 1 if call.plain_name == "div" else 0
            return self.with_operands(call, {place: self.visit(node.args[0])})
        if name == "CALL_ON":
            return self.with_operands(self._root, {0: self.visit(node.args[0])})
        if name == "CALL":
            return self._changed(node)
        if name == "log":
            return self._log(self._names[getattr(node.args[0], "id", "")])
        made: Any = self.generic_visit(node)
        while made.args and _is(made.args[-1], None, False):
            made.args.pop()
        return made  # type: ignore[no-any-return]

    def _module(self, name: str) -> ast.expr:
        """The name that the file has for a module."""
        functional = ("F", "nn.functional", "torch.nn.functional")
        texts = functional if name == "F" else (name,)
        for text in texts:
            if text.partition(".")[0] in self._source.imports:
                return parsed(text)
        raise NotWrittenError(f"the file does not import {texts[-1]}")

    def _log(self, of: Input) -> ast.expr:
        """The logarithm of an input: of a number its value."""
        if isinstance(of.value, Value):
            return ast.Call(ast.Attribute(self._text_of(of), "log"), [], [])
        return _constant(math.log(of.value))

    def _changed(self, node: ast.Call) -> ast.expr:
        """The call with other keywords, and a number in place of -inf."""
        whole, new = self.expression, {each.arg: each.value for each in node.keywords}
        if not (new or node.args):
            return self._place(whole)
        if self._root.name == "__setitem__":
            return node.args[0]
        if not isinstance(whole, ast.Call):
            raise NotWrittenError("the call is an operator")
        made = self._shell(whole, {id(self._low_in(whole)): low for low in node.args})
        parameters = _parameters_of(self._root.func)[: len(made.args)]
        for place, parameter in enumerate(parameters):
            if parameter in new:
                made.args[place] = self.visit(new.pop(parameter))
        made.keywords = [each for each in made.keywords if each.arg not in new]
        for key, value in new.items():
            if not _is(value, None):
                made.keywords.append(ast.keyword(key, self.visit(value)))
        return made  # type: ignore[no-any-return]

    def _low_in(self, call: ast.Call) -> ast.expr:
        """Where -inf is written in a call, or else the argument that is -inf."""
        for inner in ast.walk(call):
            if isinstance(inner, ast.expr) and ast.unparse(inner) in _LOWS:
                return inner
        for place, value in enumerate(self._root.args):
            node = operand_of(self._root, place, call)
            if node is not None and type(value) is float and value == -math.inf:
                return node  # type: ignore[no-any-return]
        raise NotWrittenError("-inf is written elsewhere")

    def _text_of(self, leaf: Input) -> ast.expr:
        is_number = not isinstance(leaf.value, Value)
        node = operand_of(leaf.call, leaf.place, self.expression_of(leaf.call))
        if is_number and (node is None or isinstance(node, ast.Constant)):
            return _constant(leaf.value)
        if node is None:
            raise NotWrittenError(f"an input of {leaf.call.name} has no text")
        if self._has_other_names(node, leaf.call):
            self._named.add(id(node))
        placed = self._place(node)
        target = "" if self._target is None else ast.unparse(self._target)
        if ast.unparse(node) == target and leaf.value.requires_grad:
            # Autograd keeps what was there.
            return ast.Call(ast.Attribute(placed, "clone"), [], [])
        return placed

    def expression_of(self, call: TorchCall) -> Any:
        """How a call is written in the changed function."""
        if call is self._root:
            return self.expression
        if call.sites[0].code is not self._site.code:
            raise NotWrittenError("it reads values of another function")
        return node_at(call.sites[0])

    def _has_other_names(self, node: ast.AST, call: TorchCall) -> bool:
        """True if a name has another value by the changed place.

        Raises:
            NotWrittenError: If the value cannot be given a name where it stands.
        """
        site = call.sites[0]
        first, last = sorted((site.line, self._site.line))
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        changed = [
            each.id
            for each in self._source.stores
            if each.id in names and first <= each.lineno < last
        ]
        if site.code is not self._site.code or not changed:
            return False
        times = [sum(e.key == of.key for e in self._calls) for of in (call, self._root)]
        is_after = site.line > self._site.line or times[0] != times[1]
        if is_after or node not in self._source.parents:
            raise NotWrittenError(f"`{changed[0]}` has another value there")
        return True

    def _keyword(self, name: str) -> ast.expr:
        for each in getattr(self.expression, "keywords", ()):
            if each.arg == name:
                return self._place(each.value)
        value = self._root.kwargs.get(name, 1)
        if isinstance(value, Value):
            raise NotWrittenError(f"{name} has no text")
        return _constant(value)

    # Copies of expressions, whose parts are taken over as they stand in the file.

    def with_operands(self, call: TorchCall, new: dict[int, ast.expr]) -> ast.expr:
        """The expression of a call with other operands, by their places."""
        node, other = self.expression_of(call), {}
        for place, each in new.items():
            old = operand_of(call, place, node)
            if node is None or old is None:
                raise NotWrittenError(f"{call.name} has no text")
            other[id(old)] = each
        written: ast.expr = self._shell(node, other)
        return written

    def place_operand(self, call: TorchCall, place: int) -> ast.expr:
        """The name that stands for an operand of a call."""
        return self._text_of(Input(call, place))

    def place_whole(self) -> ast.expr:
        """The name that stands for the root's expression."""
        return self._place(self.node)

    def _place(self, node: Any) -> ast.expr:
        """The name that stands for an expression of the file; of others a copy."""
        if isinstance(node, ast.Name) and node not in self._source.parents:
            return self._module(node.id) if node.id == "F" else node
        is_named = id(node) in self._named
        if isinstance(node, (ast.Name, ast.Constant)) and not is_named:
            return copy.copy(node)
        is_slice = isinstance(node, (ast.Slice, ast.Tuple))  # has no text alone
        if is_slice or node not in self._source.parents:
            if is_named:
                raise NotWrittenError("a name in it has another value there")
            return self._shell(node)  # type: ignore[no-any-return]
        self._operands.append(node)
        return ast.Name(f"OPERAND_{len(self._operands) - 1}_")

    def _shell(self, node: Any, other: dict[int, ast.expr] | None = None) -> Any:
        """An expression with others in place of some that it holds."""
        other = other or {}

        def part(of: Any) -> Any:
            if id(of) in other:
                return other[id(of)]
            if isinstance(of, ast.keyword):
                return ast.keyword(of.arg, part(of.value))
            if not isinstance(of, ast.expr):
                return of
            holds_one = any(id(inner) in other for inner in ast.walk(of))
            return self._shell(of, other) if holds_one else self._place(of)

        if isinstance(node, _SCOPES):
            raise NotWrittenError("it is within a function of its own")
        if isinstance(node, ast.AugAssign):
            return ast.BinOp(part(node.target), node.op, part(node.value))
        made = copy.copy(node)
        for name, value in ast.iter_fields(node):
            is_list = isinstance(value, list)
            setattr(made, name, list(map(part, value)) if is_list else part(value))
        return made


def _of_torch_module(site: Site, outer: Any) -> ast.expr:
    """The call that a module of torch makes, with the arguments of its own call.

    Args:
        site: The call within the module's forward.
        outer: The call of the module.

    Raises:
        NotWrittenError: If its forward does more than to return that.
    """
    source, inner = SourceFile.of(site.file), node_at(site)
    around = [] if inner is None else list(source.around(inner))
    forward = next((each for each in around if isinstance(each, ast.FunctionDef)), None)
    is_torchs = installed_name(site.file).startswith("torch/nn/modules/")
    is_whole = bool(around) and isinstance(around[0], ast.Return)
    is_call = isinstance(outer, ast.Call) and not any(
        isinstance(each, ast.Starred) for each in outer.args
    )
    if not (is_torchs and is_whole and is_call and forward is not None):
        raise NotWrittenError("it is in an installed package")
    names = [each.arg for each in forward.args.args]
    given = dict(zip(names[1:], outer.args, strict=False))
    given |= {each.arg: each.value for each in outer.keywords if each.arg}
    given[names[0]] = outer.func
    return _Inlined(given).visit(copy.deepcopy(inner))  # type: ignore[no-any-return]


class _Inlined(ast.NodeTransformer):
    """Puts the arguments of a call in place of a function's parameters."""

    def __init__(self, given: dict[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._given.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        kept = [each for each in node.keywords if each.arg != "_stacklevel"]
        return self.generic_visit(  # type: ignore[return-value]
            ast.Call(node.func, node.args, kept)
        )


_CHEAP = {
    *("size", "dim", "numel", "len", "int", "float", "bool", "min", "max", "abs"),
    *("range", "tuple", "list", "getattr", "device", "finfo"),
}


def _is_costly(node: ast.AST, pure: set[int]) -> bool:
    """True for a call that may do more than compute a value, as of a module."""
    if not isinstance(node, ast.Call) or id(node) in pure:
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    of = getattr(node.func, "value", None)
    return name not in _CHEAP and getattr(of, "id", "") != "math"


_OF_VALUE = "exact_argument"  # a variable for an argument that is needed twice


class _KeptOnce:
    """Gives a name to expressions that are to be evaluated once alone.

    Args:
        file: The file.
        nodes: The expressions.
        is_inside: Tells those within the changed expression.

    Attributes:
        edits: The edits that give names to expressions of other lines.
    """

    def __init__(
        self,
        file: str,
        nodes: Sequence[ast.AST],
        is_inside: Callable[[ast.AST], bool],
    ) -> None:
        numbers = ["", *(f"_{place}" for place in range(2, len(nodes) + 1))]
        self._names = {
            id(node): f"{_OF_VALUE}{number}"
            for node, number in zip(nodes, numbers, strict=False)
        }
        self._inside = {id(node) for node in nodes if is_inside(node)}
        self.edits = [
            Edit(file, node, self._named(node))
            for node in nodes
            if id(node) not in self._inside
        ]

    def _named(self, node: ast.AST) -> tuple[str | Operand, ...]:
        return f"({self._names[id(node)]} := ", Operand(node, True), ")"

    def parts_of(self, node: ast.AST, is_bare: bool) -> Sequence[str | Operand]:
        """The parts that stand for an expression, from left to right."""
        name = self._names.get(id(node))
        if name is None:
            return [Operand(node, is_bare)]
        if id(node) in self._inside:
            self._inside.discard(id(node))
            return self._named(node)
        return [name]


def operand_of(call: TorchCall, place: int, node: Any) -> Any:
    """The expression of an operand of a call, or None."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        sides = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        sides = [node.target, node.value]
    if sides:
        return sides[place] if _is_in_order(call, sides) else sides[1 - place]
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return node.value if place == 0 else getattr(node, "slice", None)
    if not isinstance(node, ast.Call) or any(
        isinstance(each, ast.Starred) for each in node.args
    ):
        return None
    given = list(node.args)
    if isinstance(node.func, ast.Attribute) and not _is_namespace(node.func.value):
        given.insert(0, node.func.value)
    if place < len(given):
        return given[place]
    parameters = op_of(call.plain_name).parameters or ("input", "other")
    wanted = parameters[place] if place < len(parameters) else ""
    named = {SAME.get(k.arg or "", k.arg): k.value for k in node.keywords}
    return named.get(wanted)


def _parameters_of(function: Any) -> list[str]:
    """The names of a function's parameters, where Python knows them."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _is_in_order(call: TorchCall, sides: Sequence[ast.expr]) -> bool:
    """False for such as `2 * x`, which torch is given as x and 2."""
    if not has(call.name, "commutes") or len(call.operands) < 2:
        return True
    first, second = (isinstance(each, Value) for each in call.operands[:2])
    if second or not first:
        return True
    made = call.operands[0].call
    node = None if made is None else node_at(made.sites[0])
    are_tensors = [
        side is node or getattr(side, "id", "") in call.variables for side in sides
    ]
    are_numbers = [isinstance(side, ast.Constant) for side in sides]
    if any(are_numbers) or any(are_tensors):
        return are_tensors[0] or are_numbers[1]
    raise NotWrittenError("it is not known which factor is a number")


def _is_namespace(node: ast.expr) -> bool:
    """True for such as `torch.linalg`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "math")


def _constant(value: Any) -> ast.expr:
    plain = tuple(value) if isinstance(value, (tuple, torch.Size)) else value
    kinds = (type(None), bool, int, float, str, tuple, list)
    if not isinstance(plain, kinds):
        raise NotWrittenError("an argument has no text")
    return expression_of(repr(plain))


def _is(node: Any, *values: Any) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is each for each in values)


_LOWS = {
    *("float('-inf')", "-float('inf')", "-torch.inf", "-math.inf", "-np.inf"),
    *("-numpy.inf", "-inf", "float('-Inf')", "-float('Inf')"),
}
