"""Runs the code of an edited source file in a replay, and nowhere else.

A function whose line is edited gets code with two bodies, the edited one and its own,
and asks at each call which of them to run: the replay's own thread, and autograd's
threads while they work for the replay, run the edited one; all other threads run their
own body, in the same frame and with the same line numbers. Threads that the program
starts within the replay belong to the program. Calls that run already keep what they
have. Compiled code runs eagerly meanwhile: dynamo neither reuses a graph without the
edit nor sees code with two bodies. Afterwards functions have the very code object that
they had.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextvars
import copy
import functools
import gc
import hashlib
import itertools
import linecache
import os
import re
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

from ...torch_internals.replaying import (
    inherited,
    set_inherited,
)
from ..force_eager import nothing_is_compiled, run_eagerly

# Constants that stand for the objects which functions ask, and for the number of the
# edit that runs: no name of the user's is used or hidden.
_SWITCH = "overflow_fast:is_edited:{}"
_MAKER = "overflow_fast:is_made:{}"
_MARK = "overflow_fast:edit:{}"
_MARKS = re.compile('"' + _MARK.format(r"(\d+)") + '"')
_KEY = "overflow_fast_edits"  # of what threads inherit
_WAIT = 1.0  # seconds, for other threads to leave compiled code

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Codes of a file, each with the place of the one around it.
_Nested = list[tuple[CodeType, int | None]]
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # cells of notebooks may await


class NotEditableError(Exception):
    """Raised where a line cannot be edited for a trial, or was not run in it."""


@dataclass(frozen=True)
class CodePlace:
    """A function's code in a file; the same in every process that runs the file.

    Attributes:
        file: The file.
        index: Its place among the file's code objects; see `_nested()`.
        digest: Of the file's text.
        in_parts: Whether each statement was compiled alone, as notebooks do with cells.
        made: The number of a code that was made of some of its statements, in this
            process; 0 for the code of a function.
    """

    file: str
    index: int
    digest: str
    in_parts: bool = False
    made: int = 0

    @classmethod
    def of(cls, code: CodeType) -> CodePlace:
        """The place of a code that runs, with or without edits.

        Raises:
            NotEditableError: If the file is not what runs.
        """
        file = code.co_filename
        own, text = _own_code(code), _text_of(file)
        if own in _fixed_codes:
            raise NotEditableError(_fixed_codes[own])
        if own in _made_codes:
            return cls(file, -1, _digest(text), made=_made_codes[own].number)
        # The code of a function depends on the imports that are compiled with it.
        for in_parts in sorted((False, True), reverse=not os.path.exists(file)):
            codes = _codes_of(file, text, in_parts)
            places = [i for i, (each, _) in enumerate(codes) if _is_same(each, own)]
            if len(places) == 1:
                return cls(file, places[0], _digest(text), in_parts)
        raise NotEditableError("the file is not the code that runs")


def marked(text: str, number: int) -> str:
    """An expression or statement that notes in a trial that it runs.

    Args:
        text: The expression in brackets, or the statement.
        number: The number of the edit.
    """
    joint = "and " if text.startswith("(") else "; "
    mark = f'"{_MARK.format(number)}".is_run'
    return f"({mark} {joint}{text})" if joint == "and " else f"{mark}{joint}{text}"


@contextmanager
def edited_code(places: Sequence[CodePlace], text: str) -> Iterator[None]:
    """Lets functions run an edited file's code in what this thread does within.

    Args:
        places: The codes of one file that are edited. Codes around them are replaced
            with them.
        text: The edited file. Its edits that are `marked()` must run.

    Raises:
        NotEditableError: If the file is not what runs, another trial edits the same
            code at that moment, another thread stays in compiled code, or an edit was
            not run.
    """
    with run_eagerly():
        if not nothing_is_compiled(_WAIT):
            raise NotEditableError("another thread runs compiled code")
        with _two_bodies(tuple(places), text) as missing:
            yield
    if missing:
        raise NotEditableError("the replay's own thread did not run the changed code")


@contextmanager
def _two_bodies(places: tuple[CodePlace, ...], text: str) -> Iterator[list[int]]:
    """Gives functions their code; yields the list of the edits that did not run."""
    outer = inherited(_KEY)
    trial = _Trial() if outer is None else outer
    try:
        set_inherited(_KEY, trial)
        swap = _begin(trial, places, text)
        missing: list[int] = []
        yield missing
        missing += set(range(swap.num_marks)) - swap.ran[trial]
    finally:
        # Again, should the first be interrupted: it does nothing that is done.
        try:
            _end(trial, places[0].file)
        finally:
            _end(trial, places[0].file)
            set_inherited(_KEY, outer)


class _Trial:
    """Stands for one replay in the threads that work for it."""


class _Swap:
    """One edit of a file's functions, made for one or more trials at once.

    Attributes:
        ran: The trials, each with the numbers of the edits that it has run.
        num_marks: How many edits must run.
        own: The codes with two bodies, each with the code that it stands for.
        has_made: An edited body ran that makes functions, edited ones among them.
    """

    def __init__(self, places: tuple[CodePlace, ...], text: str) -> None:
        self.places, self.text = places, text
        self.file = places[0].file
        self.num_marks = len(set(_MARKS.findall(text)))
        self.ran: dict[_Trial, set[int]] = {}
        self.own: dict[int, tuple[CodeType, CodeType]] = {}
        self.has_made = False
        self._changes: list[tuple[FunctionType, CodeType]] = []

    @property
    def is_edited(self) -> bool:
        """True in threads that work for one of the trials."""
        return inherited(_KEY) in self.ran

    def find(self, others: Collection[_Swap]) -> None:
        """Finds the functions, and makes their code."""
        if _digest(_text_of(self.file)) != self.places[0].digest:
            raise NotEditableError("the file is another one here")
        places = tuple(each for each in self.places if not each.made)
        edit = _Edit.of(self.file, _text_of(self.file), places, self.text)
        known = _known_functions(self.file)
        self._find_in(known, edit, others)
        if not self._changes:  # it may have been made since
            self._find_in(_functions_of(self.file), edit, others)
        if not self._changes:
            raise NotEditableError("no function with that line was found")

    def _find_in(
        self, functions: Sequence[FunctionType], edit: _Edit, others: Collection[_Swap]
    ) -> None:
        numbers = {each.made for each in self.places}
        held = {code for other in others for code in other.own}
        made: dict[int, CodeType] = {}
        for function in functions:
            code = function.__code__
            statements = _made_codes.get(_own_code(code))
            is_made = statements is not None and statements.number in numbers
            number = edit.function_of(_own_code(code))
            if number is None and not is_made:
                continue
            if id(code) in held:
                raise NotEditableError("another replay edits that code now")
            if id(code) not in made and number is not None:
                made[id(code)] = edit.code(number, code, self)
            elif id(code) not in made and statements is not None:
                made[id(code)] = self._code_of(statements, code)
            self._changes.append((function, made[id(code)]))

    def _code_of(self, statements: MadeCode, own: CodeType) -> CodeType:
        """Makes the edited code of statements, which replays alone run."""
        code = self._with_marks(statements.code_of(self.text))
        _own_codes[code] = own
        self.own[id(code)] = code, own
        return code

    def _with_marks(self, code: CodeType) -> CodeType:
        constants = [
            self._with_marks(each)
            if isinstance(each, CodeType)
            else self.object_of(each)
            for each in code.co_consts
        ]
        return code.replace(co_consts=tuple(constants))

    def object_of(self, constant: object) -> Any:
        """The object that stands in code for one of the constants, or the constant."""
        if not isinstance(constant, str):
            return constant
        if constant.startswith(_SWITCH.format("")):
            return self
        if constant.startswith(_MAKER.format("")):
            return _Maker(self)
        number = constant.removeprefix(_MARK.format(""))
        return constant if number == constant else _Mark(self, int(number))

    def apply(self) -> None:
        """Gives the functions their code with two bodies."""
        _set_codes(self._changes)

    def undo(self) -> None:
        """Gives them, and functions that they have made since, their own code."""
        self._undo_in([each for each, _ in self._changes])
        if self.has_made:  # a look at all objects, which takes as long as there are
            left = _functions_with([code for code, _ in self.own.values()])
            _remember(self.file, left)
            self._undo_in(left)

    def _undo_in(self, functions: Sequence[FunctionType]) -> None:
        _set_codes(
            [
                (each, self.own[id(each.__code__)][1])
                for each in functions
                if id(each.__code__) in self.own
            ]
        )

    def clear(self) -> None:
        """Lets go of code, which holds this object: Python finds no such circles."""
        self.own.clear()
        self._changes.clear()


class _Maker:
    """Stands for a swap in functions around edited ones; notes that they make these."""

    def __init__(self, swap: _Swap) -> None:
        self._swap = swap

    @property
    def is_edited(self) -> bool:
        is_edited = self._swap.is_edited
        self._swap.has_made |= is_edited
        return is_edited


class _Mark:
    """Notes that an edit runs."""

    def __init__(self, swap: _Swap, number: int) -> None:
        self._swap, self._number = swap, number

    @property
    def is_run(self) -> bool:
        ran = self._swap.ran.get(inherited(_KEY))
        if ran is not None:
            ran.add(self._number)
        return True


_lock = threading.RLock()
_swaps: list[_Swap] = []  # those whose functions have code with two bodies


def _begin(trial: _Trial, places: tuple[CodePlace, ...], text: str) -> _Swap:
    with _lock:
        for swap in _swaps:
            if swap.places == places and swap.text == text and swap.ran:
                swap.ran[trial] = set()
                return swap
        swap = _Swap(places, text)
        swap.find(_swaps)
        swap.ran[trial] = set()
        _swaps.append(swap)
        swap.apply()
        return swap


def _end(trial: _Trial, file: str) -> None:
    with _lock:
        for swap in list(_swaps):
            if swap.file == file:
                swap.ran.pop(trial, None)
            if not swap.ran:
                swap.undo()
                _swaps.remove(swap)
                swap.clear()


def _end_in_child() -> None:
    """Undoes all edits in a process that was forked in a trial: it has no replay."""
    global _lock
    _lock = threading.RLock()
    for swap in _swaps:
        swap.undo()
    _swaps.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)


def _set_codes(changes: Sequence[tuple[FunctionType, CodeType]]) -> None:
    """Sets the code of functions in one call of C, which no signal can interrupt."""
    functions, codes = [each for each, _ in changes], [code for _, code in changes]
    done = map(setattr, functions, itertools.repeat("__code__"), codes)
    collections.deque(done, maxlen=0)


# What codes with two bodies stand for, and those of comprehensions within one.
_own_codes: weakref.WeakKeyDictionary[CodeType, CodeType]
_own_codes = weakref.WeakKeyDictionary()


class MadeCode(Protocol):
    """Some statements of a file that were made a code, which replays alone run.

    Attributes:
        number: Tells it from others of this process.
    """

    number: int

    def code_of(self, text: str) -> CodeType:
        """Makes the code of the same statements of an edited file."""


_made_codes: weakref.WeakKeyDictionary[CodeType, MadeCode]
_made_codes = weakref.WeakKeyDictionary()


def let_edit(code: CodeType, statements: MadeCode) -> None:
    """Lets the code that was made of some statements of a file be edited."""
    _made_codes[code] = statements
    known = _found.get()
    if known is not None:
        known.pop(code.co_filename, None)


_fixed_codes: weakref.WeakKeyDictionary[CodeType, str]
_fixed_codes = weakref.WeakKeyDictionary()


def forbid_edit(code: CodeType, why: str) -> None:
    """Lets code that was made of some statements of a file be as it is."""
    _fixed_codes[code] = why


def is_mark(statement: ast.stmt) -> bool:
    """True for what `marked()` puts in front of a statement."""
    node = statement.value if isinstance(statement, ast.Expr) else None
    of = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(of, ast.Constant) and str(of.value).startswith(_MARK.format(""))


def _own_code(code: CodeType) -> CodeType:
    """The code that a code with two bodies stands for; any other as it is."""
    return _own_codes.get(code, code)


_Functions = list["weakref.ref[FunctionType]"]
_found: contextvars.ContextVar[dict[str, _Functions] | None]
_found = contextvars.ContextVar("functions of files, by name", default=None)


@contextmanager
def functions_are_found_once() -> Iterator[None]:
    """Lets edits within look for the functions of a file once, not in each replay.

    That takes as long as the program has objects. What a replay makes of edited code is
    edited, and is looked for afterwards if any is left. An edit of what else was made
    since is not run, which is noticed.
    """
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def _known_functions(file: str) -> list[FunctionType]:
    """The live functions of a file, as they were last found."""
    known = _found.get()
    if known is None or file not in known:
        return _functions_of(file)
    return [each for reference in known[file] if (each := reference()) is not None]


def _functions_of(file: str) -> list[FunctionType]:
    """The live functions of a file.

    All that refer to Python's built-ins, not `gc.get_objects()`: that holds tuples that
    other threads are about to make, and `tuple(generator)` raises a SystemError there.
    """
    functions = [
        each
        for each in gc.get_referrers(vars(builtins))
        if type(each) is FunctionType and each.__code__.co_filename == file
    ]
    known = _found.get()
    if known is not None:
        known[file] = list(map(weakref.ref, functions))
    return functions


def _functions_with(codes: Sequence[CodeType]) -> list[FunctionType]:
    """The live functions with one of some codes."""
    return [each for each in gc.get_referrers(*codes) if type(each) is FunctionType]


def _remember(file: str, functions: Sequence[FunctionType]) -> None:
    """Lets further functions of a file be known to the edits that follow."""
    known = _found.get()
    if known is not None and file in known:
        known[file] += map(weakref.ref, functions)


# Code with two bodies.


class _Edit:
    """The functions of a file with their own body and an edited one.

    Args:
        file: The file.
        own: Its text.
        places: The codes that are edited.
        text: The file with the edits.

    Raises:
        NotEditableError: If the edit cannot be made.
    """

    def __init__(
        self, file: str, own: str, places: Sequence[CodePlace], text: str
    ) -> None:
        self._own: dict[CodeType, int] = {}
        self._new: dict[int, CodeType] = {}
        if not places:
            return
        in_parts = places[0].in_parts
        known = _Known.of(file, own, in_parts)
        at_places = [list(known.functions_at(place.index)) for place in places]
        switches = {k: _SWITCH.format(k) for at_place in at_places for k in at_place}
        switches |= {k: _MAKER.format(k) for around in at_places for k in around[1:]}
        statements = _parsed(text).body
        if len(statements) != len(known.functions_in):
            raise NotEditableError("the edit changes more than a line")
        for statement, numbers in zip(statements, known.functions_in, strict=True):
            within = {k: switches[k] for k in numbers if k in switches}
            if not within:
                continue
            functions = _functions_in(statement)
            if len(functions) != len(numbers):
                raise NotEditableError("the edit changes more than a line")
            for k, switch in within.items():
                _join(functions[k - numbers.start], known.functions[k], switch)
            tree = ast.Module([*known.imports, statement], [])
            edited = _compiled(tree, file, in_parts=False)
            self._new |= {
                k: code
                for code, _ in _nested(edited)
                for k, switch in within.items()
                if switch in code.co_consts
            }
        self._own |= {known.codes[known.index_of[k]][0]: k for k in switches}

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of(file: str, own: str, places: tuple[CodePlace, ...], text: str) -> _Edit:
        """The edit, which several replays make."""
        return _Edit(file, own, places, text)

    def function_of(self, code: CodeType) -> int | None:
        """The number of the edited function that has a code, or None."""
        alike = (k for own, k in self._own.items() if _is_same(own, code))
        return next(alike, None)

    def code(self, function: int, own: CodeType, swap: _Swap) -> CodeType:
        """Makes the code with two bodies of a function.

        Args:
            function: Its number.
            own: Its code.
            swap: Has the objects that stand for constants.
        """
        new = self._new[function]
        if new.co_freevars != own.co_freevars:
            raise NotEditableError("the edit changes more than a line")
        # What its own body makes are functions with the very code that they had.
        inner = {code: code for code, _ in _nested([own])}
        return self._with_objects(new, own, inner, swap)

    def _with_objects(
        self,
        new: CodeType,
        own: CodeType,
        inner: dict[CodeType, CodeType],
        swap: _Swap,
    ) -> CodeType:
        constants: list[Any] = []
        for each in new.co_consts:
            if not isinstance(each, CodeType):
                constants.append(swap.object_of(each))
            elif each in inner:
                constants.append(inner[each])
            else:
                known = self._known_of(each)
                its = own if known is None else inner.get(known, known)
                constants.append(self._with_objects(each, its, inner, swap))
        code = new.replace(co_consts=tuple(constants))
        _own_codes[code] = own
        if self._is_function(new):
            swap.own[id(code)] = code, own
        return code

    def _known_of(self, new: CodeType) -> CodeType | None:
        """The file's code of a function with two bodies; None for any other code."""
        numbers = {code: k for k, code in self._new.items()}
        number = numbers.get(new)
        codes = {k: code for code, k in self._own.items()}
        return None if number is None else codes[number]

    def _is_function(self, new: CodeType) -> bool:
        return self._known_of(new) is not None


