"""Planted differences and healthy pairs of two ranks: which rank, and which layer."""

import contextlib
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from compared_models import batch, tower
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import overflow_fast

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD = 2


def nothing(*_):
    """Changes nothing."""


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def fsdp(**options):
    def apply(model):
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return apply


def plain(model):
    return model


def averaged(model, step, divisor=WORLD):
    """Adds up the gradients of all ranks, and divides them."""
    for each in model.parameters():
        dist.all_reduce(each.grad)
        each.grad /= divisor


@dataclass
class Run:
    """A run of two ranks, and what differs in it from the default one.

    Attributes:
        wrap: Wraps the model.
        model: Changes the model before it is wrapped; `wrapped`, afterwards.
        x: Makes the batch of a step, of this rank.
        scale: The factor of the loss in a step.
        gradients: Called with model and step before the optimizer's step.
        rate: The learning rate of a step.
        context: Makes what the backward of a step runs in, of the model and the step.
    """

    wrap: Callable[..., Any] = ddp()  # noqa: RUF009
    model: Callable[..., Any] = nothing
    wrapped: Callable[..., Any] = nothing
    x: Callable[[int, int], Any] = lambda step, rank: batch(10 * step + rank)
    scale: Callable[[int, int], float] = lambda step, rank: 1.0
    gradients: Callable[..., Any] = nothing
    rate: Callable[[int, int], float] = lambda step, rank: 0.1
    context: Callable[..., Any] = lambda model, step: contextlib.nullcontext()
    steps: int = 2

    def record(self, folder):
        """Trains, and records it, on this rank."""
        rank, model = dist.get_rank(), tower(num_blocks=2)
        self.model(model)
        model = self.wrap(model)
        self.wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with overflow_fast.recording(folder, model) as recording:
            for step in range(self.steps):
                if step:
                    recording.step()
                optimizer.zero_grad()
                with self.context(model, step):
                    loss = model(self.x(step, rank)) * self.scale(step, rank)
                    loss.backward()
                self.gradients(model, step)
                optimizer.param_groups[0]["lr"] = self.rate(step, rank)
                optimizer.step()


OneStep = functools.partial(Run, steps=1)


def on_rank_1(change):
    """Makes a change on rank 1 alone."""

    def apply(model, *rest):
        if dist.get_rank() == 1:
            change(model, *rest)

    return apply


def weight(name, factor=1.01):
    def apply(model, *_):
        parameter = next(p for n, p in model.named_parameters() if n.endswith(name))
        local = getattr(parameter, "to_local", lambda: parameter)()
        with torch.no_grad():
            local.mul_(factor)

    return apply


def gradient(name, factor, steps=(1,)):
    def apply(model, step):
        for n, parameter in model.named_parameters():
            if n.endswith(name) and step in steps:
                local = getattr(parameter.grad, "to_local", lambda p=parameter: p.grad)
                local().mul_(factor)

    return apply


def eps(model):
    model.blocks[1].norm.eps = 0.1


def wrong_backward(model):
    module = model.blocks[1].up
    module.register_full_backward_hook(
        lambda m, grads, _: tuple(1.1 * g for g in grads)
    )


def own_seed(model):
    model.drop.p = 0.2
    torch.manual_seed(dist.get_rank())


def one_seed(model):
    model.drop.p = 0.2
    torch.manual_seed(0)


def all_but_bias(model, step):
    for name, each in model.named_parameters():
        if not name.endswith("head.bias"):
            dist.all_reduce(each.grad)
            each.grad /= WORLD


def no_sync_in_step_1(model, step):
    return model.no_sync() if step == 1 else contextlib.nullcontext()


