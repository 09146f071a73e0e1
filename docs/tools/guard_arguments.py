"""An extension of griffe: docstrings list fields, of options and of flight records.

At run time `guard.options` and `guard.files.fields` do the same.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

_DECLARE = ("option", "meaning", "_of_step")


class GuardArguments(griffe.Extension):  # type: ignore[misc]
    """Lists fields in the docstrings of options and of `OverflowGuard`."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Called once the package has been read."""
        modules = [pkg["guard.options"], *pkg["guard.monitors"].modules.values()]
        modules += [pkg["guard.record.record_lines"], pkg["guard.record.record_step"]]
        for cls in (each for module in modules for each in module.classes.values()):
            listed = _fields_of(cls)
            if listed:
                cls.docstring.value += f"\n\nAttributes:\n{listed}"
        docstring = pkg["guard.guard.OverflowGuard"].docstring
        marker = "    (the fields of GuardConfig)"
        if marker not in docstring.value:
            raise ValueError(f"OverflowGuard's docstring has no line {marker!r}")
        listed = _fields_of(pkg["guard.config.GuardConfig"])
        docstring.value = docstring.value.replace(marker, listed)


def _fields_of(cls: Any) -> str:
    """The lines of a docstring: each field's name and help."""
    helps = {name: _help_of(each) for name, each in cls.attributes.items()}
    return "\n".join(f"    {name}: {text}" for name, text in helps.items() if text)


def _help_of(attribute: Any) -> str:
    """The first argument of `option(...)`, or of a `meaning(...)` in the type."""
    declared = f"{attribute.annotation}, {attribute.value}"
    for node in ast.walk(ast.parse(declared, mode="eval")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _DECLARE:
            text: str = ast.literal_eval(node.args[0])
            return text
    return ""
