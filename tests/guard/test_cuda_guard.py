"""The guard on a GPU: the CPU's verdict, one wait a step or none, device-side skips."""

import copy

import pytest
import torch
from guarding import (
    INF,
    NAN,
    assert_same,
    batches,
    make,
    plant,
    state_of,
    train,
    train_step,
)

from overflow_fast import OverflowGuard
from overflow_fast.monitors import Underflow

pytestmark = pytest.mark.cuda


def on_gpu(kind=torch.optim.AdamW, **arguments):
    model, _ = make()
    model.cuda()
    return model, kind(model.parameters(), lr=1e-2, **arguments)


def data_of(count):
    return [(x.cuda(), y.cuda()) for x, y in batches(count)]


def test_the_verdict_is_that_of_the_cpu():
    verdicts = []
    for is_gpu in (False, True):
        model, optimizer = on_gpu() if is_gpu else make()
        data = data_of(2) if is_gpu else batches(2)
        with OverflowGuard(model, optimizer, "skip") as guard:
            train_step(model, optimizer, data[0])
            with plant(model.blocks[1].act, INF):
                train_step(model, optimizer, data[1])
        verdicts.append(guard.last_report.verdict)
    assert verdicts[0].first == verdicts[1].first
    assert [each.origin.maker for each in verdicts] == ["blocks.1.act"] * 2


def test_a_step_waits_once():
    model, optimizer = on_gpu(fused=True)
    with OverflowGuard(model, optimizer) as guard:
        train(model, optimizer, data_of(5))
        assert guard.num_syncs <= 5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]
)
def test_lagged_the_optimizers_kernel_skips(kind, backward):
    model, optimizer = on_gpu(kind, fused=True)
    data = data_of(4)
    try:
        train(model, optimizer, data[:1])
    except RuntimeError as error:
        pytest.skip(f"this torch has no such optimizer on CUDA: {error}")
    with OverflowGuard(model, optimizer, "skip", sync="lagged") as guard:
        train(model, optimizer, data[1:2])
        before = state_of(model, optimizer)
        with plant(model.blocks[1], NAN, backward=backward):
            train_step(model, optimizer, data[2])
        assert_same(state_of(model, optimizer), before)
        train_step(model, optimizer, data[3])
        guard.check()
        assert guard.num_skipped == 1
        assert guard.last_report.step == 1


def test_a_lagged_clean_run_never_synchronises():
    model, optimizer = on_gpu(fused=True)
    data = data_of(6)
    with OverflowGuard(model, optimizer, "raise", sync="lagged"):
        train(model, optimizer, data[:3])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x, y in data[3:]:
                model(x, y=y)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_guarded_run_is_the_same_in_every_bit():
    results = []
    for guarded in (False, True):
        model, optimizer = on_gpu()
        guard = OverflowGuard(model, optimizer, "skip") if guarded else None
        losses = train(model, optimizer, data_of(5))
        results.append([losses, copy.deepcopy(state_of(model, optimizer))])
        if guard is not None:
            guard.remove()
    assert_same(*results)


def test_what_is_allowed_is_no_alarm_for_the_kernels_either():
    model, optimizer = on_gpu(fused=True)
    allow = {"blocks.1.act:output": "+inf"}
    with OverflowGuard(model, optimizer, "skip", sync="lagged", allow=allow) as guard:
        before = model.blocks[0].fc1.weight.detach().clone()
        with plant(model.blocks[1].act, INF):  # which fc2 makes worse
            train_step(model, optimizer, data_of(1)[0])
    assert guard.last_report.verdict.origin.maker == "blocks.1.fc2"
    assert before.equal(model.blocks[0].fc1.weight)


def test_underflow_is_counted_as_on_the_cpu():
    counted = []
    for is_gpu in (False, True):
        model, optimizer = on_gpu() if is_gpu else make()
        data = data_of(1) if is_gpu else batches(1)
        with OverflowGuard(model, optimizer, monitors=[Underflow(every=1)]) as guard:
            x, y = data[0]
            (model(x * 0, y=y)["loss"] * 0).backward()
            optimizer.step()
            counted.append(guard.metrics()["gradient_zeros"])
    assert counted[0] == counted[1] == 1.0


def test_the_self_test_passes():
    model, optimizer = on_gpu()
    model.register_module("dropout", torch.nn.Dropout())
    x, y = data_of(1)[0]
    before = torch.cuda.get_rng_state()
    with OverflowGuard(model, optimizer) as guard:
        assert guard.self_test({"x": x, "y": y}, max_layers=5).has_passed
    assert before.equal(torch.cuda.get_rng_state())
