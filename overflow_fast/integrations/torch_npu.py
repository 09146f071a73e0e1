"""Registers the overflow flag of Ascend NPUs, where torch_npu has it.

from overflow_fast.integrations import torch_npu

torch_npu.install()
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .. import flags

_log = logging.getLogger("overflow_fast")
DEVICE_TYPE = "npu"
_Functions = tuple[Callable[[], object], Callable[[], Any]]


def install(module: Any = None) -> bool:
    """Registers the flag for guards of models on NPUs.

    An NPU in saturation mode has the largest number where others have inf: the flag
    alone knows of the overflow, and saturation counts as one. In inf and nan mode
    torch_npu's functions raise, and there are infs to see: nothing is registered then.

    A step that a GradScaler makes is left to the scaler: torch_npu's own asks the flag.
    Pipelines that interleave micro-batches (1F1B) clear the flag in between: an
    overflow before the last time they do is not seen.

    Args:
        module: torch_npu; None to import it.

    Returns:
        True if a flag was registered.

    Raises:
        ImportError: If torch_npu is not installed.
    """
    if module is None:
        import torch_npu as module  # type: ignore[import-not-found,no-redef]
    functions = _functions_of(module)
    if functions is None:
        _log.info("torch_npu has no functions for an overflow flag: none is read.")
        return False
    if _has_inf_and_nan(module):
        _log.info("The NPU is in inf and nan mode: it has no overflow flag.")
        return False
    clear, read = functions
    flags.register(DEVICE_TYPE, clear=clear, read=read)
    return True


def _functions_of(module: Any) -> _Functions | None:
    """Finds the functions, which versions keep in different places."""
    for owner in _places(module):
        clear = getattr(owner, "clear_npu_overflow_flag", None)
        read = getattr(owner, "get_npu_overflow_flag", None)
        if callable(clear) and callable(read):
            return clear, read
    return None


def _has_inf_and_nan(module: Any) -> bool:
    for owner in _places(module):
        asked = getattr(owner, "is_support_inf_nan", None)
        if callable(asked):
            return bool(asked())
    return False  # versions before that mode


def _places(module: Any) -> list[Any]:
    npu = getattr(module, "npu", None)
    return [npu, getattr(npu, "utils", None)]
