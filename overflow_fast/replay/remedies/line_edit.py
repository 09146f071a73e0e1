"""Runs the code of an edited source file in place of functions' own."""

from __future__ import annotations

import gc
import hashlib
import linecache
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType

# Codes of a file, each with the place of the one around it.
_Nested = list[tuple[CodeType, int | None]]


@dataclass(frozen=True)
class CodePlace:
    """A function's code in a file; the same in every process that runs the file.

    Attributes:
        file: The file.
        index: Its place among the file's code objects; see `_nested()`.
        digest: Of the file's text.
    """

    file: str
    index: int
    digest: str

    @classmethod
    def of(cls, code: CodeType, text: str) -> CodePlace:
        """The place of a code that runs.

        Args:
            code: The code.
            text: The text of its file, with the edits that it runs with.

        Raises:
            NotEditableError: If the file is not what runs.
        """
        file = code.co_filename
        codes = _nested(_compiled(text, file))
        places = [i for i, (each, _) in enumerate(codes) if _is_same(each, code)]
        if len(places) != 1:
            raise NotEditableError("the file is not the code that runs")
        return cls(file, places[0], _digest("".join(linecache.getlines(file))))


@contextmanager
def edited_code(places: Sequence[CodePlace], texts: Sequence[str]) -> Iterator[None]:
    """Lets functions run an edited file's code; they have their own again afterwards.

    Args:
        places: The codes of one file that are edited. Codes around them are replaced
            with them.
        texts: The edited file, in versions: the first that can be run is.

    Raises:
        NotEditableError: If the file is not what runs, or another thread runs it.
    """
    changes = _changes(places, texts)
    if not changes:
        raise NotEditableError("no function with that line was found")
    if _runs_elsewhere({function.__code__ for function, _ in changes}):
        raise NotEditableError("another thread runs that code")
    kept = [(function, function.__code__) for function, _ in changes]
    try:
        for function, new in changes:
            function.__code__ = new
        yield
    finally:
        for function, old in kept:
            function.__code__ = old


def _changes(
    places: Sequence[CodePlace], texts: Sequence[str]
) -> list[tuple[FunctionType, CodeType]]:
    """The live functions whose code is replaced, with their new code."""
    own = "".join(linecache.getlines(places[0].file))
    if _digest(own) != places[0].digest:
        raise NotEditableError("the file is another one here")
    old = _nested(_compiled(own, places[0].file))
    wanted: set[int] = set()
    for place in places:
        index: int | None = place.index
        while index:  # 0 is the file itself
            wanted.add(index)
            index = old[index][1]
    new = _replacing(old, wanted, (_compiled(each, places[0].file) for each in texts))
    functions = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType and each.__code__.co_filename == places[0].file
    ]
    return [
        (function, new[index][0])
        for function in functions
        for index in sorted(wanted)
        if _is_same(function.__code__, old[index][0])
    ]


def _replacing(
    old: _Nested, wanted: Collection[int], modules: Iterable[CodeType]
) -> _Nested:
    """The codes of the first version that can replace a file's codes."""
    for module in modules:
        new = _nested(module)
        if len(new) == len(old) and all(
            new[index][0].co_freevars == old[index][0].co_freevars for index in wanted
        ):
            return new
    raise NotEditableError("the edit changes more than a line")


def _compiled(text: str, file: str) -> CodeType:
    try:
        return compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise NotEditableError(f"the line does not compile: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class NotEditableError(Exception):
    """Raised where a line cannot be edited for a trial."""


def _nested(module: CodeType) -> _Nested:
    """A file's code objects in order, each with the place of the one around it."""
    found: _Nested = [(module, None)]
    for place, (code, _) in enumerate(found):  # it grows meanwhile
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        found += [(each, place) for each in inner]
    return found


def _is_same(a: CodeType, b: CodeType) -> bool:
    return a == b or (
        a.co_name == b.co_name
        and a.co_firstlineno == b.co_firstlineno
        and a.co_code == b.co_code
        and a.co_freevars == b.co_freevars
        and a.co_names == b.co_names
    )


def _runs_elsewhere(codes: set[CodeType]) -> bool:
    """Tells whether another thread is within one of these codes."""
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        current = frame if thread != own else None
        while current is not None:
            if current.f_code in codes:
                return True
            current = current.f_back
    return False
