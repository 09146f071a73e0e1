"""What was looked at and what was not: no verdict without it."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import nn

from .. import _C

_log = logging.getLogger("overflow_fast")


class Coverage(NamedTuple):
    """What a clean verdict covers.

    Attributes:
        tensors_listed: How many tensors the frames list.
        tensors_scanned: How many scans that took; a tensor that nobody wrote to since
            its last scan in a forward is not scanned again.
        bytes_scanned: How many bytes the scanned tensors have.
        not_scanned: How many listed tensors were not looked at, by the reason.
    """

    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: dict[str, int]

    @classmethod
    def of(cls, recorder: _C.Recorder) -> Coverage:
        """What a recorder has looked at so far."""
        found = recorder.coverage
        return cls(
            found.tensors_listed,
            found.tensors_scanned,
            found.bytes_scanned,
            found.reasons(),
        )


class NotScannedWarning:
    """Logs once that some tensors are not scanned."""

    def __init__(self) -> None:
        self._is_given = False

    def give_once(self, recorder: _C.Recorder) -> None:
        """Logs a warning if there is reason to, and it was not given before."""
        if self._is_given or not recorder.coverage.not_scanned:
            return
        self._is_given = True
        reasons = Coverage.of(recorder).not_scanned
        _log.warning(
            "Some tensors are not scanned, and a clean verdict does not cover them: "
            "%s. Said once; see `coverage`.",
            ", ".join(f"{count} x {reason}" for reason, count in reasons.items()),
        )


def warn_of_scripted(model: nn.Module) -> None:
    """Logs that scripted modules are not looked at."""
    count = sum(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    if count:
        _log.warning(
            "%d scripted modules are not looked at, because TorchScript has no hooks: "
            "what they make is seen where another module is given it.",
            count,
        )


@functools.cache
def warn_of_no_kernels() -> None:
    """Logs, once in a process, that a GPU's tensors are scanned the slow way."""
    _log.warning(
        "overflow_fast was built without CUDA kernels: tensors on the GPU are scanned "
        "by torch operations, which takes several times as long. Build it again with "
        "OVERFLOW_FAST_CUDA=1, which says what is missing."
    )


def warn_of_lack(why: str) -> None:
    """Logs why tensors of a dtype are not scanned on a kind of device."""
    _log.warning(
        "Tensors are not scanned where torch lacks an operation for it: %s. Said once "
        "for each dtype and kind of device.",
        why,
    )
