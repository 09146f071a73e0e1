"""Updates of weights: too small to move them, or larger than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ...base.modules import named_parameters
from ...base.text import counted, dtype_name
from ...torch_internals.tensor_internals import local_part
from ..kinds import POSITIVE, SHARE, whole
from ..options import option
from .monitor import Guarded, Monitor, MonitoredStep

_SAMPLED = 4096  # elements of a weight: what it costs does not grow with the model's


@dataclass(frozen=True)
class Updates(Monitor):
    """Weights that their optimizer does not move, or by more than they are large.

    Compares up to 4,096 elements of each weight before and after a step that was made:
    two reads of these and one CPU-GPU sync for each device, in one step of `every`.
    bfloat16 weights stand still under a small learning rate, as their updates are
    rounded away; a moment that is 0 or inf divides an update up, or down to 0.
    """

    needs_magnitudes = False

    every: int = field(
        default=100,
        metadata=option(
            "Compare weights before and after one step of this many.", whole(1)
        ),
    )
    still: float = field(
        default=0.9,
        metadata=option(
            "Log a warning if this share of a weight's elements stays as it is, though "
            "their gradient is not 0.",
            SHARE,
        ),
    )
    ratio: float = field(
        default=2.0,
        metadata=option(
            "Log a warning if an element changes by more than this many times the "
            "weight's largest magnitude.",
            POSITIVE,
        ),
    )

    def start(self, guarded: Guarded) -> Monitor:
        return _UpdateWatch(guarded, self)


class _Sample(NamedTuple):
    """Elements of a weight before a step, and where their gradient is not 0."""

    weight: torch.Tensor
    before: torch.Tensor
    moves: torch.Tensor


class _Update(NamedTuple):
    """The update of a weight.

    Attributes:
        still: The share of elements that did not change though their gradient is not 0.
        ratio: The largest change beside the weight's largest magnitude before.
    """

    name: str
    dtype: torch.dtype
    rate: float
    still: float
    ratio: float


class _UpdateWatch(Monitor):
    """Compares weights before and after a step.

    Args:
        guarded: The training.
        asked: What is asked for.
    """

    def __init__(self, guarded: Guarded, asked: Updates) -> None:
        self._guarded = guarded
        self._asked = asked
        self._samples: list[tuple[Optimizer, float, list[_Sample]]] = []
        self._clauses: list[str] = []
        self._named: set[tuple[str, str]] = set()  # that were warned of
        self._last: list[_Update] = []

    def begin_step(self, step: int) -> None:
        self._samples.clear()

    def look(self, step: MonitoredStep) -> Iterable[str]:
        if step.optimizer is not None and step.number % self._asked.every == 0:
            self._samples += [
                (step.optimizer, _rate_of(group), _samples_of(group["params"]))
                for group in step.optimizer.param_groups
            ]
        said, self._clauses = self._clauses, []
        return said

    def end_step(self, step: int) -> None:
        made = [
            (rate, sample)
            for optimizer, rate, samples in self._samples
            if rate and not self._guarded.was_skipped(optimizer)
            for sample in samples
        ]
        self._samples.clear()
        if not made:
            return
        names = {
            id(parameter): f"{prefix}{name}"
            for prefix, model in self._guarded.models.items()
            for name, parameter in named_parameters(model)
        }
        numbers = _numbers_of([sample for _, sample in made])
        self._last = [
            _Update(
                names.get(id(sample.weight), "a weight of the optimizer's own"),
                *(sample.weight.dtype, rate, still, ratio),
            )
            for (rate, sample), (still, ratio) in zip(made, numbers, strict=True)
        ]
        self._clauses += self._judged(step)

    def _judged(self, step: int) -> list[str]:
        updates, asked = self._last, self._asked
        still = self._new("still", [u for u in updates if u.still >= asked.still])
        large = self._new("large", [u for u in updates if u.ratio > asked.ratio])
        clauses = []
        if still and all(each.still == 1 for each in updates):
            clauses.append(
                f"step {step} changed none of {counted(len(updates), 'weight')}, "
                f"though gradients are not 0 (learning rate {still[0].rate:.3g})"
            )
        elif still:
            worst = max(still, key=lambda each: each.still)
            clauses.append(
                f"step {step} left {worst.still:.0%} of {worst.name} "
                f"({dtype_name(worst.dtype)}) as it was, though its gradient is not 0 "
                f"(learning rate {worst.rate:.3g}){_and_more(still)}"
            )
        if large:
            worst = max(large, key=lambda each: each.ratio)
            clauses.append(
                f"step {step} changed {worst.name} by {worst.ratio:.3g} times its "
                f"largest magnitude (learning rate {worst.rate:.3g}){_and_more(large)}"
            )
        return clauses

    def _new(self, kind: str, found: list[_Update]) -> list[_Update]:
        """Those of which no warning has been logged."""
        new = [each for each in found if (kind, each.name) not in self._named]
        self._named |= {(kind, each.name) for each in found}
        return new

    def metrics(self) -> Mapping[str, float]:
        if not self._last:
            return {}
        return {
            "update_ratio": max(each.ratio for each in self._last),
            "still_weights": max(each.still for each in self._last),
        }


def _rate_of(group: Mapping[str, object]) -> float:
    """A group's learning rate; 1.0 where it has none. Syncs for one on a device."""
    rate = group.get("lr", 1.0)
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else 1.0


@torch.no_grad()
def _samples_of(parameters: Iterable[torch.Tensor]) -> list[_Sample]:
    """Samples the weights that have a dense, finite gradient."""
    found = []
    for each in parameters:
        gradient = each.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        values, slopes = _sampled(each), _sampled(gradient)
        if values is None or slopes is None or values.shape != slopes.shape:
            continue
        moves = (slopes != 0) & slopes.isfinite()
        found.append(_Sample(each, values.clone(), moves))
    return found


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Some elements of a tensor's local part, the same each time; None without any."""
    own = local_part(tensor).detach()
    if own.layout is not torch.strided or not own.is_floating_point():
        return None
    if not own.numel() or own.is_meta:
        return None
    flat = own.reshape(-1) if own.is_contiguous() else own.flatten()
    return flat[:: -(-flat.numel() // _SAMPLED)]


@torch.no_grad()
def _numbers_of(samples: Iterable[_Sample]) -> list[tuple[float, float]]:
    """The share that stands still and the ratio of each weight. Syncs with devices."""
    found = []
    for weight, before, moves in samples:
        now = _sampled(weight)
        if now is None or now.shape != before.shape:  # it was replaced
            found.append(torch.zeros(2))
            continue
        wide = torch.promote_types(before.dtype, torch.float32)
        change = (now.to(wide) - before.to(wide)).abs()
        still = ((change == 0) & moves).sum() / moves.sum().clamp(min=1)
        largest = before.to(wide).abs().max()
        # A weight that was 0 has no size that its change could be compared with.
        ratio = torch.where(largest > 0, change.max() / largest, 0.0)
        found.append(torch.stack([still.to(wide), ratio]))
    return [(each[0], each[1]) for each in _on_host(found)]


def _on_host(numbers: list[torch.Tensor]) -> list[list[float]]:
    """Brings small tensors to the host, in one copy where they are on one device."""
    if len({(each.device, each.dtype) for each in numbers}) == 1:
        lists: list[list[float]] = torch.stack(numbers).tolist()
        return lists
    return [each.tolist() for each in numbers]


def _and_more(found: list[_Update]) -> str:
    more = len(found) - 1
    return f", and {counted(more, 'weight')} more likewise" if more else ""
