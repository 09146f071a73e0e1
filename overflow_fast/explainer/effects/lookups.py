"""Looks up what the next instruction of a running frame works on.

Names, attributes and items are looked up without running code of the program.
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import types
from typing import Any, NamedTuple

from ...base.source_files import is_of_program, is_of_user


class Unseen:
    """Stands for a value that cannot be told."""


UNSEEN = Unseen()
# `with` in Python 3.11 to 3.13, in 3.10 and in 3.14.
_WITH = {"BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"}
_TAKES = {
    *("GET_ITER", "GET_YIELD_FROM_ITER", "CALL_FUNCTION_EX", "CONTAINS_OP"),
    *("UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE"),
}
_CALLS = {"CALL", "CALL_FUNCTION", "CALL_METHOD"}
# What jumps back, in Python 3.11 to 3.14, and in 3.10.
_LOOPS = {
    code
    for name, code in dis.opmap.items()
    if "JUMP_BACKWARD" in name or name == "JUMP_ABSOLUTE"
}
_WITH_CODES = {dis.opmap[name] for name in _WITH if name in dis.opmap}
# What takes from an iterator without a call of a function that is seen.
_TAKERS = {
    *(list, tuple, set, frozenset, dict, zip, enumerate, map, filter, reversed),
    *(sum, min, max, any, all, sorted, collections.deque, itertools.islice),
    *(itertools.chain, itertools.zip_longest, itertools.starmap, itertools.cycle),
    *(itertools.takewhile, itertools.dropwhile, itertools.accumulate, itertools.tee),
}
_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME", "LOAD_CLOSURE")
_IGNORED = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "KW_NAMES", "PUSH_NULL", "COPY"}
_MOST_CODES = 1024  # whose instructions are kept; chosen, not measured
_MOST_ARGUMENTS = 5  # the keywords of `print`, and their names


class _Source(NamedTuple):
    """The way in which instructions make a value, the same in each run of a code."""

    begin: int  # the first of them; -1 if not seen
    # "const", "global", "local", "name", "attribute", "item"; "" for what is not seen.
    kind: str = ""
    name: Any = None  # a constant itself
    parts: tuple[_Source, ...] = ()  # an attribute's owner; an item's, and its key

    def value(self, frame: types.FrameType) -> Any:
        """The value in a running frame, without code of the program."""
        if self.kind == "const":
            return self.name
        if self.kind in ("local", "name") and self.name in frame.f_locals:
            return frame.f_locals[self.name]
        if self.kind in ("global", "name"):
            if self.name in frame.f_globals:
                return frame.f_globals[self.name]
            return frame.f_builtins.get(self.name, UNSEEN)
        if self.kind == "attribute":
            return _attribute(self.parts[0].value(frame), self.name)
        if self.kind == "item":
            return _item(*(each.value(frame) for each in self.parts))
        return UNSEEN


class _Call(NamedTuple):
    """The function that an instruction calls, and its last arguments, last first."""

    function: _Source
    given: list[_Source]


class _Places:
    """The instructions of a code, and what is known of them once for all."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code  # whose identity stays its own
        self._sources: dict[int, _Source] = {}
        self._calls: dict[int, _Call] = {}

    @functools.cached_property
    def own(self) -> list[dis.Instruction]:
        """The instructions."""
        return list(dis.get_instructions(self._code))

    @functools.cached_property
    def indices(self) -> dict[int, int]:
        """Their places, by their offsets."""
        return {each.offset: index for index, each in enumerate(self.own)}

    @functools.cached_property
    def may_loop(self) -> bool:
        """True if it may run on without a call, as in `while not done: pass`."""
        code = self._code
        return is_of_program(code.co_filename) or not _LOOPS.isdisjoint(
            code.co_code[::2]
        )

    @functools.cached_property
    def unseen(self) -> tuple[int, ...]:
        """The offsets where it may wait, or take from an iterator, unseen.

        Libraries' code takes from iterators of its own: there, only waits count. What
        torch waits for is its own, too: nothing is told of `with` what a call has
        returned.
        """
        file = self._code.co_filename
        is_programs, is_torchs = is_of_program(file), not is_of_user(file)
        if not is_programs and _WITH_CODES.isdisjoint(self._code.co_code[::2]):
            return ()
        names = _WITH | _TAKES | _CALLS if is_programs else _WITH
        return tuple(
            each.offset
            for index, each in enumerate(self.own)
            if each.opname in names
            if not (is_torchs and self.source_before(index).kind == "")
        )

    def source_before(self, index: int) -> _Source:
        """The source of the value that is made last before an instruction."""
        found = self._sources.get(index)
        if found is None:
            found = self._sources[index] = self._source_before(index)
        return found

    def _source_before(self, index: int) -> _Source:
        index -= 1
        while index >= 0 and self.own[index].opname in _IGNORED:
            index -= 1
        if index < 0:
            return _Source(-1)
        each = self.own[index]
        if each.opname == "LOAD_CONST":
            return _Source(index, "const", each.argval)
        if each.opname.startswith("LOAD_GLOBAL"):
            return _Source(index, "global", each.argval)
        if each.opname.startswith(_LOCAL):
            is_name = each.opname.startswith("LOAD_NAME")
            return _Source(index, "name" if is_name else "local", each.argval)
        if each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            owner = self.source_before(index)
            return _Source(owner.begin, "attribute", each.argval, (owner,))
        if each.opname == "BINARY_SUBSCR" or each.argrepr == "[]":
            key = self.source_before(index)
            owner = self.source_before(key.begin)
            return _Source(owner.begin, "item", None, (owner, key))
        return _Source(_begin_of_value(self.own, index + 1))

    def call_at(self, index: int) -> _Call:
        """The function and the arguments of the call at an instruction."""
        found = self._calls.get(index)
        if found is None:
            place, given = index, []
            for _ in range(min(self.own[index].arg or 0, _MOST_ARGUMENTS)):
                given.append(self.source_before(place))
                place = given[-1].begin
            function = self.source_before(place) if place >= 0 else _Source(-1)
            found = self._calls[index] = _Call(function, given)
        return found


