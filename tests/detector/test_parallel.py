"""Models on several ranks: DDP, FSDP2, FSDP1, tensor parallel, pipelines."""

import functools
import traceback

import pytest
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import INF, NAN, Block, assert_same, train_step
from ranks import device, on_ranks
from sharded_models import data, ddp, fsdp2, make, sharded_in_two_ways, tensor_parallel

from overflow_fast import OverflowGuard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.filterwarnings("ignore"),
]


# What wraps a model.


def compiled_fsdp2(model):
    fsdp2(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = functools.partial(FullyShardedDataParallel, use_orig_params=True)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    return wrap(model)


def compiled_ddp(model):
    return torch.compile(ddp(model), backend="aot_eager")


def compiled_tensor_parallel(model):
    return torch.compile(tensor_parallel(model), backend="aot_eager")


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def spoil_a_weight(model):
    """A weight so large that what the module makes of it overflows."""
    for name, parameter in model.named_parameters():
        if "blocks.1" in name and "fc1.weight" in name:
            local(parameter).fill_(3e38)


WATCH = ("activations", "grad_outputs", "gradients", "weights", "loss")


def watched_run(wrap, attach_first):
    """Trains under a guard that warns, then makes one module overflow."""
    model = make()
    guard = OverflowGuard(model, None, "warn", watch=WATCH) if attach_first else None
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    guard = guard or OverflowGuard(wrapped, optimizer, "warn", watch=WATCH)
    losses = []
    for batch in data():
        losses.append(train_step(wrapped, optimizer, batch).cpu())
        if attach_first:
            guard.check()
    clean = guard.last_report is None
    spoil_a_weight(model)
    x, y = data()[0]
    wrapped(x * 1e3, y=y)["loss"].backward()
    guard.check()
    report, coverage = guard.last_report, guard.coverage()
    guard.remove()
    return {
        "losses": losses,
        "clean": clean,
        "maker": report.verdict.origin.maker,
        "text": str(report),
        "frames": report.frames,
        "not_scanned": coverage.not_scanned,
        "failures": coverage.failures,
    }


def bare_run(wrap):
    wrapped = wrap(make())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    return [train_step(wrapped, optimizer, batch).cpu() for batch in data()]


def bytes_of_weights(wrap):
    """What a guard scans of weights in three steps, and what this rank has of them."""
    wrapped = wrap(make())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with OverflowGuard(wrapped, optimizer, watch=["weights"]) as guard:
        for batch in data(3):
            wrapped(batch[0], y=batch[1])  # a second unsharding
            train_step(wrapped, optimizer, batch)
    here = sum(local(parameter).nbytes for parameter in wrapped.parameters())
    return guard.coverage().bytes_scanned, 3 * here


RUNS = {
    "first": functools.partial(watched_run, attach_first=True),
    "later": functools.partial(watched_run, attach_first=False),
    "bare": bare_run,
    "weights": bytes_of_weights,
}
# What is compiled takes longest, and trains as it does in eager mode.
COMPILED = {
    compiled_ddp: (ddp, ["later"]),
    compiled_fsdp2: (fsdp2, ["first", "weights"]),
    compiled_tensor_parallel: (tensor_parallel, ["later"]),
}


def run_all(wraps):
    """The results of all these, by name; what failed by its traceback."""
    found = {}
    for wrap in wraps:
        _, names = COMPILED.get(wrap, (wrap, RUNS))
        for name in names:
            torch._dynamo.reset()
            try:
                found[wrap.__name__, name] = RUNS[name](wrap)
            except Exception:
                found[wrap.__name__, name] = traceback.format_exc()
    return found


ON_TWO = [ddp, fsdp2, tensor_parallel, *COMPILED]
ON_FOUR = [sharded_in_two_ways]


@functools.cache
def results(world):
    """One group of processes for all that needs as many; starting it takes longest."""
    return on_ranks(world, run_all, ON_TWO if world == 2 else ON_FOUR)


def cases(*runs):
    """The sizes, wraps and runs of those that are made."""
    all_of_them = [(2, wrap) for wrap in ON_TWO] + [(4, wrap) for wrap in ON_FOUR]
    return [
        (world, wrap, run)
        for world, wrap in all_of_them
        for run in COMPILED.get(wrap, (wrap, RUNS))[1]
        if run in runs
    ]


def check_run(result, losses):
    assert isinstance(result, dict), result
    assert_same(result["losses"], losses)
    assert result["clean"]
    assert result["failures"] == 0
    assert result["not_scanned"] == {}
    assert result["maker"] == "blocks.1.fc1"
    for mark in ("FSDP", "_orig_mod", "module.", "_wrapped"):
        assert mark not in result["text"]
    assert any("blocks.0.act GELU" in frame for frame in result["frames"])


@pytest.mark.parametrize("world, wrap, order", cases("first", "later"))
def test_what_wraps_a_model_changes_nothing(world, wrap, order):
    eager, _ = COMPILED.get(wrap, (wrap, RUNS))
    for found in results(world):
        check_run(found[wrap.__name__, order], found[eager.__name__, "bare"])


@pytest.mark.parametrize("world, wrap, run", cases("weights"))
def test_each_rank_scans_its_part_of_the_weights_once_in_a_step(world, wrap, run):
    for found in results(world):
        scanned, here = found[wrap.__name__, run]
        assert scanned == here


@pytest.mark.cuda  # it has no version for the CPU
@pytest.mark.parametrize("order", ["first", "later"])
def test_fsdp1(order):
    for found in on_ranks(torch.cuda.device_count(), run_all, [fsdp1]):
        check_run(found["fsdp1", order], found["fsdp1", "bare"])


# Pipelines.


class Stage(Assembled):
    def forward(self, x):
        out = self.block(x)
        self.calls += 1
        if self.index == 1 and self.calls == self.bad_batch:
            return out * INF
        return out


def run_pipeline(schedule_name, bad_batch):
    from torch.distributed import pipelining

    torch.manual_seed(dist.get_rank())
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Stage(block=Block(8), index=rank, bad_batch=bad_batch, calls=0).to(
        device()
    )
    stage = pipelining.PipelineStage(module, rank, world, device())
    schedule = getattr(pipelining, schedule_name)(
        stage, n_microbatches=4, loss_fn=lambda out, y: ((out - y) ** 2).mean()
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    guard = OverflowGuard(module, optimizer, "warn")
    torch.manual_seed(0)
    x, y = torch.randn(8, 8, device=device()), torch.randn(8, 8, device=device())
    inputs, targets = ((x,), {"target": y})
    inputs = inputs if rank == 0 else ()
    targets = targets if rank == world - 1 else {}
    schedule.step(*inputs, **targets)
    optimizer.step()
    report = guard.last_report
    guard.remove()
    if report is None:
        return None
    verdict = report.verdict
    return verdict.origin.maker, verdict.batch, verdict.first.kind, verdict.first.fqn


def of_nans(meta, device):
    """What a pipeline learns shapes with is memory that may hold anything."""
    tensor = torch.empty_strided(
        meta.shape, meta.stride, dtype=meta.dtype, device=device
    )
    return tensor.fill_(NAN)


def run_pipelines():
    from torch.distributed.pipelining import _utils

    _utils._make_tensor_from_meta = of_nans
    return {
        (name, bad): run_pipeline(name, bad)
        for name in ("ScheduleGPipe", "Schedule1F1B")
        for bad in (0, 4)  # the first call only learns shapes
    }


@functools.cache
def pipelines():
    return on_ranks(2, run_pipelines)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_microbatches_are_told_apart(schedule):
    first, second = pipelines()
    assert first[schedule, 0] is None
    assert second[schedule, 0] is None
    maker, batch, kind, _ = second[schedule, 4]
    # The third of four; the stage itself multiplies what its block returned.
    assert (maker, batch, kind) == ("the model", 2, "output")
    # The rank before gets the bad gradient back.
    assert first[schedule, 4][2] == "grad_output"
