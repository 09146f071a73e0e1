"""Looks up what the next instruction of a running frame works on.

Names, attributes and items are looked up without running code of the program.
"""

from __future__ import annotations

import collections
import dis
import itertools
import types
from typing import Any

from ...base.text import is_of_program


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
_Places = tuple[list[dis.Instruction], dict[int, int]]  # and their indices by offsets
_instructions: dict[types.CodeType, _Places] = {}
_MOST_CODES = 1024  # whose instructions are kept; chosen, not measured
_MOST_ARGUMENTS = 4


def _places_of(code: types.CodeType) -> _Places:
    found = _instructions.get(code)
    if found is None:
        if len(_instructions) >= _MOST_CODES:
            _instructions.clear()
        own = list(dis.get_instructions(code))
        indices = {each.offset: index for index, each in enumerate(own)}
        found = _instructions[code] = own, indices
    return found


def _instructions_of(code: types.CodeType) -> list[dis.Instruction]:
    return _places_of(code)[0]


def places_in(code: types.CodeType) -> tuple[int, ...]:
    """The offsets where a code may wait, or take from an iterator, unseen.

    Libraries' code takes from iterators of its own: there, only waits count.
    """
    is_programs = is_of_program(code.co_filename)
    if not is_programs and _WITH_CODES.isdisjoint(code.co_code[::2]):
        return ()
    names = _WITH | _TAKES | _CALLS if is_programs else _WITH
    own = _instructions_of(code)
    return tuple(each.offset for each in own if each.opname in names)


def looked_at(frame: types.FrameType) -> tuple[list[Any], Any]:
    """Looks up what the next instruction of a frame waits for or takes from.

    Returns:
        It, and the function that the instruction calls; UNSEEN for none.
    """
    own, index = _instructions_of(frame.f_code), index_of(frame)
    if own[index].opname not in _CALLS:
        return [value_before(frame, index)[0]], UNSEEN
    given, index = arguments(frame)
    function = value_before(frame, index)[0] if index >= 0 else UNSEEN
    is_taker = any(function is each for each in _TAKERS)  # calls no `__eq__`
    return [value for value, _ in given] if is_taker else [], function


def arguments(frame: types.FrameType) -> tuple[list[tuple[Any, int]], int]:
    """The arguments of the call that a frame is about to make, last first.

    Returns:
        Some of the last, each with where it begins; and where all of these do.
    """
    index = index_of(frame)
    found = []
    count = _instructions_of(frame.f_code)[index].arg or 0
    for _ in range(min(count, _MOST_ARGUMENTS)):
        value, index = value_before(frame, index)
        found.append((value, index))
    return found, index


def index_of(frame: types.FrameType) -> int:
    """The place of the instruction that a frame has come to."""
    return _places_of(frame.f_code)[1].get(frame.f_lasti, 0)


def first_argument(frame: types.FrameType) -> tuple[Any, bool]:
    """The first argument of the call that a frame is about to make, of a few.

    Returns:
        It, and whether it is a local variable of the frame.
    """
    given, _ = arguments(frame)
    if not given:
        return UNSEEN, False
    value, place = given[-1]
    first = _instructions_of(frame.f_code)[max(place, 0)]
    is_fast = first.opname.startswith("LOAD_FAST")
    return value, is_fast and frame.f_locals.get(first.argval) is value


def keyword(frame: types.FrameType, name: str) -> Any:
    """The value that a call is about to get by a keyword; None if there is none."""
    own, index = _instructions_of(frame.f_code), index_of(frame)
    if own[index].opname == "CALL_FUNCTION_EX":
        return _keyword_beside_star(frame, index, name)
    names: Any = ()
    for each in own[max(0, index - 3) : index + 1]:
        is_names = each.opname in ("KW_NAMES", "LOAD_CONST")
        value = each.argval if each.opname == "LOAD_CONST" else None
        if each.opname == "KW_NAMES":
            assert each.arg is not None
            value = frame.f_code.co_consts[each.arg]
        if is_names and isinstance(value, tuple):
            names, index = value, own.index(each)
    for each in reversed(names):
        value, index = value_before(frame, index)
        if each == name:
            return value
    return None


def _keyword_beside_star(frame: types.FrameType, index: int, name: str) -> Any:
    """The same of a call with `*` or `**`; UNSEEN where it may be in a dict."""
    own = _instructions_of(frame.f_code)
    if not (own[index].arg or 0) & 1:
        return None
    made = own[index - 1]
    if made.opname == "BUILD_CONST_KEY_MAP":
        names, place = own[index - 2].argval, index - 2
        for each in reversed(names):
            value, place = value_before(frame, place)
            if each == name:
                return value
        return None
    if made.opname != "BUILD_MAP":
        return UNSEEN
    place = index - 1
    for _ in range(made.arg or 0):
        value, place = value_before(frame, place)
        key, place = value_before(frame, place)
        if key is UNSEEN or key == name:
            return value
    return None


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


def value_before(frame: types.FrameType, index: int) -> tuple[Any, int]:
    """The value that instructions before one have made last, and where they begin."""
    own, index = _instructions_of(frame.f_code), index - 1
    while index >= 0 and own[index].opname in _IGNORED:
        index -= 1
    if index < 0:
        return UNSEEN, -1
    each = own[index]
    if each.opname == "LOAD_CONST":
        return each.argval, index
    if each.opname.startswith("LOAD_GLOBAL"):
        around = frame.f_builtins | frame.f_globals
        return around.get(each.argval, UNSEEN), index
    if each.opname.startswith(_LOCAL):
        held = frame.f_locals
        if each.argval in held or not each.opname.startswith("LOAD_NAME"):
            return held.get(each.argval, UNSEEN), index
        around = frame.f_builtins | frame.f_globals
        return around.get(each.argval, UNSEEN), index
    if each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        owner, start = value_before(frame, index)
        return _attribute(owner, each.argval), start
    is_item = each.opname == "BINARY_SUBSCR" or each.argrepr == "[]"
    if is_item:
        key, start = value_before(frame, index)
        owner, start = value_before(frame, start)
        return _item(owner, key), start
    return UNSEEN, _begin_of_value(own, index + 1)


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