UP, HAND = "blocks.1.up", Run(plain, gradients=averaged)
SHARDS = Run(fsdp())
SUMMED = OneStep(plain, gradients=functools.partial(averaged, divisor=1))
# Run, reference, kind, module, rank, step, words.
PLANTED = {
    "summed, not averaged": (
        *(SUMMED, HAND, "gradients", "", 0, 0),
        ["2 times the reference"],
    ),
    "a parameter that is not reduced": (
        OneStep(plain, gradients=all_but_bias),
        *(HAND, "gradients", "", 0, 0, ["head.bias"]),
    ),
    "a stale weight": (
        OneStep(wrapped=on_rank_1(weight(f"{UP}.weight"))),
        *(Run(), "weights", UP, 1, 0, ["on rank 1"]),
    ),
    "a stale shard": (
        OneStep(fsdp(), wrapped=on_rank_1(weight(f"{UP}.weight"))),
        *(SHARDS, "weights", UP, 1, 0, ["on rank 1"]),
    ),
    "another batch": (
        Run(x=lambda s, r: batch(10 * s + r + 5 * (r == s == 1))),
        *(Run(), "batch", "", 1, 1, ["other inputs on rank 1"]),
    ),
    "batches in the other order of ranks": (
        OneStep(x=lambda s, r: batch(10 * s + 1 - r)),
        *(Run(), "batch", "", 0, 0, ["other inputs on ranks 0 and 1: "]),
    ),
    "a shorter batch": (
        Run(x=lambda s, r: batch(10 * s + r, rows=4 - (r == s == 1))),
        *(Run(), "batch", "", 1, 1, ["of shapes (3, 6, 8) and (4, 6, 8)"]),
    ),
    "an eps": (
        OneStep(model=on_rank_1(eps)),
        *(Run(), "forward", "blocks.1.norm", 1, 0, ["eps is 0.1, against 1e-05"]),
    ),
    "a loss": (
        Run(scale=lambda s, r: 1.0 + (r == s == 1)),
        *(Run(), "loss", "", 1, 1, ["by 1 of its norm"]),
    ),
    "a learning rate": (
        Run(rate=lambda s, r: 0.1 + 0.1 * (r == s == 1), steps=3),
        *(
            Run(steps=3),
            "update",
            "embed",
            1,
            2,
            ["Before step 2: the update."],
        ),
    ),
    "a gradient behind the all-reduce": (
        Run(gradients=on_rank_1(gradient(f"{UP}.weight", 1.5))),
        *(Run(), "gradients", "", 1, 1, ["on rank 1", "1.5 times"]),
    ),
    "a gradient of a shard": (
        Run(fsdp(), gradients=on_rank_1(gradient(f"{UP}.weight", 1.5))),
        *(SHARDS, "gradients", "", 1, 1, ["on rank 1"]),
    ),
    "gradients of shards, by an operation of DTensors": (
        OneStep(
            fsdp(), gradients=lambda m, s: [p.grad.mul_(2) for p in m.parameters()]
        ),
        *(SHARDS, "gradients", "", 0, 0, ["on ranks 0 and 1", "2 times"]),
    ),
    "a backward": (
        OneStep(model=on_rank_1(wrong_backward)),
        *(Run(), "backward", None, 1, 0, ["on rank 1"]),
    ),
    "a step that is not reduced": (
        *(Run(context=no_sync_in_step_1), Run(), None, None, 0, 1, ["step 1"]),
    ),
    "dropout": (
        OneStep(model=own_seed),
        *(
            OneStep(model=one_seed),
            "forward",
            "drop",
            1,
            0,
            ["drawn from unequal states"],
        ),
    ),
}
HEALTHY = {
    "twice": (Run(ddp()), Run()),
    "by hand": (HAND, Run()),
    "small buckets that are views": (
        Run(ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=True, static_graph=True)),
        Run(),
    ),
    "shards twice": (Run(fsdp()), SHARDS),
    "shards that are kept": (Run(fsdp(reshard_after_forward=False)), SHARDS),
    "shards against replicas": (SHARDS, Run()),
    "replicas against shards": (Run(), SHARDS),
    "bfloat16": (
        Run(
            model=lambda m: m.bfloat16(),
            steps=1,
            x=lambda s, r: batch(10 * s + r).bfloat16(),
        ),
        Run(steps=1),
    ),
    "fewer steps": (Run(), Run(steps=3)),
}


def runs_of(table):
    return [run for pair in table.values() for run in pair[:2]]


def run_once():
    """The runs of all pairs without those that are equal to an earlier one."""
    found = []
    for run in runs_of(PLANTED) + runs_of(HEALTHY):
        if run not in found:
            found.append(run)
    return found


def record_all(folder):
    for number, run in enumerate(run_once()):
        run.record(f"{folder}/{number}")


@functools.cache
def recorded():
    folder = tempfile.mkdtemp()
    ranks.on_ranks(WORLD, record_all, folder, over="gloo")
    return Path(folder)


def compared(run, reference):
    all_runs = run_once()
    return overflow_fast.compare(
        *(recorded() / str(all_runs.index(each)) for each in (run, reference))
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named_with_its_rank(name):
    run, reference, kind, module, rank, step, words = PLANTED[name]
    diff = compared(run, reference)
    first = diff.first
    assert first is not None, diff
    assert kind in (None, first.kind) and module in (None, first.module), diff
    assert (first.row.rank, first.row.step) == (rank, step), diff
    assert all(each in str(first) for each in words), diff


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pair_of_ranks_is_silent(name):
    diff = compared(*HEALTHY[name])
    assert diff.first is None and not diff.differs, diff
    assert diff.num_computed
