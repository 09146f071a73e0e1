"""Which modules must stay in float32 in a model whose weights are half precision.

As for an export, or where no autocast is: what a module returns is cast to half
precision when it returns. So a list holds all from an overflow on up to where values
fit again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...base.modules import named_modules
from ...base.text import error_line
from ...base.tree import mapped
from ...explainer.explain import explain
from ...explainer.remedies.keep_in_fp32 import has_forward, keep_in_fp32
from ...explainer.tensor_kinds import floats_in
from ...explainer.wider import HALF
from ...guard.report.remedy import Remedy
from .copies import copied_batch
from .layers import DTYPES, RelativeDifference
from .precision_advice import PrecisionCheck, Thresholds

_BUDGET = 32  # forwards of one explanation; chosen, not measured


class HalfLists:
    """Finds lists by running copies of a model, as `explain()` does.

    Args:
        model: The model.
        batches: The batches.
        limits: The thresholds.
        max_rounds: How often a list may be widened.
        function: Takes the model and a batch, and returns what is judged.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        limits: Thresholds,
        max_rounds: int,
        function: Callable[[nn.Module, Any], Any],
    ) -> None:
        self._model = model
        self._batches = batches
        self._limits = limits
        self._max_rounds = max_rounds
        self._function = function
        wide = self._copy(torch.float32)
        self._true = [self._output(wide, each, torch.float32) for each in batches]

    def check(self, dtype: str) -> PrecisionCheck:
        """Runs a dtype with the fewest modules in float32 that were found.

        Args:
            dtype: "float16" or "bfloat16".
        """
        kept: dict[str, None] = {}
        until: dict[str, None] = {}
        half = DTYPES[dtype]
        for runs in range(1, self._max_rounds + 2):
            model = self._copy(half)
            if kept:
                keep_in_fp32(model, list(kept), list(until) or None)
            failure, difference, bad = self._judged(model, half)
            check = PrecisionCheck(
                *(dtype, list(kept), 1.0, failure),
                finite=math.isfinite(difference),
                loss_difference=difference if math.isfinite(difference) else None,
                runs=runs,
                until=list(until),
            )
            more = None
            if failure and bad is not None and runs <= self._max_rounds:
                more = self._remedy(model, bad, half)
            if more is None:
                break
            kept.update(dict.fromkeys(more.modules))
            until.update(dict.fromkeys(more.until))
        return check

    def _judged(
        self, model: nn.Module, half: torch.dtype
    ) -> tuple[str, float, Any | None]:
        """Why a model fails, how far off it is, and the batch that shows it."""
        found = RelativeDifference()
        for batch, true in zip(self._batches, self._true, strict=True):
            try:
                output = self._output(model, batch, half)
            except Exception as error:
                return error_line(error), math.inf, None
            if not all(bool(each.isfinite().all()) for each in output):
                return "not finite", math.inf, batch
            for one, two in zip(output, true, strict=True):
                found.add(one, two)
        most = self._limits.max_loss_difference * (1 + (half is torch.bfloat16))
        if found.relative > most:
            return f"outputs differ by more than {most:.2%}", found.relative, batch
        return "", found.relative, None

    def _remedy(self, model: nn.Module, batch: Any, half: torch.dtype) -> Remedy | None:
        """The remedies in float32 that were tried for a batch that fails."""
        found = explain(model, _cast(copied_batch(batch), half), budget=_BUDGET)
        remedies = [each for each in found.remedies if each.modules]
        return next((each for each in remedies if each.is_recommended), None)

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        made = copy.deepcopy(self._model).eval()
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.dtype in (*HALF, torch.float32):
                tensor.data = tensor.data.to(dtype)
        return made.requires_grad_(False)

    def _output(
        self, model: nn.Module, batch: Any, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        with torch.no_grad():
            output = self._function(model, _cast(copied_batch(batch), dtype))
        return [each.detach().float() for each in floats_in(output)]


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    floats = (*HALF, torch.float32)
    return mapped(batch, lambda t: t.to(dtype) if t.dtype in floats else t)


def onnx_scopes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """How the nodes of modules begin in an ONNX graph of `torch.onnx.export`.

    Args:
        model: The model.
        names: The qualified names of the modules.
    """
    modules, scopes = dict(named_modules(model)), []
    for name in names:
        scope, begin = "", ""
        for part in name.split("."):
            begin = f"{begin}.{part}" if begin else part
            module = modules.get(begin)
            # What is never called, as a ModuleList, has no scope of its own.
            is_called = module is None or has_forward(module)
            scope += f"{part}/" if is_called else f"{part}."
        scopes.append(f"/{scope}")
    return scopes
