"""The names of global variables that a code reads."""

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
