"""The guard on a device without kernels here: its waits, operations and errors."""

import contextlib
import threading

import pytest
import torch
from guarding import INF, assert_same, batches, make, plant, state_of
from sealed import (
    fail_later,
    late,
    memory_limit,
    pageable,
    slow_events,
    watched,
)
from torch import nn

from overflow_fast import OverflowGuard

pytestmark = pytest.mark.sealed


def on_device(model, optimizer_class=torch.optim.SGD, **options):
    model.to("sealed")
    return model, optimizer_class(model.parameters(), lr=1e-2, **options)


class Chain(nn.Module):
    """Layers, of which a batch runs some."""

    def __init__(self, width=16, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.used = depth

    def forward(self, x):
        for layer in self.layers[: self.used]:
            x = layer(x).relu()
        return x.mean()


def step(model, optimizer, x):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Scaled(nn.Module):
    """Multiplies by a number, so that a test sees its call."""

    def forward(self, x):
        return x * 1


class OnASide(nn.Module):
    """Runs a layer on a stream of its own, for which the step does not wait."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), Scaled()
        self.stream = torch.Stream(device="sealed")
        self.is_bad = False

    def forward(self, x):
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream, torch.no_grad():
            y = self.layer(x)
            if self.is_bad:
                y = y.clone()
                y.view(-1)[3] = INF
            self.out(y)
        return x


@pytest.mark.parametrize("is_late", [False, True])
def test_work_on_a_side_stream_is_judged_in_its_own_step(is_late):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), OnASide(), nn.Linear(8, 1))
    model, optimizer = on_device(model)
    x = torch.randn(4, 8, device="sealed")
    skipped = []
    with (
        late() if is_late else contextlib.nullcontext(),
        OverflowGuard(model, optimizer, "skip", explain=False) as guard,
    ):
        for i in range(4):
            model[1].is_bad = i == 2
            before = guard.num_skipped
            model(x).mean().backward()
            with watched() as seen:
                optimizer.step()
            optimizer.zero_grad()
            skipped.append(guard.num_skipped > before)
            assert seen["event block"] >= 1
    assert skipped == [False, False, True, False]
    assert not guard.coverage().not_scanned


@pytest.mark.parametrize("varies", [False, True], ids=["same calls", "varying calls"])
@pytest.mark.parametrize("sync, waits", [("step", 1), ("lagged", 0)])
def test_the_host_waits_as_often_as_it_says(sync, waits, varies):
    torch.manual_seed(0)
    model, optimizer = on_device(Chain(), torch.optim.AdamW, fused=True)
    x = torch.randn(4, 16, device="sealed")
    with OverflowGuard(model, optimizer, sync=sync) as guard:
        step(model, optimizer, x)
        step(model, optimizer, x)
        before = guard.num_syncs
        with slow_events(3), watched() as seen:
            for i in range(6):
                model.used = 3 + i % 3 if varies else 6
                step(model, optimizer, x)
        assert guard.num_syncs - before == seen.waits == 6 * waits
        assert seen.faults == 0


def test_a_device_more_than_a_step_behind_is_waited_for():
    torch.manual_seed(0)
    model, optimizer = on_device(Chain(), torch.optim.AdamW, fused=True)
    x = torch.randn(4, 16, device="sealed")
    with late(), OverflowGuard(model, optimizer, sync="lagged") as guard:
        with watched() as seen:
            for _ in range(6):
                step(model, optimizer, x)
        assert guard.num_syncs == seen.waits == 5


@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_a_device_without_pinned_memory_makes_the_host_wait_and_that_is_counted(sync):
    torch.manual_seed(0)
    model, optimizer = on_device(Chain(), torch.optim.AdamW, fused=True)
    x = torch.randn(4, 16, device="sealed")
    with pageable(), OverflowGuard(model, optimizer, sync=sync) as guard:
        with watched() as seen:
            for i in range(6):
                model.used = 3 + i % 3
                step(model, optimizer, x)
        assert guard.num_syncs == seen.waits > 0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_step_of_32_blocks_takes_few_more_operations():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(32)), nn.Linear(16, 1))
    model, optimizer = on_device(model, torch.optim.AdamW, fused=True)
    x = torch.randn(4, 16, device="sealed")

    def run():
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    with watched() as bare:
        run()
    with OverflowGuard(model, optimizer) as guard:
        run()
        run()
        before = guard.coverage().tensors_scanned
        with slow_events(3), watched() as seen:
            run()
        scanned = guard.coverage().tensors_scanned - before
    assert scanned > 500
    added = seen["op"] - bare["op"]
    assert added <= 4 * scanned
    assert seen["op"] <= 5 * bare["op"]
    assert seen.waits == 1


def test_a_skipped_step_leaves_every_bit():
    model, optimizer = make()
    model.to("sealed")
    data = [(x.to("sealed"), y.to("sealed")) for x, y in batches(3)]
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard, late():
        for i, (x, y) in enumerate(data):
            before = state_of(model, optimizer)
            with plant(model.blocks[1].act, INF if i == 1 else 1.0):
                model(x, y=y)["loss"].backward()
                optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                assert_same(state_of(model, optimizer), before)
    assert guard.num_skipped == 1
    assert guard.last_report.verdict.maker == "blocks.1.act"


def test_lagged_a_bad_step_with_calls_of_its_own_is_left_out():
    torch.manual_seed(0)
    model = Chain()
    model.register_buffer("mask", torch.full((4,), -INF))  # which bits allow
    model, optimizer = on_device(model, torch.optim.AdamW, fused=True)
    x = torch.randn(4, 16, device="sealed")
    changed = []
    with late(), OverflowGuard(model, optimizer, "skip", sync="lagged") as guard:
        for i in range(6):
            model.used = 3 + i % 3  # so that its flags' bits are copied
            before = [each.detach().clone() for each in model.parameters()]
            step(model, optimizer, x * (INF if i == 3 else 1))
            after = list(model.parameters())
            changed.append(not all(map(torch.equal, before, after)))
        guard.check()
    assert changed == [True, True, True, False, True, True]
    assert guard.num_skipped == 1


def test_an_error_of_asynchronous_work_is_said_and_ends_nothing():
    model, optimizer = on_device(Chain())
    x = torch.randn(4, 16, device="sealed")
    with late(), OverflowGuard(model, optimizer, explain=False) as guard:
        step(model, optimizer, x)
        fail_later("sealed device: an illegal address")
        step(model, optimizer, x)
        reasons = guard.coverage().not_scanned
        assert any("an illegal address" in reason for reason in reasons)
        lost = guard.coverage().not_scanned
        step(model, optimizer, x)
        assert guard.coverage().not_scanned == lost  # the next one is whole again


def test_a_scan_without_memory_is_said_and_ends_nothing():
    model, optimizer = on_device(Chain(width=256, depth=2))
    x = torch.randn(4, 256, device="sealed")
    with OverflowGuard(model, optimizer, explain=False) as guard:
        step(model, optimizer, x)
        model(x).backward()
        with memory_limit(64 << 10):  # less than a copy of a weight
            optimizer.step()
        assert any("out of memory" in each for each in guard.coverage().not_scanned)
        optimizer.zero_grad()
        lost = guard.coverage().not_scanned
        step(model, optimizer, x)
        assert guard.coverage().not_scanned == lost


def test_a_second_thread_is_judged_as_the_first():
    model, optimizer = on_device(Chain())
    x = torch.randn(4, 16, device="sealed")
    model.layers[3].register_forward_hook(lambda *_: _[2] * INF, prepend=True)
    found = []

    def run():
        try:
            step(model, optimizer, x)
        except ArithmeticError as error:
            found.append(str(error))

    with late(), OverflowGuard(model, optimizer, explain=False):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found) == 1 and "layers.3" in found[0]
