"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

# ruff: noqa: F405  (`public.py` has the names)

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import (
    binaries,
    flags,
    text,  # noqa: F401  (its lines begin with the package's name)
)

__all__ = [
    "Comparison",
    "Coverage",
    "DebugUnderflowOverflow",
    "Evidence",
    "Explain",
    "Explanation",
    "FlightRecord",
    "GuardCoverage",
    "Headroom",
    "LayerAudit",
    "Log",
    "MaskedOps",
    "Monitor",
    "MonitoredStep",
    "NonFiniteError",
    "Notice",
    "Op",
    "OverflowGuard",
    "PrecisionAdvice",
    "Record",
    "RecordError",
    "RecordingError",
    "Replicas",
    "Report",
    "Saturation",
    "Schedule",
    "Spikes",
    "Stat",
    "Underflow",
    "advise_precision",
    "assert_finite_state",
    "compare",
    "compare_live",
    "detect_overflow",
    "explain",
    "flags",
    "get_abs_min_max",
    "keep_in_fp32",
    "read_record",
    "recording",
    "scan",
    "shadow",
]
__version__ = "1.0.0rc1"


def _is_command() -> bool:
    """True in a process of `overflow-fast` or `python -m overflow_fast`."""
    arguments = getattr(sys, "argv", None) or [""]  # none where Python is embedded
    if arguments[0] == "-m":  # until Python has found what it is to run
        return [__name__] == sys.orig_argv[-len(arguments) :][:1]
    name: str = os.path.basename(arguments[0])
    return name.removesuffix(".exe") == "overflow-fast"


def _load_extension() -> ModuleType:
    """Imports the extension for this torch, or what stands in for it."""
    import torch  # (first: the extension needs torch's libraries)

    try:
        # First: an old build may have left an extension here, for an unknown torch.
        __path__.insert(0, str(binaries.folder_for(torch.__version__)))
        importlib.import_module("._C", __name__)
    except ImportError as error:
        why = binaries.why_not_imported(torch.__version__, error)
        if binaries.is_there(torch.__version__):
            raise ImportError(why) from error
        from . import fallback

        fallback.install(why)
    from . import metal

    metal.register()
    return sys.modules[f"{__name__}._C"]


# Importing the package loads all of it, so that an extension that cannot be loaded is
# noticed then. Only commands begin without torch, whose import takes a second or two:
# many read files alone. Others get the extension and the names when they ask for them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "_C":
            return _load_extension()
        if name in __all__:
            return getattr(importlib.import_module(".public", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING or not _is_command():
    from .public import *  # noqa: F403


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
