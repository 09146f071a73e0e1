"""A step runs again from where it began, with patches in place and under observers."""

import contextlib
import pickle

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast.base.tensors import devices_of
from overflow_fast.explainer.calls import Call
from overflow_fast.explainer.op_table import OpTable
from overflow_fast.explainer.op_trace import OpObserver, OpTrace
from overflow_fast.explainer.remedies.patches import (
    Eagerly,
    FromLoss,
    InDtype,
    OtherWeights,
    ScaledWeights,
    SomeSamples,
)
from overflow_fast.explainer.replayer import Observer, Patch, Replayer, StepPart
from overflow_fast.guard.kept_calls.ambient import Ambient


def step(model, *batches):
    calls = []
    for batch in batches:
        ambient = Ambient(model, devices_of([model]))
        call = Call(lambda x: model(x).square().mean(), batch, ambient)
        call.returns_loss = True
        calls.append(call)
    return {"": model}, calls


class Seen(Observer):
    """Keeps what was returned, and the largest weight that the run saw."""

    def __init__(self):
        self.outputs, self.weights, self.sizes, self.is_open = [], [], [], []

    @contextlib.contextmanager
    def observing(self, models):
        self.is_open.append(True)
        self.weights.append(float(models[""].weight.abs().max()))
        yield
        self.is_open.pop()

    def on_output(self, call, output):
        assert self.is_open
        self.outputs.append(float(output.detach()))
        self.sizes.append(len(call.batch))


class Failing(Patch):
    @contextlib.contextmanager
    def applied(self, models):
        with torch.no_grad():
            models[""].weight.fill_(7.0)
        raise ValueError("this patch")
        yield


def test_a_run_begins_where_the_step_began_and_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    models, calls = step(model, torch.randn(8, 4), torch.randn(8, 4))
    optimizer = torch.optim.SGD(model.parameters())
    model[0].weight.grad = torch.ones(4, 4)
    before, random = state_of(model, optimizer), torch.get_rng_state()
    with Replayer(models, calls) as replayer:
        first = replayer.run()
        gradient = first.gradients["0.weight"].clone()
        second = replayer.run()
    assert first.is_clean and first.has_backward and replayer.num_forwards == 4
    assert [float(each) for each in first.losses] == [float(x) for x in second.losses]
    assert torch.equal(gradient, second.gradients["0.weight"])
    assert_same(before, state_of(model, optimizer))
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))


def test_observers_see_the_patches_and_each_output():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    models, calls = step(model, torch.ones(2, 4), torch.ones(2, 4))
    seen = Seen()
    patches = [ScaledWeights({"weight": 2.0}), ScaledWeights({"weight": 3.0})]
    with Replayer(models, calls) as replayer:
        replayer.run(observers=[seen])
        replayer.run(patches=patches, observers=[seen])
        result = replayer.run()
    assert seen.weights == [1.0, 6.0] and seen.outputs == [16.0] * 2 + [576.0] * 2
    assert not seen.is_open and [float(loss) for loss in result.losses] == [16.0] * 2


def test_patches_are_made_one_after_another():
    model = nn.Linear(4, 1, bias=False)
    models, calls = step(model, torch.randn(6, 4))
    patches = [SomeSamples(0, (1, 2, 3)), SomeSamples(0, (2,))]
    with Replayer(models, calls) as replayer:
        result = replayer.run(patches=patches)
    expected = model(calls[0].batch[3:4]).square().mean()
    assert float(result.losses[0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("traced", [-1, 0])
def test_what_a_patch_raises_ends_the_run_alone(traced):
    model = nn.Linear(4, 1)
    models, calls = step(model, torch.randn(6, 4))
    weight = model.weight.detach().clone()
    with Replayer(models, calls) as replayer:
        failed = replayer.run(StepPart(traced), [Failing()])
        assert str(failed.error) == "this patch" and not failed.is_clean
        assert replayer.run().is_clean
    assert torch.equal(model.weight, weight)


def test_the_first_bad_call_ends_a_run_but_not_one_of_the_whole_step():
    model = nn.Linear(4, 1)
    bad = torch.full((6, 4), float("nan"))
    models, calls = step(model, torch.randn(6, 4), bad, torch.randn(6, 4))
    seen = Seen()
    with Replayer(models, calls) as replayer:
        result = replayer.run(observers=[seen])
        assert result.bad_call == 1 and len(seen.outputs) == 2
        replayer.run(StepPart(is_whole=True), observers=[seen])
        assert len(seen.outputs) == 5


def test_bad_calls_before_the_traced_one_are_passed_over():
    model = nn.Linear(4, 1)
    bad = torch.full((6, 4), float("nan"))
    models, calls = step(model, bad, torch.randn(6, 4))
    seen = Seen()
    with Replayer(models, calls) as replayer:
        clean = replayer.run(StepPart(traced=1))
        alone = replayer.run(StepPart(traced=0, rows=(0, 1)), observers=[seen])
    assert (
        clean.is_clean
        and clean.table.ops
        and not any(row.kinds for row in clean.table.ops)
    )
    assert alone.bad_call == 0 and seen.sizes == [2]


@pytest.mark.parametrize(
    "patch",
    [
        Eagerly(),
        FromLoss(),
        InDtype(torch.bfloat16),
        OtherWeights({}),
        ScaledWeights({"weight": 2.0}),
        SomeSamples(0, (1, 2)),
    ],
)
def test_other_ranks_can_be_sent_a_patch(patch):
    assert pickle.loads(pickle.dumps(patch)) == patch


def test_a_trace_shows_operations_with_their_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen, names = [], []

    class Names(OpObserver):
        def run(self, op, modules):
            seen.append((op.base, modules.current(False)))
            return op.run()

        def on_module(self, name, values):
            names.append(name)

    with OpTrace({"": model}, Names()):
        model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert ("addmm", "0") in seen and ("relu", "1") in seen
    assert names == ["", "0", "0", "1", "1", ""]


@pytest.mark.parametrize("looks_back", [False, True])
def test_what_runs_is_the_same_with_a_table(looks_back):
    """Autograd copies a gradient that somebody else refers to."""
    seen, table = [], OpTable([], looks_back)

    class Names(OpObserver):
        def run(self, op, modules):
            seen.append(op.name)
            return op.run()

    for observer in (Names(), table):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with OpTrace({"": model}, observer):
            model(torch.ones(2, 4)).sum().backward()
    assert [op.name for op in table.ops] == seen
