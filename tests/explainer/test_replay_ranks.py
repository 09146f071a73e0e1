"""All ranks replay a bad step together, and go on as if there had been none."""

import functools
import os
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import assert_same
from processes import context
from ranks import device
from sharded_models import ddp, fsdp2, sharded_in_two_ways, tensor_parallel
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.explainer import budget, replay_ranks
from overflow_fast.explainer.replayer import Replayer

pytestmark = [
    pytest.mark.explains,
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
]


class Block(nn.Module):
    """Divides by nothing, or takes a root of nothing, in samples that are negative."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)
        self.fails_in = ""

    def forward(self, x):
        y = self.fc2(nn.functional.gelu(self.fc1(self.drop(x))))
        is_bad = (x[:, :1] < -5).float()
        if self.fails_in == "forward":
            y = y / (1 - is_bad)
        if self.fails_in == "backward":
            y = y + 0 * (1 - is_bad).mul(y.detach()[:, :1] ** 2 * y[:, :1] ** 2).sqrt()
        return y + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return ((self.head(self.norm(x)) - y) ** 2).mean()


def data(seed):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x = torch.randn(4, 8, generator=generator).clamp(-3, 3)
    return x.to(device()), torch.randn(4, 1, generator=generator).to(device())


def seeded(wrap):
    budget.LEAST_SECONDS = ranks.PATIENCE.total_seconds()  # whatever else runs here
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    model = wrap(Net().to(device()))
    torch.manual_seed(dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def blocks_of(model):
    return getattr(model, "module", model).blocks


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_state(model, optimizer):
    copied = lambda t: None if t is None else local(t).detach().clone()  # noqa: E731
    return {
        "model": [copied(t) for t in model.state_dict().values()],
        "optimizer": [
            [copied(value) for value in optimizer.state.get(p, {}).values()]
            for p in model.parameters()
        ],
        "gradients": [copied(p.grad) for p in model.parameters()],
        "random": [torch.get_rng_state(), list(random.getstate()[1])],
        "flags": [
            getattr(model, f"require_{which}_sync", None)
            for which in ("forward_param", "backward_grad")
        ],
    }


def train(wrap, bad_ranks, fails_in, explain, same_batch=False, micro_batches=1):
    """Three steps, of which the second is bad; what was found, and all that is left."""
    model, optimizer = seeded(wrap)
    guard = OverflowGuard(
        model, optimizer, "skip", explain=explain, process_group=dist.group.WORLD
    )
    states = []
    for step in range(3):
        optimizer.zero_grad()
        for i in range(micro_batches):
            is_last = i + 1 == micro_batches
            x, y = data(7 if same_batch else 10 * step + i)
            is_bad = step == 1 and is_last and dist.get_rank() in bad_ranks
            blocks_of(model)[1].fails_in = fails_in if is_bad else ""
            if is_bad:
                x = x.clone()
                x[2, 0] = -20
                blocks_of(model)[0].fails_in = ""
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = is_last
            model(x, y).backward()
        optimizer.step()
        states.append(whole_state(model, optimizer))
    report = guard.last_report
    found = report.explanation if report is not None else None
    guard.remove()
    return states, found, guard.num_skipped


def replayed(*arguments, **options):
    states, found, skipped = train(*arguments, True, **options)
    expected, none, skipped_too = train(*arguments, False, **options)
    try:
        assert_same(states, expected)
        is_same = True
    except AssertionError:
        is_same = False
    op = found.op and found.op.name
    place = found.phase, found.cause, op, found.module, found.rank, found.num_ranks
    sample = None if found.sample is None else int(found.sample)
    return place, sample, is_same, (none, skipped, skipped_too), str(found)


def bucket_views(model):
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def own_buffers(model):
    """DDP without a collective in its forward, from the second step on."""
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    model(x, y).backward()
    optimizer.step()


ONE, BOTH = [1], [0, 1]
CASES = {
    "ddp, forward": (ddp, ONE, "forward"),
    "ddp, backward": (bucket_views, ONE, "backward"),
    "ddp, both ranks": (ddp, BOTH, "forward"),
    "ddp, micro-batches": (ddp, ONE, "forward", False, 2),
    "fsdp2, backward": (fsdp2, ONE, "backward"),
    "fsdp2, micro-batches": (fsdp2, [0], "forward", False, 2),
    "tensor parallel": (tensor_parallel, BOTH, "forward", True),
}


def refused(**arguments):
    """What is said where one rank cannot replay; whether training goes on."""
    model, optimizer = seeded(ddp)
    own = {name: values[dist.get_rank()] for name, values in arguments.items()}
    guard = OverflowGuard(model, optimizer, "skip", **own)
    blocks_of(model)[1].fails_in = "forward"
    x, y = data(1)
    x[0, 0] = -20
    step(model, optimizer, x, y)
    found = guard.last_report.explanation
    blocks_of(model)[1].fails_in = ""
    step(model, optimizer, *data(2))
    return None if found is None else (str(found), found.replays), guard.num_skipped


def without_explainer():
    """What is said where one rank cannot import what explains the step."""
    gone = {"overflow_fast.explainer.step_explainer": None} if dist.get_rank() else {}
    with mock.patch.dict(sys.modules, gone):
        return refused()


FIRST = "OVERFLOW_FAST_TEST_FIRST_CALL"


def raising_on_one_rank():
    """A forward that cannot be run again on one rank, outside of collectives."""
    model, optimizer = seeded(own_buffers)
    guard = OverflowGuard(model, optimizer, "skip")
    step(model, optimizer, *data(0))
    blocks_of(model)[1].fails_in = "forward"
    x, y = data(1)
    x[0, 0] = -20

    def compute():
        if dist.get_rank() and os.environ.pop(FIRST, None) is None:
            raise RuntimeError("the program was called again")
        return model(x, y)

    os.environ[FIRST] = "1"  # no replay restores the environment
    guard.run(compute).backward()
    optimizer.step()
    return str(guard.last_report.explanation), guard.num_skipped


def writing_on_one_rank():
    """A loss that one rank writes to a file of its own."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "skip", explain=True)
    with tempfile.TemporaryFile("w") as opened:
        file = None if dist.get_rank() else opened

        def compute():
            loss = model(torch.full((2, 4), torch.nan)).sum()
            if file is not None:
                print(loss.item(), file=file)
            return loss

        guard.run(compute).backward()
        optimizer.step()
    return guard.last_report.explanation.notes, guard.num_skipped


