"""Guards leave nothing behind, hold nothing alive, and grow by nothing."""

import copy
import gc
import logging
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from assembled import Assembled
from guarding import (
    INF,
    NAN,
    Net,
    assert_same,
    batches,
    hooks_of,
    make,
    plant,
    state_of,
    train,
    train_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Schedule


def test_an_exception_leaves_no_hook(model, optimizer):
    with pytest.raises(KeyError), OverflowGuard(model, optimizer):
        train(model, optimizer, batches(1))
        raise KeyError
    assert hooks_of(model, optimizer) == 0


def test_an_exception_is_not_replaced_by_a_late_verdict(model, optimizer, emulated):
    emulated.state.holds_events = 1
    with (
        pytest.raises(KeyError),
        OverflowGuard(model, optimizer, sync="lagged", _defer=True),
    ):
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        raise KeyError


def test_a_guard_keeps_no_model_and_no_optimizer_alive():
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, "skip")
    train(model, optimizer, batches(2))
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head.weight)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert guard.check() is None
    guard.remove()


def test_a_guard_that_nobody_holds_stays_on():
    model, optimizer = make()
    OverflowGuard(model, optimizer)
    gc.collect()
    with plant(model.head, INF), pytest.raises(NonFiniteError):
        train_step(model, optimizer, batches(1)[0])


def test_a_graph_that_outlives_its_guard_still_runs():
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)
    loss = model(batches(1)[0][0], y=batches(1)[0][1])["loss"]
    guard.remove()
    del guard
    for module in model.modules():
        module._forward_hooks.clear()
    gc.collect()
    loss.backward()
    assert model.head.weight.grad.isfinite().all()


def objects_left_by(run):
    """How many of Python's objects a run leaves that has run before."""
    run()
    gc.collect()
    before = len(gc.get_objects())
    run()
    gc.collect()
    return len(gc.get_objects()) - before


@pytest.mark.slow
@pytest.mark.parametrize("defer", [False, True])
def test_a_long_run_does_not_grow(defer, request):
    if defer:
        request.getfixturevalue("emulated")
    model, optimizer = make(width=4, depth=1)
    data = batches(1, width=4) * 25
    with OverflowGuard(model, optimizer, "skip", _defer=defer):
        assert objects_left_by(lambda: train(model, optimizer, data)) < 20


@pytest.mark.slow
def test_many_bad_steps_do_not_grow(caplog):
    caplog.set_level(logging.CRITICAL, "overflow_fast")
    model, optimizer = make(width=4, depth=1)
    data = batches(1, width=4) * 60
    with (
        OverflowGuard(model, optimizer, "skip", max_consecutive_skips=10**6),
        plant(model.head, INF),
    ):
        assert objects_left_by(lambda: train(model, optimizer, data)) < 50


def test_gradients_are_neither_changed_nor_kept():
    model, optimizer = make()
    x, y = batches(1)[0]
    seen = []

    def hook(module, args, output):
        output.register_hook(lambda g: seen.append(weakref.ref(g)))

    with OverflowGuard(model, optimizer):
        handle = model.blocks[1].register_forward_hook(hook)
        train_step(model, optimizer, (x, y))
        handle.remove()
        gc.collect()
        assert [ref() for ref in seen] == [None]


def assert_unchanged(make, run):
    """What a run leaves is the same in every bit without a guard and with one."""
    results = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = OverflowGuard(model, optimizer) if is_guarded else None
        results.append(run(model, optimizer))
        if guard is not None:
            assert guard.last_report is None
            guard.remove()
    assert_same(*results)


