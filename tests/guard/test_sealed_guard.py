"""The guard on a device without kernels here: its waits, operations and errors."""

import contextlib
import threading

import pytest
import torch
from guarding import INF, assert_same, batches, make, plant, state_of
from sealed import fail_later, late, memory_limit, pageable, slow_events, watched
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


def test_zeros_are_counted_where_a_side_stream_has_written_them():
    model = nn.Sequential(nn.Linear(8, 8), OnASide(), nn.Linear(8, 1))
    model, optimizer = on_device(model)
    with torch.no_grad():
        model[1].layer.weight.zero_()
        model[1].layer.bias.zero_()
    with late(), OverflowGuard(model, optimizer, explain=False) as guard:
        recorder = guard._parts.watches[0].recorder
        recorder.counts_underflow = True
        model(torch.randn(4, 8, device="sealed"))
        taken = recorder.take_underflow()
        names = [guard._parts.watches[0].name_at(each.place.module) for each in taken]
        zeros = dict(zip(names, (each.num_zero for each in taken), strict=True))
    assert zeros["1.out"] == zeros["1.layer"] == 32
    assert zeros["0"] == 0


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
    assert guard.last_report.verdict.origin.maker == "blocks.1.act"


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


def test_an_error_of_asynchronous_work_is_passed_on():
    model, optimizer = on_device(Chain())
    x = torch.randn(4, 16, device="sealed")
    with late(), OverflowGuard(model, optimizer, explain=False) as guard:
        step(model, optimizer, x)
        fail_later("sealed device: an illegal address")
        with pytest.raises(RuntimeError, match="an illegal address"):
            step(model, optimizer, x)
        assert not guard.coverage().failures
        optimizer.zero_grad()
        reasons = guard.coverage().not_scanned
        assert any("an illegal address" in reason for reason in reasons)
        lost = guard.coverage().not_scanned
        step(model, optimizer, x)
        assert guard.coverage().not_scanned == lost  # the next one is whole again


@pytest.mark.parametrize("is_bad", [False, True])
@pytest.mark.parametrize("more", [64 << 10, 0])  # less than a copy of a weight; nothing
def test_gradients_that_no_memory_is_left_for_are_scanned_elsewhere(is_bad, more):
    model, optimizer = on_device(Chain(width=256, depth=2))
    x = torch.randn(4, 256, device="sealed")
    options = {"explain": False, "watch": ["gradients"]}
    with OverflowGuard(model, optimizer, "skip", **options) as guard:
        step(model, optimizer, x)
        model(x).backward()
        if is_bad:
            model.layers[1].weight.grad[3, 7] = INF
        with memory_limit(more):
            optimizer.step()
        assert guard.num_skipped == is_bad
        if is_bad:
            first = guard.last_report.verdict.first
            assert (first.label, first.num_inf) == ("layers.1.weight", 1)
        assert not guard.coverage().not_scanned
        optimizer.zero_grad()
        step(model, optimizer, x)
        assert guard.num_skipped == is_bad


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_gradients_that_cannot_be_scanned_are_not_clean(policy, monkeypatch):
    model, optimizer = on_device(Chain(width=256, depth=2))
    x = torch.randn(4, 256, device="sealed")
    with OverflowGuard(model, optimizer, policy) as guard:
        step(model, optimizer, x)
        before = state_of(model, optimizer)
        model(x).backward()
        lost = x.to("meta")
        monkeypatch.setattr(guard._parts.pipeline.tensors, "find", lambda *_: lost)
        with memory_limit(0):
            try:
                optimizer.step()
            except ArithmeticError as error:
                assert policy == "raise"
                assert "not be scanned" in str(error)
                assert "out of memory" in str(error)
        verdict = guard.last_report.verdict
        assert verdict.first.not_scanned and not verdict.dirty_gradients
        assert guard.last_report.explanation is None
        assert guard.num_skipped == (policy == "skip")
        if policy != "warn":
            assert_same(state_of(model, optimizer), before)


class Copies(nn.Module):
    """Returns a copy of its output on the host, which is still under way."""

    def __init__(self):
        super().__init__()
        self.layer, self.stream = nn.Linear(8, 1), torch.Stream(device="sealed")
        self.has_side = False
        self.factor = 1.0

    def forward(self, x):
        y = self.layer(x)
        host = torch.empty(y.shape).pin_memory().fill_(torch.nan)
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream if self.has_side else contextlib.nullcontext():
            host.copy_(y.detach() * self.factor, non_blocking=True)
        return y, host


def copying(**changes):
    model = nn.Sequential(nn.Linear(8, 8), Copies())
    for name, value in changes.items():
        setattr(model[1], name, value)
    return *on_device(model), torch.randn(4, 8, device="sealed")


def step_with_copy(model, optimizer, x):
    y, host = model(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return host


@pytest.mark.parametrize("has_side", [False, True])
@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_copies_to_the_host_are_judged_when_they_have_arrived(has_side, sync):
    model, optimizer, x = copying(has_side=has_side)
    options = {"explain": False, "sync": sync}
    with late(), OverflowGuard(model, optimizer, "skip", **options) as guard:
        for i in range(5):
            model[1].factor = INF if i == 2 else 1.0
            host = step_with_copy(model, optimizer, x)
            torch.sealed.synchronize()
            assert bool(host.isfinite().all()) == (i != 2)
        guard.check()
        assert guard._parts.pipeline.ledger.num_bad == 1
        verdict = guard.last_report.verdict
        assert (verdict.first.fqn, verdict.first.label) == ("1", "output[1]")
        assert not guard.coverage().not_scanned


def test_a_copy_that_was_written_to_meanwhile_is_not_scanned():
    model, optimizer, x = copying()

    def write(_module, _args, output):
        output[1].add_(1)

    model.register_forward_hook(write)
    with late(), OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for _ in range(2):
            step_with_copy(model, optimizer, x)
        assert not guard.num_skipped
        (why,) = guard.coverage().not_scanned
        assert "written to again" in why


class Aside(nn.Module):
    """Returns what its own stream still writes, for the caller to wait for."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how
        self.stream, self.factor = torch.Stream(device="sealed"), 1.0

    def forward(self, x):
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            y = self.layer(x) * self.factor
        return self.how(y)


class Caller(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.side, self.last = Aside(how), nn.Linear(8, 1)

    def forward(self, x):
        y = self.side(x)
        torch.accelerator.current_stream().wait_stream(self.side.stream)
        while not isinstance(y, torch.Tensor):
            (y,) = y.values() if isinstance(y, dict) else y
        return self.last(y.view(4, 8))


HOWS = {
    "itself": lambda y: y,
    "a view": lambda y: y.view(2, 16),
    "a part of a view": lambda y: y.view(2, 16)[:, :].t().t(),
    "in a tuple": lambda y: ({"y": y},),
}


@pytest.mark.parametrize("how", HOWS)
def test_what_another_stream_still_writes_is_waited_for(how):
    model, optimizer = on_device(Caller(HOWS[how]))
    x = torch.randn(4, 8, device="sealed")
    with late(), OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for i in range(4):
            model.side.factor = INF if i == 2 else 1.0
            step(model, optimizer, x)
        assert guard.num_skipped == 1
        assert guard.last_report.verdict.first.fqn == "side"


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
