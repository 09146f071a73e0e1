"""The failures, by family."""

from __future__ import annotations

import importlib
import pkgutil

from ..failure import FAILURES as FAILURES

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
