"""The table of outer layers' names that a guard calls, imported at the first call.

A guard that is left on for a month loads none of it while its steps are clean, but for
what finds the loss where all gradients are 0. This table is all that the guard's layer,
and those within it, know of the outer ones.
"""

from __future__ import annotations

import importlib
from typing import Any

_PACKAGE = __package__.partition(".")[0]
_PLACES = {
    "explainer": "explainer.step_explainer:StepExplainer",
    "loss": "explainer.loss_line:loss_at_hand",
    "update": "explainer.optimizer_step:explain_seen_update",
    "self_test": "tools.selftest:SelfTest",
    "guard_page": "tools.page.guard_page:write_guard_page",
    "evidence_page": "tools.page.guard_page:evidence_page",
}


def outer(name: str) -> Any:
    """Imports a class or a function of an outer layer.

    Args:
        name: Out of the table.

    Raises:
        ImportError: If it cannot be imported, for whatever reason: the package may
            have been changed, or its disk be gone, since the process began.
    """
    module, _, attribute = _PLACES[name].partition(":")
    path = f"{_PACKAGE}.{module}"
    try:
        return getattr(importlib.import_module(path), attribute)
    except Exception as error:
        raise ImportError(
            f"{path} could not be loaded ({type(error).__name__}: {error})"
        ) from error