class _Known:
    """The functions of a file and their code objects.

    Attributes:
        codes: The code objects; see `_nested()`.
        functions: The functions, in the order of the text.
        functions_in: The numbers of the functions of each outermost statement.
        imports: The imports outside of functions, on which the code of all depends.
        index_of: The place among them of each function's, in the order of the text.
    """

    def __init__(self, file: str, text: str, in_parts: bool) -> None:
        self.codes = _codes_of(file, text, in_parts)
        self.imports = [] if in_parts else _imports_in(_parsed(text))
        self.functions: list[_Function] = []
        self.functions_in: list[range] = []
        for statement in _parsed(text).body:
            first = len(self.functions)
            self.functions += _functions_in(statement)
            self.functions_in.append(range(first, len(self.functions)))
        tree = _parsed(text)
        for k, function in enumerate(_functions_in(tree)):
            _join(function, None, _SWITCH.format(k))
        tagged = _nested(_compiled(tree, file, in_parts))
        if len(tagged) != len(self.codes):
            raise NotEditableError("the functions of the file cannot be distinguished")
        tags = {_SWITCH.format(k): k for k in range(len(tagged))}
        self._function_at = {
            place: tags[each]
            for place, (code, _) in enumerate(tagged)
            for each in code.co_consts
            if isinstance(each, str) and each in tags
        }
        self.index_of = {k: place for place, k in self._function_at.items()}

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of(file: str, text: str, in_parts: bool) -> _Known:
        """The functions of a file with a text; `in_parts` as in `CodePlace`."""
        return _Known(file, text, in_parts)

    def functions_at(self, index: int) -> Iterator[int]:
        """Yields the functions around a code, and its own, by their numbers."""
        place: int | None = index
        while place is not None:
            if place in self._function_at:
                yield self._function_at[place]
            place = self.codes[place][1]


