"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

from pathlib import Path

import torch  # noqa: F401  (the extension needs torch's libraries loaded first)

try:
    from . import _C  # noqa: F401
except ImportError as error:
    _here = Path(__file__).parent
    _is_checkout = (_here.parent / "setup.py").exists()
    _build = (
        f"run `pip install --no-build-isolation -e .` in {_here.parent} (or "
        "`make build`), or import an installed overflow_fast from another folder"
        if _is_checkout
        else "run `pip install --force-reinstall --no-build-isolation --no-deps` with "
        "the folder of its sources"
    )
    if any(_here.glob("_C.*.so")):
        raise ImportError(
            f"overflow_fast's extension cannot be loaded: {error}. Where it was built "
            f"for another torch or Python, build it again: {_build}"
        ) from error
    raise ImportError(
        f"overflow_fast is not built: there is no extension in {_here}; {_build}"
    ) from error

from . import (
    callbacks,  # noqa: F401  (what the extension calls)
    log,  # noqa: F401  (its lines begin with the package's name)
    metal,
)
from .coverage import Coverage
from .debug import DebugUnderflowOverflow, detect_overflow, get_abs_min_max
from .guard.coverage import GuardCoverage
from .guard.guard import OverflowGuard
from .guard.report import NonFiniteError, Report
from .guard.state import assert_finite_state
from .ops import Stat, scan
from .precision import keep_in_fp32

__all__ = [
    "Coverage",
    "DebugUnderflowOverflow",
    "GuardCoverage",
    "NonFiniteError",
    "OverflowGuard",
    "Report",
    "Stat",
    "assert_finite_state",
    "detect_overflow",
    "get_abs_min_max",
    "keep_in_fp32",
    "scan",
]
__version__ = "0.1.0"

metal.register()
