"""Compiled models: what is seen of them, and what is said where it is not seen."""

import logging

import pytest
import torch
from guarding import INF, batches, make, plant

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def guard_of(model, optimizer):
    return OverflowGuard(model, optimizer, "warn")


def detector_of(model, optimizer):
    return DebugUnderflowOverflow(model)


WATCHES = [guard_of, detector_of]


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("is_in_place", [False, True])
def test_hooks_that_come_too_late_are_told_of(watch, is_in_place, caplog):
    model, optimizer = make()
    model.eval()
    if is_in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    x, y = batches(1)[0]
    compiled(x, y=y)
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        with watch(compiled, optimizer):
            compiled(x, y=y)
            compiled(x, y=y)
        assert caplog.text.count("ignores hooks that were put on after it") == 1
        caplog.clear()
        torch._dynamo.reset()
        with watch(compiled, optimizer):
            compiled(x, y=y)
        assert caplog.text == ""


@pytest.mark.parametrize("watch", WATCHES)
def test_what_is_not_compiled_is_not_warned_of(watch, caplog):
    class Lazy(torch.nn.Module):
        """Calls none of its modules."""

        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))

        def forward(self, x):
            return x

    model = Lazy()
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        with watch(model, torch.optim.SGD(model.parameters())):
            model(torch.ones(2))
    assert caplog.text == ""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_is_watched_first_is_seen_whole(backend):
    model, optimizer = make()
    model.eval()
    compiled = torch.compile(model, backend=backend)
    with OverflowGuard(compiled, optimizer, "warn") as guard:
        model.blocks[1].fc2.weight.data[0, 0] = INF
        x, y = batches(1)[0]
        compiled(x, y=y)["loss"].backward()
        optimizer.step()
    assert guard.last_report.verdict.first.fqn == "blocks.1.fc2.weight"


def test_a_fault_in_a_compiled_model_has_its_authors_name():
    model, optimizer = make()
    model.eval()
    compiled = torch.compile(model, backend="eager")
    with OverflowGuard(compiled, optimizer, "warn") as guard:
        with plant(model.blocks[2], INF):
            x, y = batches(1)[0]
            compiled(x, y=y)["loss"].backward()
        optimizer.step()
    assert guard.last_report.verdict.maker == "blocks.2"
