"""The learning rates of optimizers, read in each step without a sync of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim import Optimizer


class LearningRates:
    """The learning rates of one optimizer.

    A rate that is a tensor on a device is copied before the stats of its step are: the
    sync that these need covers it.
    """

    def __init__(self) -> None:
        self._before: list[Any] = []
        self._now: list[Any] = []

    def note(self, optimizer: Optimizer | None) -> None:
        """Takes in the rates of a step. Does not incur a CPU-GPU sync."""
        groups = () if optimizer is None else optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        self._before = self._now
        self._now = [rate if type(rate) is float else _sent(rate) for rate in rates]

    def largest(self, is_lagged: bool) -> float:
        """The largest magnitude; inf if one is not finite, 0 if there is none.

        Args:
            is_lagged: The stats of the step are on their way: what lies on a device is
                of the step before.
        """
        largest = 0.0
        for each in self._now:
            if type(each) is not float:
                each = 0.0 if is_lagged else _read(each)
            largest = _larger(largest, each)
        for each in self._before if is_lagged else ():
            largest = _larger(largest, 0.0 if type(each) is float else _read(each))
        return largest


def _larger(largest: float, rate: float) -> float:
    size = abs(rate)
    return largest if size <= largest else size if size < _INF else _INF


_INF = float("inf")


def _sent(rate: Any) -> Any:
    """A rate that is no float: a number, or a tensor with the end of its copy."""
    with contextlib.suppress(Exception):  # such as a tensor without values
        if not isinstance(rate, torch.Tensor):
            return float(rate)
        rate = rate.detach()
        if rate.device.type == "cpu":
            return float(rate)
        copy, copied = rate.to("cpu", non_blocking=True), torch.Event(rate.device)
        copied.record()
        return copy, copied
    return 0.0


def _read(sent: tuple[torch.Tensor, torch.Event]) -> float:
    """The number that was copied; it is there when stats that were sent later are."""
    copy, copied = sent
    copied.synchronize()
    return float(copy)
