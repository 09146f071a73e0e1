"""The guard where stats stay on a device: one wait a step, or none."""

import contextlib

import pytest
import torch
from emulation import VARIANTS
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

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.slow

FUSED = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


DEVICES = {
    "torch operations": None,
    "kernels": "default",
    "kernels, late": "default",
    "one kernel": "kernel",
    "mapped": "mapped",
    "mapped, late": "mapped",
}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """How stats come: by operations that are done at once, or from a device."""
    variant = DEVICES[request.param]
    if variant is not None:
        for variable, value in VARIANTS[variant].items():
            monkeypatch.setenv(variable, value)
        emulated = request.getfixturevalue("emulated")
        emulated.state.holds_events = request.param.endswith("late")
    return request.param


def fused(kind, model):
    arguments = {"momentum": 0.9} if kind == "SGD" else {}
    return FUSED[kind](model.parameters(), lr=1e-2, fused=True, **arguments)


def test_the_verdict_is_that_of_the_cpu(device):
    data = batches(3)
    texts = []
    for defer in (False, True):
        model, optimizer = make()
        with OverflowGuard(model, optimizer, "skip", _defer=defer) as guard:
            train_step(model, optimizer, data[0])
            with plant(model.blocks[1].act, INF):
                train_step(model, optimizer, data[1])
            train_step(model, optimizer, data[2])
        assert guard.num_skipped == 1
        report = guard.last_report.to_dict()
        report.pop("cost")
        report.pop("summary")
        sentences = report.pop("sentences")
        report["verdict"].pop("stale_inputs")  # on a device they are not scanned again
        doubt = " when they were scanned, before its call"
        assert any(doubt in each for each in sentences) == defer
        report["sentences"] = [
            each.replace(doubt, "")
            for each in sentences
            if "The guard takes" not in each
        ]
        texts.append(report)
    assert texts[0] == texts[1]


def test_a_step_waits_once(model, optimizer, emulated):
    emulated.state.holds_events = 1
    with OverflowGuard(model, optimizer, _defer=True) as guard:
        for batch in batches(4):
            before = emulated.state.num_waits
            train_step(model, optimizer, batch)
            assert emulated.state.num_waits - before == 1
        assert guard.num_syncs == emulated.state.num_waits


def test_lagged_steps_do_not_wait(model, emulated):
    optimizer = fused("AdamW", model)
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        train(model, optimizer, batches(5))
        assert guard.num_syncs == 0  # everything has come by itself
        emulated.state.holds_events = 1
        train_step(model, optimizer, batches(1)[0])
        assert guard.num_syncs == 0


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_lagged_the_optimizers_kernel_skips(model, device, kind, policy):
    data = batches(3)
    optimizer = fused(kind, model)
    guard = OverflowGuard(model, optimizer, policy, sync="lagged", _defer=True)
    train_step(model, optimizer, data[0])
    before = state_of(model, optimizer)
    model.eval()
    is_late = device.endswith("late")
    bad = (
        pytest.raises(NonFiniteError) if policy == "raise" else contextlib.nullcontext()
    )
    with plant(model.blocks[1].fc1, NAN, backward=True):
        with contextlib.nullcontext() if is_late else bad:
            train_step(model, optimizer, data[1])
    optimizer.zero_grad()
    assert_same(state_of(model, optimizer), before)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    assert (guard.last_report is None) == is_late
    with bad if is_late else contextlib.nullcontext():
        train_step(model, optimizer, data[2])
    assert guard.num_skipped == (policy == "skip")
    assert guard.last_report.skipped_by == "optimizer's kernel" * is_late
    assert guard.last_report.step == 1
    assert guard.last_report.verdict.first.fqn == "blocks.1.fc1"
    guard.remove()


@pytest.mark.parametrize("policy", ["warn", "raise", "skip"])
def test_lagged_a_state_that_overflows_is_reported_in_one_of_the_next_steps(
    device, policy
):
    model, _ = make()
    optimizer = fused("AdamW", model)
    guard = OverflowGuard(model, optimizer, policy, sync="lagged", _defer=True)
    found = None
    for number, batch in enumerate(batches(6)):
        try:
            loss = model(batch[0], y=batch[1])["loss"] * (1e22 if number == 1 else 1)
            loss.backward()
            optimizer.step()
        except NonFiniteError as error:
            found = error.report
            break
        optimizer.zero_grad()
    report = guard.last_report
    assert report.verdict.first.kind == "optimizer_state" and report.step <= 4
    assert report.is_beyond_repair and (found is report) == (policy != "warn")
    guard.disable()


