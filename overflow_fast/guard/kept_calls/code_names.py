"""The variables around a code that it reads, or assigns to."""

from __future__ import annotations

import dis
import functools
import types

Names = tuple[str, ...]


# Disassembly takes 40 to 600 us a function, and each step asks for the same ones.
@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> Names:
    """Global variables that a code, or a function or comprehension in it, reads.

    It is disassembled; none of it runs.
    """
    own = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    names = [name for kind, name in own if kind in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += global_names(inner)
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=1024)
def sets_variables(code: types.CodeType, around: frozenset[str] | None = None) -> bool:
    """True if a code, or a function in it, assigns to variables around it.

    Args:
        code: The code; none of it runs.
        around: The variables of functions around the outermost one, in the recursion.
    """
    around = frozenset(code.co_freevars) if around is None else around
    for each in dis.get_instructions(code):
        is_outer = each.opname == "STORE_DEREF" and each.argval in around
        if is_outer or each.opname == "STORE_GLOBAL":
            return True
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(sets_variables(each, around) for each in inner)
