"""The names of variables and attributes that a code reads or assigns."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

Names = tuple[str, ...]


class NamesIn(NamedTuple):
    """Names in a code, and in the functions and comprehensions within it.

    Attributes:
        all: Of global variables and attributes.
        read: Of the global variables that it reads.
        set: Of the global variables that it assigns or deletes.
        given: Of the attributes that it assigns or deletes.
    """

    all: Names
    read: Names
    set: Names
    given: Names


# Disassembly takes 40 to 600 us a function, and each step asks for the same ones.
@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> NamesIn:
    """Disassembles a code; none of it runs."""
    own = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    inner = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    kinds: tuple[list[str], ...] = (
        list(code.co_names),
        [name for kind, name in own if kind in ("LOAD_GLOBAL", "LOAD_NAME")],
        [name for kind, name in own if kind in ("STORE_GLOBAL", "DELETE_GLOBAL")],
        [name for kind, name in own if kind in ("STORE_ATTR", "DELETE_ATTR")],
    )
    for each in inner:
        for names, more in zip(kinds, each, strict=True):
            names += more
    return NamesIn(*(tuple(dict.fromkeys(names)) for names in kinds))


def global_names(code: types.CodeType) -> Names:
    """Global variables that a code, or a function or comprehension in it, reads."""
    return names_in(code).read


def attribute_names(code: types.CodeType) -> Names:
    """Names in a code that may be those of attributes; with those of what is in it."""
    return names_in(code).all