def ending_within(wrap, raises):
    """A forward with collectives behind what ends its replay on one rank."""
    model, optimizer = seeded(wrap)
    guard = OverflowGuard(model, optimizer, "skip", explain=True)
    step(model, optimizer, *data(0))
    blocks_of(model)[1].fails_in = "forward"
    x, y = data(1)
    x[0, 0] = -20
    calls = []

    def touch(*_):
        calls.append(1)
        if dist.get_rank() and len(calls) > 1:
            if raises:
                raise RuntimeError("the program was called again")
            os.mkdir("/a/folder")

    blocks_of(model)[0].register_forward_hook(touch)
    step(model, optimizer, x, y)
    return guard.last_report.explanation.notes, guard.num_skipped


ENDS = {
    (wrap.__name__, raises): functools.partial(ending_within, wrap, raises)
    for wrap in (fsdp2, ddp)
    for raises in (False, True)
}


def asked():
    """A policy of the user's own, which is given the explanation."""
    model, optimizer = seeded(ddp)
    seen = []
    guard = OverflowGuard(
        model, optimizer, lambda report: seen.append(report.explanation) or "skip"
    )
    blocks_of(model)[1].fails_in = "forward"
    x, y = data(1)
    x[0, 0] = -20 if dist.get_rank() else 0
    step(model, optimizer, x, y)
    return [each.op.name for each in seen], guard.num_skipped


def transient():
    """What only the first run makes, on one rank."""
    model, optimizer = seeded(fsdp2)
    guard = OverflowGuard(model, optimizer, "skip")
    x, y = data(1)
    is_first = dist.get_rank() == 1
    flaky = blocks_of(model)[1].register_forward_hook(lambda *a: a[-1] * float("nan"))
    if not is_first:
        flaky.remove()
    loss = model(x, y)
    flaky.remove()
    loss.backward()
    optimizer.step()
    found = guard.last_report.explanation
    return found.phase, found.cause, found.replays