def test_lagged_the_run_goes_on_as_if_the_step_never_was(device):
    results = []
    for guarded in (True, False):
        model, _ = make()
        optimizer = fused("AdamW", model)
        model.eval()
        data = batches(4)
        guard = None
        if guarded:
            guard = OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True)
        for i, batch in enumerate(data):
            if i == 2:
                if guarded:
                    with plant(model.head, INF):
                        train_step(model, optimizer, batch)
                continue
            train_step(model, optimizer, batch)
        results.append(state_of(model, optimizer))
        if guard is not None:
            guard.remove()
            assert guard.num_skipped == 1
    assert_same(*results)


def test_an_expected_mask_is_no_reason_to_skip(device):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.sum = Sum()

        def forward(self, x):
            mask = torch.zeros(4).index_fill(0, torch.tensor([1]), -INF)
            return self.sum(self.inner(x), mask=mask)

    class Sum(torch.nn.Module):
        def forward(self, x, mask):
            return (x + mask).softmax(-1)

    model = Masked()
    optimizer = fused("SGD", model)
    before = model.inner.weight.detach().clone()
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        model(torch.randn(2, 4))[:, 0].sum().backward()
        optimizer.step()
    assert guard.num_skipped == 0
    assert not before.equal(model.inner.weight)


def test_lagged_without_a_fused_optimizer_waits_and_skips(model, optimizer, emulated):
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        emulated.state.holds_events = 1
        train_step(model, optimizer, batches(1)[0])
        assert guard.num_syncs > 0
        before = model.head.bias.detach().clone()
        with plant(model.head, INF):
            train_step(model, optimizer, batches(2)[1])
        assert before.equal(model.head.bias)


def test_lagged_warnings_come_a_step_later(model, optimizer, device, caplog):
    data = batches(2)
    with OverflowGuard(model, optimizer, "warn", sync="lagged", _defer=True) as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, data[0])
        model.load_state_dict(make()[0].state_dict())
        optimizer.zero_grad()
        optimizer.state.clear()
        train_step(model, optimizer, data[1])
        assert guard.last_report.step == 0
    assert guard.last_report.step == 0


def test_check_brings_the_last_verdict(model, device):
    optimizer = fused("AdamW", model)
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        assert (guard.last_report is None) == (device.endswith("late"))
        guard.check()
        assert guard.num_skipped == 1


def test_a_scalers_own_flag_is_kept_and_ours_added(model, device):
    optimizer = fused("AdamW", model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    data = batches(2)
    model.eval()
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        for spoil_forward, batch in zip((False, True), data, strict=True):
            optimizer.zero_grad()
            before = state_of(model)
            with (
                plant(model.blocks[0].fc2, INF)
                if spoil_forward
                else torch.enable_grad()
            ):
                out = model(*batch)["out"]
            if spoil_forward:  # which the gradients do not tell
                out = model.head.weight.sum()
            scaler.scale(out.sum()).backward()
            if not spoil_forward:
                model.head.weight.grad[0, 0] = INF
            scaler.step(optimizer)
            scaler.update()
            assert_same(state_of(model), before)
        guard.check()
    assert guard.last_report.verdict.origin.maker == "blocks.0.fc2"
    assert guard.num_skipped == 1


def test_a_flag_is_dropped_where_the_step_did_not_end(model):
    model.eval()
    optimizer = fused("AdamW", model)
    data = batches(2)

    def fail(*_):
        raise KeyError("another's hook")

    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True):
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyError):
            train_step(model, optimizer, data[0])
        assert not hasattr(optimizer, "found_inf")
        handle.remove()
        optimizer.zero_grad()
        before = model.head.bias.detach().clone()
        train_step(model, optimizer, data[1])
        assert not before.equal(model.head.bias)


@pytest.mark.slow
def test_forwards_without_autograd_pile_up_nowhere(model, optimizer, emulated):
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "warn", _defer=True) as guard:
        with torch.no_grad():
            for _ in range(100):
                model(x, y=y)
        assert guard.num_syncs <= 100
        with torch.no_grad(), plant(model.head, INF):
            model(x, y=y)
        train_step(model, optimizer, (x, y))
        guard.check()
    assert guard.last_report.verdict.origin.maker == "head"
    assert guard.last_report.action == "warn"


@pytest.mark.parametrize("is_bad", [False, True])
@pytest.mark.explains
def test_replays_of_a_graph_are_judged_with_the_step(emulated, is_bad):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static = torch.ones(2, 4)
    with OverflowGuard(model, optimizer, "warn", _defer=True) as guard:
        model(static).sum().backward()
        optimizer.step()
        with emulated.capture():
            kept = model(static)  # a graph's tensors stay where they are
        for _ in range(2):
            emulated.replay()
            optimizer.step()
        assert guard.last_report is None
        static[0, 0] = NAN if is_bad else 2.0
        emulated.replay()
        optimizer.step()
    assert kept.shape == (2, 4)
    assert (guard.last_report is not None) is is_bad
    if is_bad:
        assert guard.last_report.step == 3
        assert guard.last_report.verdict.first.kind == "input"
