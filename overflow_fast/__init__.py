"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

import torch  # noqa: F401  (the extension needs torch's libraries loaded first)

from .ops import Stat, scan

__all__ = ["Stat", "scan"]
__version__ = "0.1.0"