def _join(new: _Function, own: _Function | None, switch: str) -> None:
    """Gives a function, which has an edited body, its own one besides.

    Args:
        new: The function.
        own: The same function with its own body; None for one that does nothing.
        switch: The constant that is asked which of them to run.
    """
    test = ast.Attribute(ast.Constant(switch), "is_edited", ast.Load())
    if isinstance(new, ast.Lambda):
        assert own is None or isinstance(own, ast.Lambda)
        other = ast.Constant(None) if own is None else own.body
        new.body = ast.copy_location(ast.IfExp(test, new.body, other), new.body)
        return
    assert not isinstance(own, ast.Lambda)
    is_text = isinstance(new.body[0], ast.Expr) and isinstance(
        new.body[0].value, ast.Constant
    )
    text = new.body[:1] if is_text else []
    bodies = [new.body, [] if own is None else copy.deepcopy(own.body)]
    outer = _OuterNames()
    # One of the two bodies may not declare a name that the other one has used.
    for body in bodies:
        body[:] = [outer.visit(each) for each in body[len(text) :]] or [ast.Pass()]
    first = bodies[0][0]
    choice = ast.If(test, *bodies)
    if hasattr(first, "lineno"):
        ast.copy_location(choice, first)
    new.body = [*text, *outer.found, choice]


