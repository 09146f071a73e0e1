"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

import importlib
import sys
from typing import Any

__version__ = "1.0.0rc1"

# The module of each public name. A name is looked up when it is first asked for, and
# loads what it needs: commands that read files need no torch, `scan` no guard. What
# type checkers read, `__init__.pyi`, is written from it: python docs/tools/tables.py

_MODULES = {
    "DebugUnderflowOverflow": "detector.debug",
    "Explanation": "guard.report.explanation",
    "NonFiniteError": "guard.report.report",
    "OverflowGuard": "guard.guard",
    "RecordError": "guard.record.record_lines",
    "RecordingError": "tools.compare.recorded",
    "Report": "guard.report.report",
    "Stat": "scanner.ops",
    "advise_precision": "tools.precision.advise",
    "assert_finite_state": "guard.state_check",
    "compare": "tools.compare.compare_runs",
    "compare_live": "tools.compare.live",
    "detect_overflow": "detector.debug",
    "explain": "explainer.explain",
    "get_abs_min_max": "detector.debug",
    "integrations": "integrations",
    "keep_in_fp32": "precision.keep_in_fp32",
    "monitors": "monitors",
    "options": "options",
    "read_record": "tools.record.reading",
    "recording": "tools.compare.recording",
    "scan": "scanner.ops",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        what = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(what, name=name, obj=sys.modules[__name__])
    found = importlib.import_module(f".{_MODULES[name]}", __name__)
    if name != _MODULES[name]:
        found = getattr(found, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