# By the identities of codes: to compare two of them reads all their instructions.
_known: dict[int, _Places] = {}


def places_of(code: types.CodeType) -> _Places:
    """The instructions of a code, as far as they are known."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) >= _MOST_CODES:
            _known.clear()
        found = _known[id(code)] = _Places(code)
    return found


def looked_at(frame: types.FrameType) -> tuple[list[Any], Any]:
    """Looks up what the next instruction of a frame waits for or takes from.

    Returns:
        It, and the function that the instruction calls; UNSEEN for none.
    """
    places, index = _at(frame)
    if places.own[index].opname not in _CALLS:
        return [places.source_before(index).value(frame)], UNSEEN
    call = places.call_at(index)
    function = call.function.value(frame)
    is_taker = any(function is each for each in _TAKERS)  # calls no `__eq__`
    return [each.value(frame) for each in call.given] if is_taker else [], function


def arguments(frame: types.FrameType) -> list[Any]:
    """Some arguments of the call that a frame is about to make, the last first."""
    places, index = _at(frame)
    return [each.value(frame) for each in places.call_at(index).given]


def _at(frame: types.FrameType) -> tuple[_Places, int]:
    """The instruction that a frame has come to."""
    places = places_of(frame.f_code)
    return places, places.indices.get(frame.f_lasti, 0)


def may_name(frame: types.FrameType, name: str) -> bool:
    """True if the call that a frame is about to make may get a keyword of that name."""
    places, index = _at(frame)
    is_starred = places.own[index].opname == "CALL_FUNCTION_EX"
    before = places.own[max(0, index - (9 if is_starred else 3)) : index]
    loads = [e.arg or 0 for e in before if e.opname in ("KW_NAMES", "LOAD_CONST")]
    names = [frame.f_code.co_consts[each] for each in loads]
    is_named = any(e == name or (type(e) is tuple and name in e) for e in names)
    is_merged = is_starred and before[-1].opname == "DICT_MERGE"  # of `**`
    return is_named or is_merged


def _begin_of_value(own: list[dis.Instruction], index: int) -> int:
    """Where the instructions begin that make the value before one; -1 if not seen."""
    wanted = 1  # values on the stack
    while wanted > 0 and index > 0:
        index -= 1
        each = own[index]
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return -1
        arg = each.arg if each.opcode >= dis.HAVE_ARGUMENT else None
        wanted -= dis.stack_effect(each.opcode, arg)
    return index if wanted == 0 else -1


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without a property or `__getattr__`; of modules also those."""
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict):
        for table in (own, own.get("_modules"), own.get("_buffers")):
            if isinstance(table, dict) and name in table:
                return table[name]
    for kind in type.mro(owner if isinstance(owner, type) else type(owner)):
        found = vars(kind).get(name, UNSEEN)
        if isinstance(found, types.MemberDescriptorType):  # a slot
            return getattr(owner, name, UNSEEN)
        if found is not UNSEEN:
            return found
    return UNSEEN


def _item(owner: Any, key: Any) -> Any:
    if type(owner) not in (list, tuple, dict) or isinstance(key, Unseen):
        return UNSEEN
    try:
        return owner[key]
    except (LookupError, TypeError):
        return UNSEEN