def reduced_in_half():
    """A communication hook whose sum overflows: no rank's own gradient is bad."""

    def add(state, bucket):
        half = bucket.buffer().to(torch.float16)
        future = dist.all_reduce(half, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(torch.float32))

    model, optimizer = seeded(ddp)
    model.register_comm_hook(None, add)
    guard = OverflowGuard(model, optimizer, "skip")
    (1e6 * model(*data(0))).backward()
    optimizer.step()
    found = guard.last_report.explanation
    return found.cause, str(found)


class Stage(Assembled):
    """A stage of a pipeline, which fails in the second batch."""

    def forward(self, x):
        y = self.fc(x)
        if self.fails_in == "forward":
            return y / (y.detach() * 0)
        return y + 0 * (y * 0).abs().sqrt() if self.fails_in else y


def a_pipeline(bad_rank, fails_in):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Stage(fc=nn.Linear(8, 8), fails_in="")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "skip", process_group=dist.group.WORLD)
    stage = PipelineStage(model, rank, 2, device())
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    skipped = []
    for i in range(3):
        model.fails_in = fails_in if i == 1 and rank == bad_rank else ""
        optimizer.zero_grad()
        x = torch.randn(4, 8).to(device())
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
        skipped.append(guard.last_step_skipped)
    found = guard.last_report.explanation
    return skipped, (found.phase, found.op.name, found.rank, found.num_ranks)


PIPELINES = [(0, "forward"), (1, "forward"), (0, "backward")]


def on_two_ranks():
    found = {name: replayed(*case[:3], **options(case)) for name, case in CASES.items()}
    return {
        **found,
        "explain=False": refused(explain=[True, False]),
        "nothing kept": refused(explain=[False, True]),
        "no explainer": without_explainer(),
        "raising": raising_on_one_rank(),
        "writing": writing_on_one_rank(),
        "ending": [run() for run in ENDS.values()],
        "asked": asked(),
        "transient": transient(),
        "reduced in half": reduced_in_half(),
        "pipelines": [a_pipeline(*each) for each in PIPELINES],
    }


def options(case):
    return dict(zip(("same_batch", "micro_batches"), case[3:], strict=False))


@functools.cache
def on_two():
    return ranks.on_ranks(2, on_two_ranks)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_replay_and_name_who_made_it(name, as_kept):
    _, bad, fails_in = CASES[name][:3]
    expected = (
        ("forward", "undefined", "aten.div.Tensor")
        if fails_in == "forward"
        else ("backward", "singular gradient", "aten.sqrt")
    )
    for each in on_two():
        place, sample, is_same, numbers, text = each[name]
        assert place == (*expected, "blocks.1", bad[0], len(bad)), text
        assert sample == 2, text
        assert is_same
        assert numbers == (None, 1, 1)
        as_kept(text.splitlines()[0])
        # Rules of torch calls are data: each rank changes its own calls.
        added = "the divisor" if fails_in == "forward" else "inside the sqrt"
        assert added in text.partition("tried  ")[2], text


@pytest.mark.parametrize("name", ["explain=False", "nothing kept"])
def test_a_rank_that_keeps_nothing_has_all_skip_the_replay(name, as_kept):
    for found, skipped in (each[name] for each in on_two()):
        assert skipped == 1
        if name == "nothing kept":  # the rank whose report it is does not ask
            assert found is None
            continue
        text, replays = found
        as_kept(text)
        assert replays == 0


def test_a_rank_that_cannot_import_the_explainer_has_all_skip_the_replay(as_kept):
    for (text, replays), skipped in (each["no explainer"] for each in on_two()):
        as_kept(text)
        assert (replays, skipped) == (0, 1)


def test_a_rank_whose_replay_raises_ends_that_of_all(as_kept):
    for text, skipped in (each["raising"] for each in on_two()):
        as_kept(text)
        assert skipped == 1


def test_what_one_rank_alone_writes_ends_the_replay_of_all(as_kept):
    for [note], skipped in (each["writing"] for each in on_two()):
        as_kept(note)
        assert skipped == 1


