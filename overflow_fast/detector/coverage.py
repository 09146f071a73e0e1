"""The counts of what was scanned, and of what not: no verdict without them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .. import _C
from ..base.modules import modules_in
from ..base.text import printable
from ..torch_internals.module_internals import asks_for_hooks

_log = logging.getLogger("overflow_fast")


@dataclass(frozen=True)
class Coverage:
    """The tensors that a clean verdict covers.

    Attributes:
        tensors_listed: How many tensors the frames list.
        tensors_scanned: How many scans that took; a tensor without a write since its
            last scan in a forward is not scanned again.
        bytes_scanned: How many bytes the scanned tensors have.
        not_scanned: How many listed tensors were not scanned, by the reason.
        opaque: How many values may hold tensors and were not looked into, by their
            types and, for types that are opened, why: `list (nested too deep)`.
    """

    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: dict[str, int]
    opaque: dict[str, int]


def coverage_of(recorders: Iterable[_C.Recorder]) -> Coverage:
    """Sums up the counts of recorders."""
    found = [recorder.coverage for recorder in recorders]
    reasons, opaque = Counter[str](), Counter[str]()
    for each in found:
        reasons.update(each.reasons())
        opaque.update(each.opaque())
    return Coverage(
        sum(each.tensors_listed for each in found),
        sum(each.tensors_scanned for each in found),
        sum(each.bytes_scanned for each in found),
        dict(reasons),
        dict(opaque),
    )


class CoverageWarnings:
    """Logs what a clean verdict does not cover, when that first happens.

    Attributes:
        is_quiet: Log nothing: what a replay does not cover, its step has told.
    """

    def __init__(self) -> None:
        self.is_quiet = self._is_given = False
        self._opaque: set[str] = set()

    def give_once(self, recorder: _C.Recorder) -> None:
        """Logs that tensors were not scanned, once, and each type of opaque values."""
        if self.is_quiet:
            return
        coverage = recorder.coverage
        if coverage.not_scanned and not self._is_given:
            self._is_given = True
            reasons = coverage.reasons().items()
            _log.warning(
                "Some tensors were not scanned: %s.\nA clean verdict does not cover "
                "them; see `coverage`. Logged once.",
                ", ".join(f"{count} x {reason}" for reason, count in reasons),
            )
        if coverage.num_opaque_types > len(self._opaque):
            new = [name for name in coverage.opaque() if name not in self._opaque]
            self._opaque.update(new)
            _log.warning(
                "Inputs or outputs of modules hold values that are not looked into: "
                "%s.\nA clean verdict does not cover tensors in them; see `coverage`. "
                "Logged once for each type.",
                ", ".join(map(printable, new)),
            )


def warn_of_asking(model: nn.Module) -> None:
    """Logs that a model computes in another way while it is watched."""
    if asks_for_hooks(model):
        _log.warning(
            "%s asks whether modules have hooks: watched, it does not take its fast "
            "path, and its results may differ from those without a watch.\nWatch a "
            "module around it to see it from outside.",
            type(model).__name__,
        )


def warn_of_scripted(model: nn.Module) -> None:
    """Logs that scripted modules are not checked."""
    count = sum(isinstance(m, torch.jit.ScriptModule) for m in modules_in(model))
    if count:
        _log.warning(
            "%d scripted modules are not checked, because TorchScript has no hooks.\n"
            "Their outputs are checked where another module receives them.",
            count,
        )
