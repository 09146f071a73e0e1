"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

import torch  # noqa: F401  (the extension needs torch's libraries loaded first)

from .coverage import Coverage
from .debug import DebugUnderflowOverflow, detect_overflow, get_abs_min_max
from .ops import Stat, scan

__all__ = [
    "Coverage",
    "DebugUnderflowOverflow",
    "Stat",
    "detect_overflow",
    "get_abs_min_max",
    "scan",
]
__version__ = "0.1.0"