def test_in_place_operations_on_outputs_work_as_before():
    class InPlace(Assembled):
        def forward(self, x):
            h = self.a(x)
            h.mul_(2).add_(1)
            part, _ = self.b(h).chunk(2, -1)
            part = part * 2
            part += 1
            return part

    def run(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return [p.grad for p in model.parameters()]

    assert_unchanged(lambda: InPlace(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), run)


def test_double_backward_and_retained_graphs_work():
    def run(model, optimizer):
        x, y = batches(1)[0]
        x.requires_grad_()
        loss = model.eval()(x, y=y)["loss"]
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return [state_of(model, optimizer), x.grad]

    assert_unchanged(Net, run)


class Checkpointed(Assembled):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_works(reentrant):
    def make():
        return Checkpointed(a=nn.Linear(4, 4), b=nn.Linear(4, 1), reentrant=reentrant)

    def run(model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()
        return state_of(model)

    assert_unchanged(make, run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_bad_value_under_checkpointing_is_of_the_forward(reentrant):
    model = Checkpointed(a=nn.Linear(4, 4), b=nn.Linear(4, 1), reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for is_bad in (False, True, False):
            with plant(model.a, INF) if is_bad else torch.enable_grad():
                loss = model(torch.ones(2, 4, requires_grad=True)).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert guard.last_step_skipped == is_bad
    verdict = guard.last_report.verdict
    assert (verdict.origin.maker, verdict.origin.how) == ("a", "made")
    assert guard.num_skipped == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.explains
def test_a_value_that_is_bad_only_when_computed_again_is_told_as_that(
    reentrant, as_kept
):
    class Fickle(Assembled):
        """Overflows from its second call on."""

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * (INF if self.calls > 1 else 1.0)

    model = nn.Sequential(
        nn.Linear(8, 8), Fickle(linear=nn.Linear(8, 8), calls=0), nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        # The output of the last but one step is what backward needs again.
        hidden = checkpoint(
            lambda x: model[2](model[1](model[0](x)) ** 2),
            torch.randn(4, 8, requires_grad=True),
            use_reentrant=reentrant,
        )
        hidden.sum().backward()
        optimizer.step()
    verdict = guard.last_report.verdict
    assert (verdict.origin.maker, verdict.is_recomputed) == ("1", True)
    as_kept(guard.last_report.sentences())
    assert any("(recomputed)" in frame for frame in guard.last_report.frames)


def test_a_backward_in_another_thread_is_seen(model, optimizer):
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "skip") as guard:
        with plant(model.blocks[1].fc1, NAN, backward=True):
            loss = model(x, y=y)["loss"]
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        optimizer.step()
    assert guard.last_report.verdict.first.fqn == "blocks.1.fc1"


def test_a_forward_that_raises_leaves_the_guard_in_order(model, optimizer):
    data = batches(2)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(TypeError):
            model(data[0][0], z=1)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3), y=None)
        train(model, optimizer, data)
        assert guard.step == 2


def test_an_error_of_the_guard_stops_nothing(monkeypatch, caplog, as_kept):
    from overflow_fast.guard.watching.judged_tensors import JudgedTensors

    def fail(*_):
        raise RuntimeError("a bug")

    results = []
    for guarded in (False, True):
        model, optimizer = make()
        guard = OverflowGuard(model, optimizer, "skip") if guarded else None
        with monkeypatch.context() as patch:
            patch.setattr(JudgedTensors, "scan", fail)
            train(model, optimizer, batches(3))
        results.append(state_of(model, optimizer))
        if guard is not None:
            assert guard.coverage().failures == 3
            as_kept(caplog.messages)
            with plant(model.head, INF):
                train_step(model, optimizer, batches(1)[0])
            assert guard.num_skipped == 1
            guard.remove()
    assert_same(*results)


def test_a_trainer_numbers_the_steps(model, optimizer, tmp_path):
    log = tmp_path / "guard.jsonl"
    with OverflowGuard(
        model, optimizer, "warn", schedule=Schedule(warmup=500), log=log
    ) as guard:
        assert guard.coverage().steps_watched == 0
        guard.step = 1000
        train_step(model, optimizer, batches(1)[0])
        with plant(model.blocks[1].fc2):
            train_step(model, optimizer, batches(1)[0])
        assert guard.step == 1002
        assert guard.last_report.step == 1001
        assert guard.coverage().steps == guard.metrics()["steps_total"] == 2
        assert guard.coverage().steps_watched == 2
        guard.step = 3  # in the warmup
        train_step(model, optimizer, batches(1)[0])
        assert guard.coverage().steps_watched == 2
    assert "1000" in log.read_text() and '"step": 3' not in log.read_text()


@pytest.mark.parametrize(
    "number, error", [(-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_a_steps_number_is_an_int(model, optimizer, number, error):
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(error, match="step must be"):
            guard.step = number
        assert guard.step == 0


def test_a_guard_says_what_to_pickle_instead(as_kept):
    model = nn.Linear(2, 2)
    with OverflowGuard(model) as guard:
        as_kept.error(TypeError, pickle.dumps, guard)
        for copied in (copy.copy(guard), copy.deepcopy(guard)):
            assert type(copied) is OverflowGuard and copied is not guard
            assert copied.step == 0
        assert type(pickle.loads(pickle.dumps(model))) is nn.Linear


LEFT_ON = """
import torch, overflow_fast
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

model = nn.Sequential(nn.Embedding(9, 8, padding_idx=0), Norm(), nn.Linear(8, 4))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
guard = overflow_fast.OverflowGuard(compiled, optimizer, explain=False)
try:
    guard.run(lambda: compiled(torch.tensor([[1, 0]])).pow(2).mean()).backward()
    optimizer.step()
except overflow_fast.NonFiniteError as e:
    pass
guard.remove()
"""


@pytest.mark.slow
def test_a_program_ends_without_a_word_from_what_is_left_of_guards():
    command = [sys.executable, "-c", LEFT_ON]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr


# The garbage collector, which looks through the whole program.
