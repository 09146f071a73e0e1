"""A failure: a run that ends non-finite, the same run cured, and the truth."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overflow_fast.guard.report.causes import ONLY_COMPILED

MARK = "# <-"
PHASES = ("forward", "backward", "optimizer", "data", "weights")


@dataclass
class Run:
    """One training run.

    Attributes:
        model: The model.
        loss: Takes the model and a batch, and returns what backward is called on.
        batch: Takes the number of a step, and returns its batch.
        steps: Within how many steps it fails.
        optimizer: None for SGD with a learning rate of 0.01.
        before_step: Called between backward and the optimizer's step, such as clipping.
        after_step: Called after the optimizer's step, with its number.
        around: Entered around forward and loss, such as autocast.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    steps: int = 1
    optimizer: torch.optim.Optimizer | None = None
    before_step: Callable[[], None] = lambda: None
    after_step: Callable[[int], None] = lambda step: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)


@dataclass(frozen=True)
class Failure:
    """A failure and its truth.

    Attributes:
        name: Of the function that builds it.
        source: The public reports, as owner/repo#number.
        phase: Where the first bad value arises, or already was.
        cause: The name of one of `causes.CAUSES`; "a|b" where both are right.
        op: The operation, such as "aten.exp"; in backward that of the forward whose
            derivative fails; "" where there is none; "a|b" where both are right.
        module: The name of the module whose code calls it, or that has the weight; ""
            for code outside of modules.
        tensor: The weight, buffer or key of the batch that is bad, or ""; "a|b" where
            it has two names.
        sample: The sample that it comes from, or None.
        ranks: With how many processes it runs.
        build: Takes whether it is cured, and returns the run.
        kind: "transient", "unwritten", "compiled", "ranks", or "".
    """

    name: str
    source: str
    phase: str
    cause: str
    op: str
    module: str
    tensor: str
    sample: int | None
    ranks: int
    kind: str
    build: Callable[[bool], Run]

    @property
    def ops(self) -> list[str]:
        """The operations that are right to name."""
        return self.op.split("|")

    @property
    def causes(self) -> list[str]:
        """The causes that are right to name."""
        return self.cause.split("|")

    @property
    def has_module(self) -> bool:
        """True if a module is to be named: not of bad data or a compiler."""
        return self.phase != "data" and self.cause != ONLY_COMPILED.name

    @property
    def line(self) -> int:
        """The number of the marked line, or 0."""
        lines, first = inspect.getsourcelines(self.build)
        places = [i for i, line in enumerate(lines) if MARK in line]
        return first + places[0] if places else 0

    @property
    def file(self) -> str:
        """The file of the marked line."""
        return inspect.getsourcefile(self.build) or ""


FAILURES: dict[str, Failure] = {}


def failure(
    source: str,
    phase: str,
    cause: str,
    op: str = "",
    module: str = "",
    *,
    tensor: str = "",
    sample: int | None = None,
    ranks: int = 1,
    kind: str = "",
) -> Callable[[Callable[[bool], Run]], Callable[[bool], Run]]:
    """Registers a function that builds a failure; the arguments are its truth."""

    def register(build: Callable[[bool], Run]) -> Callable[[bool], Run]:
        name = build.__name__
        assert name not in FAILURES, name
        facts = (source, phase, cause, op, module, tensor, sample, ranks, kind)
        FAILURES[name] = Failure(name, *facts, build)
        return build

    return register


def train(
    run: Run,
    step_loss: Callable[[Callable[[], Tensor]], Tensor] = lambda function: function(),
    mark: Callable[[str], None] = lambda phase: None,
    on_batch: Callable[[Any], None] = lambda batch: None,
) -> Iterator[Tensor]:
    """The training loop of all failures; yields the loss of each step.

    Args:
        run: The run.
        step_loss: Is given what computes the loss, and returns it.
        mark: Called as each part of a step begins.
        on_batch: Called with each batch.
    """
    optimizer = run.optimizer
    assert optimizer is not None
    for step in range(run.steps):
        mark("data")
        batch = run.batch(step)
        on_batch(batch)
        optimizer.zero_grad()
        mark("forward")
        with run.around():
            loss = step_loss(lambda batch=batch: run.loss(run.model, batch))
        mark("backward")
        loss.backward()
        mark("between")
        run.before_step()
        mark("optimizer")
        optimizer.step()
        mark("after")
        run.after_step(step)
        yield loss


def is_finite(run: Run, mark: Callable[[str], None] = lambda phase: None) -> bool:
    """Trains; whether losses, gradients, weights and buffers are finite all along."""
    for loss in train(run, mark=mark):
        tensors = [loss, *run.model.parameters(), *run.model.buffers()]
        tensors += [p.grad for p in run.model.parameters() if p.grad is not None]
        if not all(bool(t.detach().isfinite().all()) for t in tensors):
            return False
    return True


def rank() -> int:
    """The number of this process; the last one's where there is one alone."""
    return dist.get_rank() if dist.is_initialized() else 1


class Fn(nn.Module):
    """A module of one function, whose first argument is the module."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            if isinstance(child, Tensor) and not isinstance(child, nn.Parameter):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Chain(nn.Sequential):
    """Modules with names, one after another."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is as good as any."""
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return output.float().pow(2).mean()
