"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

import torch  # noqa: F401  (the extension needs torch's libraries loaded first)

from . import log  # noqa: F401  (its lines begin with the package's name)
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