@pytest.mark.parametrize("case", range(len(ENDS)))
def test_no_rank_waits_in_a_collective_for_one_that_has_ended(case):
    name, raises = list(ENDS)[case]
    for each in on_two():
        [note, *_], skipped = each["ending"][case]
        assert "rank 1" in note, name
        assert ("called again" in note) == raises
        assert raises or "Not replayed: touch changes files or folders" in note
        assert skipped == 1


def test_a_callable_is_asked_once_and_given_the_explanation():
    (first, _), (second, _) = (each["asked"] for each in on_two())
    assert first + second == ["aten.div.Tensor"]
    assert all(each["asked"][1] == 1 for each in on_two())


def test_what_happens_once_on_one_rank_is_not_reproducible():
    for each in on_two():
        assert each["transient"] == ("forward", "not reproducible", 4)


def test_what_ddps_reduction_makes_is_no_transient(as_kept):
    for cause, text in (each["reduced in half"] for each in on_two()):
        assert cause == "unknown"
        as_kept(text)


def test_the_stages_of_a_pipeline_are_replayed_one_by_one():
    ops = {"forward": "aten.div.Tensor", "backward": "aten.sqrt"}
    for each in on_two():
        for (rank, phase), (skipped, place) in zip(
            PIPELINES, each["pipelines"], strict=True
        ):
            assert skipped == [False, True, False]
            assert place == (phase, ops[phase], rank, 1)


# Four ranks.


def one_of_four():
    return replayed(ddp, [2], "backward")


def in_two_ways():
    return replayed(sharded_in_two_ways, [2, 3], "forward", same_batch=True)


SCENARIOS = {"one of four": one_of_four, "in two ways": in_two_ways}


@pytest.mark.parametrize("name", SCENARIOS)
def test_four_ranks(name):
    op = "aten.sqrt" if name == "one of four" else "aten.div.Tensor"
    num_bad = 1 if name == "one of four" else 2
    for found in ranks.all_of("test_replay_ranks", name):
        place, sample, is_same, numbers, text = found
        assert place[2:] == (op, "blocks.1", 2, num_bad), text
        assert (sample, is_same, numbers) == (2, True, (None, 1, 1)), text


# A rank that dies, or comes too late.


def _replay(rank, folder, wrap, fate, are_others_done):
    torch.set_num_threads(1)
    url = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=2, timeout=ranks.PATIENCE
    )
    replay_ranks.PATIENCE_SECONDS = 0.5
    model, optimizer = seeded(wrap)
    OverflowGuard(model, optimizer, "skip")
    step(model, optimizer, *data(0))
    blocks_of(model)[1].fails_in = "forward"
    run = Replayer.follow

    def leave(self, *order):
        if rank == 1:
            if fate == "dies":
                os._exit(7)
            are_others_done.wait()
        return run(self, *order)

    Replayer.follow = leave
    x, y = data(1)
    x[0, 0] = -20
    error = None
    try:
        step(model, optimizer, x, y)
    except Exception as caught:
        error = caught
    found = type(error).__name__, str(getattr(error, "report", error))
    torch.save(found, folder / str(rank))
    os._exit(0)


@pytest.mark.parametrize(
    ("wrap", "fate"), [(own_buffers, "dies"), (fsdp2, "dies"), (own_buffers, "is late")]
)
def test_no_rank_waits_for_one_that_does_not_come(wrap, fate, as_kept):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_done = context().Event()
        arguments = folder, wrap, fate, is_done
        processes = [
            context().Process(target=_replay, args=(rank, *arguments))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        first, second = processes
        first.join(ranks.PATIENCE.total_seconds())
        is_done.set()
        second.join(ranks.PATIENCE.total_seconds())
        assert [p.exitcode for p in processes] == [0, 7 if fate == "dies" else 0]
        for rank in range(1 if fate == "dies" else 2):
            error, text = torch.load(folder / str(rank))
            # It says what it saw, and the run ends: nobody knows where the other is.
            assert error == "NonFiniteError", text
            lines = text.splitlines()
            as_kept([each for each in lines if each.startswith(("Step", "note"))])
