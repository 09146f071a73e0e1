"""The functions that the extension calls: it imports nothing.

Whatever scans imports this module first.
"""

from __future__ import annotations

import functools
import logging

import torch

from .. import _C
from ..base import tree
from ..base.tensors import reason, resolve

_log = logging.getLogger("overflow_fast")


@functools.cache
def warn_of_no_kernels() -> None:
    """Logs, once in a process, that torch operations scan a GPU's tensors."""
    _log.warning(
        "overflow_fast was built without CUDA kernels.\n"
        "Torch operations scan tensors on the GPU, which takes several times as long.\n"
        "Build it again with OVERFLOW_FAST_CUDA=1, which reports what is missing."
    )


def warn_of_unused_kernels(device: str, why: str) -> None:
    """Logs why torch operations scan a device's tensors in place of its kernels."""
    _log.warning(
        "The kernels of overflow_fast are not used on %s: %s.\n"
        "Torch operations scan tensors there, which takes several times as long.",
        device,
        why,
    )


def warn_of_lack(why: str) -> None:
    """Logs why tensors of a dtype are not scanned on a kind of device."""
    _log.warning(
        "Some tensors are not scanned, because torch lacks an operation for them: %s.\n"
        "Logged once for each dtype and kind of device.",
        why,
    )


_C.set_callbacks(
    resolve=resolve,
    reason=reason,
    warn_of_no_kernels=warn_of_no_kernels,
    warn_of_unused_kernels=warn_of_unused_kernels,
    warn_of_lack=warn_of_lack,
    layout=tree.layout,
    children=tree.children,
    type_name=tree.type_name,
)
if torch.backends.mps.is_built():
    from . import metal

    metal.register()
