"""Steps whose forward runs compiled: what was called is called again."""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.causes import ONLY_COMPILED

pytestmark = pytest.mark.xdist_group("compiled")

NAN = float("nan")


class Net(nn.Module):
    """Divides by nothing in samples that are negative."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.divides = True

    def forward(self, x, y):
        h = self.fc(x)
        if self.divides:
            h = h / (x[:, :1] > 0)
        return (self.head(h) - y).pow(2).mean()


def miscompiled(graph, inputs):
    """A backend whose code alone gives a nan, for batches with a negative sample."""

    def run(*args):
        is_bad = any(t.shape == (4, 4) and bool((t[:, 0] < -50).any()) for t in args)
        outputs = graph(*args)
        return tuple(NAN * each if is_bad else each for each in outputs)

    return run


def outside(model, backend):
    compiled = torch.compile(model, backend=backend)
    return compiled, compiled


def inside(model, backend):
    return model, torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model, model


def explained(wrap, backend, divides):
    """Two steps, of which the second is bad: its explanation and what is left."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    model.divides = divides
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    watched, called = wrap(model, backend)
    guard = OverflowGuard(watched, optimizer, "skip")
    for first in (1.0, -100.0):
        x = torch.rand(4, 4)
        x[2, 0] = first
        optimizer.zero_grad()
        called(x, torch.rand(4, 1)).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    assert_same(before, [p.grad for p in model.parameters()])
    guard.remove()
    return guard.last_report.explanation, state_of(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [outside, inside, in_place])
def test_the_operation_of_a_compiled_model(wrap):
    found, _ = explained(wrap, "eager", divides=True)
    assert (found.phase, found.cause) == ("forward", "undefined")
    assert found.op.name == "aten.div.Tensor"
    assert found.sample == 2


@pytest.mark.parametrize("wrap", [outside, inside, in_place])
def test_what_compiled_code_alone_gives(wrap):
    found, _ = explained(wrap, miscompiled, divides=False)
    assert (found.phase, found.cause) == ("forward", ONLY_COMPILED.name)


def test_a_step_that_is_compiled_as_a_whole_is_not_replayed(as_kept):
    def together(model, backend):
        return model, torch.compile(lambda x, y: model(x, y), backend=backend)

    found, _ = explained(together, "eager", divides=True)
    assert (found.cause, found.replays) == ("unknown", 0)
    as_kept(found.notes)


def test_a_step_that_is_compiled_as_a_whole_within_run():
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer)
    compute = torch.compile(lambda x, y: model(x, y), backend="eager")
    x, y = -torch.rand(4, 4), torch.rand(4, 1)
    guard.run(lambda: compute(x, y)).backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    assert error.value.report.explanation.op.name == "aten.div.Tensor"


def test_a_part_of_compiled_code_that_runs_eagerly_is_no_transient():
    """The graph breaks around the model, whose forward is compiled without it."""

    def broken(model, backend):
        def compute(x, y):
            torch._dynamo.graph_break()
            return model(x, y)

        return model, torch.compile(compute, backend=backend)

    found, _ = explained(broken, miscompiled, divides=False)
    assert found.cause == "unknown"


def test_a_captured_graph_is_not_replayed(monkeypatch, as_kept):
    model = Net()
    guard = OverflowGuard(model)
    capture = guard._parts.keeper
    monkeypatch.setattr(capture, "_devices_of", lambda _: [torch.device("cuda")])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model(-torch.rand(4, 4), torch.rand(4, 1))
    monkeypatch.undo()
    with pytest.raises(NonFiniteError) as error:
        guard.check()
    as_kept(str(error.value.report.explanation))
