"""An extension of griffe: the guard's arguments, whose docstrings are those of a class.

At run time `overflow_fast.guard.documented` does the same.
"""

from __future__ import annotations

from typing import Any

import griffe


class GuardArguments(griffe.Extension):  # type: ignore[misc]
    """Lists the fields of `GuardConfig` in the docstring of `OverflowGuard`."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Called once the package has been read."""
        config = pkg["guard.config.GuardConfig"].docstring.value
        docstring = pkg["guard.guard.OverflowGuard"].docstring
        marker = "    (the fields of GuardConfig)"
        if marker not in docstring.value:
            raise ValueError(f"OverflowGuard's docstring has no line {marker!r}")
        listed = config.partition("Attributes:\n")[2]
        docstring.value = docstring.value.replace(marker, listed)