class _OuterNames(ast.NodeTransformer):
    """Takes the declarations of global and nonlocal names out of a function's body.

    Attributes:
        found: The declarations.
    """

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit(self, node: ast.AST) -> Any:
        """Takes them out of a statement; not out of functions and classes in it."""
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            self.found.append(node)
            return ast.copy_location(ast.Pass(), node)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.expr)):
            return node
        return self.generic_visit(node)


def _functions_in(tree: ast.AST) -> list[_Function]:
    """The functions of a file, in the order of the text."""
    found: list[_Function] = []
    to_do = [tree]
    while to_do:
        node = to_do.pop()
        if isinstance(node, _FUNCTIONS):
            found.append(node)
        to_do += reversed(list(ast.iter_child_nodes(node)))
    return found


def _imports_in(tree: ast.AST) -> list[ast.stmt]:
    """The imports outside of functions and classes, in the order of the text."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        elif not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.expr)):
            found += _imports_in(node)
    return found


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise NotEditableError(f"the line does not compile: {error}") from error


def _compiled(code: str | ast.Module, file: str, in_parts: bool) -> list[CodeType]:
    """The code objects of a file: one, or one for each of its statements."""
    tree = _parsed(code) if isinstance(code, str) else ast.fix_missing_locations(code)
    parts = [ast.Module([each], []) for each in tree.body] if in_parts else [tree]
    try:
        return [compile(each, file, "exec", _AWAIT, True) for each in parts]
    except (SyntaxError, ValueError) as error:
        raise NotEditableError(f"the line does not compile: {error}") from error


def _text_of(file: str) -> str:
    return "".join(linecache.getlines(file))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _nested(outermost: Sequence[CodeType]) -> _Nested:
    """A file's code objects in order, each with the place of the one around it."""
    found: _Nested = [(each, None) for each in outermost]
    for place, (code, _) in enumerate(found):  # it grows meanwhile
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        found += [(each, place) for each in inner]
    return found


@functools.lru_cache(maxsize=4)
def _codes_of(file: str, text: str, in_parts: bool) -> _Nested:
    """The code objects of a file with a text; see `_nested()`."""
    return _nested(_compiled(text, file, in_parts))


def _is_same(a: CodeType, b: CodeType) -> bool:
    return a == b or (
        a.co_name == b.co_name
        and a.co_firstlineno == b.co_firstlineno
        and a.co_code == b.co_code
        and a.co_freevars == b.co_freevars
        and a.co_names == b.co_names
    )
