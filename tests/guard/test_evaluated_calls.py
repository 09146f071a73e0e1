"""Forwards without autograd in a training: what is bad in one is run again."""

import gc
import weakref

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard import pipeline
from overflow_fast.guard.kept_calls import evaluated_calls
from overflow_fast.guard.requests.held_call import CallHolder, HeldCall
from overflow_fast.options import Explain

pytestmark = pytest.mark.explains


class Scaled(nn.Module):
    """Divides by a deviation that it tracks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("square", torch.ones(3))
        self.count = 0
        self.layer = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.count += 1
        self.square.mul_(0.5).add_(x.square().mean(0), alpha=0.5)
        return self.layer(self.drop(x) / self.square.sqrt())


def made(policy="raise", **options):
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = OverflowGuard(model, optimizer, policy, **options)
    guard.run(lambda: model(torch.ones(4, 3)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, guard


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_operation_is_named_and_a_remedy_is_found(without):
    model, _, guard = made()
    with guard, pytest.raises(NonFiniteError) as error, without():
        model.square.fill_(-1.0)
        model(torch.ones(4, 3) * 0.1)
    found = error.value.report.explanation
    assert found.op.name == "aten.sqrt" and found.cause == "undefined"
    assert "self.square.sqrt()" in found.op.code
    assert "in a forward without autograd" in str(error.value)
    assert any(each.is_finite for each in found.remedies)


def test_the_program_goes_on_as_without_a_guard():
    ends = []
    for explain in (False, True):
        model, _, guard = made("warn", explain=explain)
        with guard, torch.no_grad():
            model.square.fill_(-1.0)
            output = model(torch.ones(4, 3) * 0.1)
            ends.append([output, model.square.clone(), torch.rand(2)])
        assert model.count == 2
        assert (guard.last_report.explanation is not None) == explain
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other) or one.isnan().all()


def test_a_batch_is_let_go_of_once_it_is_judged():
    model, _, guard = made()
    x = torch.ones(4, 3)
    gone = weakref.ref(x)
    with guard:
        with torch.no_grad():
            model(x)
        del x
        gc.collect()
        assert gone() is None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, shift=0.0):
        return (self.layer(x).square() + shift).sqrt()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x)


def trained(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return OverflowGuard(model, optimizer, **options)


def stopped(guard, function):
    with guard, pytest.raises(NonFiniteError) as error, torch.no_grad():
        function()
    return error.value.report


def test_a_part_is_run_again_from_its_second_call_on():
    torch.manual_seed(0)
    model = Whole()
    guard, x = trained(model), torch.ones(4, 3)

    def rollout():
        model(x)
        model.part(x)
        model.part.layer(x)
        model.part(x, shift=-9.0)

    found = stopped(guard, rollout).explanation
    assert found.op.name == "aten.sqrt" and "shift" in found.op.code
    assert any(each.is_finite for each in found.remedies)


def test_a_part_of_a_container_is_run_again_from_its_first_call_on():
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": Part(), "other": Part()})
    guard, x = trained(model), torch.ones(4, 3)
    found = stopped(guard, lambda: model["other"](x, shift=-9.0)).explanation
    assert found.op.name == "aten.sqrt"


@pytest.mark.parametrize("is_request", [False, True])
def test_the_first_call_of_a_part_is_one_of_a_request(is_request):
    torch.manual_seed(0)
    model = Whole()
    guard, x = trained(model), torch.ones(4, 3)

    def rollout():
        if not is_request:
            model.part(x, shift=-9.0)
        with guard.request():
            model.part(x, shift=-9.0)

    found = stopped(guard, rollout).explanation
    assert (found.op is not None) == is_request
    (note,) = found.notes or [""]
    assert note.endswith("Within `guard.request()` it is.") == (not is_request)


def test_of_a_part_of_a_part_it_is_not_said_that_a_request_helps():
    model = Whole()
    guard, x = trained(model), torch.full((4, 3), float("nan"))
    (note,) = stopped(guard, lambda: model.part.layer(x)).explanation.notes
    assert "it began at a part" in note and "request" not in note


def test_a_part_that_an_exception_has_left_is_not_taken_for_another_one():
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": Whole(), "other": Whole()})
    guard, x = trained(model), torch.ones(4, 3)

    def rollout():
        model["one"].part(x)
        with pytest.raises(RuntimeError):
            model["one"].part(torch.ones(4, 5))
        model["other"].part(x, shift=-9.0)

    (note,) = stopped(guard, rollout).explanation.notes
    assert "it began at a part" in note


def test_stats_that_come_late_are_of_the_forward_that_is_run_again(monkeypatch):
    take, waiting = pipeline.take_evaluated, [[]]

    def take_late(*given):  # as on a device
        waiting.append(take(*given))
        return waiting.pop(0)

    monkeypatch.setattr(pipeline, "take_evaluated", take_late)
    monkeypatch.setattr(CallHolder, "hold", as_on_device(CallHolder.hold))
    torch.manual_seed(0)
    model = Part()
    guard, x = trained(model), torch.ones(4, 3)

    def rollout():
        for shift in (0.0, -9.0, 0.0):
            model(x, shift=shift)

    found = stopped(guard, rollout).explanation
    assert found.op is not None and found.op.name == "aten.sqrt"


def as_on_device(hold):
    def held(*given):
        call = hold(*given)
        call.is_on_device = True
        return call

    return held


def test_a_training_that_serves_requests_holds_a_forward_once(monkeypatch):
    held, hold = [], CallHolder.hold
    monkeypatch.setattr(CallHolder, "hold", lambda *a: held.append(a) or hold(*a))
    model = Part()
    guard, x = trained(model), torch.ones(4, 3)
    with guard, torch.no_grad():
        model(x)
        with guard.request():
            model(x)
        model(x)
    assert len(held) == 3


def test_the_reason_why_it_is_not_run_again_is_named(monkeypatch):
    x = torch.full((4, 3), float("nan"))
    model = Part()
    guard = trained(model, explain=Explain(replay_safe=False))
    (note,) = stopped(guard, lambda: model(x)).explanation.notes
    assert note.startswith("The forward was not replayed: `Explain(replay_safe=False)`")
    guard = trained(model)
    monkeypatch.setattr(evaluated_calls, "world_size", lambda: 2)
    (note,) = stopped(guard, lambda: model(x)).explanation.notes
    assert "there are several ranks" in note


def test_an_explanation_that_fails_is_one_of_the_forward(monkeypatch):
    model = Part()
    guard = trained(model)
    monkeypatch.setattr(HeldCall, "again", None)
    x = torch.full((4, 3), float("nan"))
    (note,) = stopped(guard, lambda: model(x)).explanation.notes
    assert note.startswith("The forward was not explained: TypeError")


def test_a_bad_step_behind_one_is_the_first_in_a_row_and_logged_in_full(caplog):
    model, optimizer, guard = made("warn", explain=False)
    bad = torch.full((4, 3), float("inf"))
    with guard:
        for _ in range(2):
            with torch.no_grad():
                model(bad)
        model(bad).sum().backward()
        optimizer.step()
    assert "in a row" not in caplog.text
    *_, last = (text for text in caplog.messages if "Step 1: " in text)
    assert "The optimizer step was made" in last and "of this place" not in last


def test_one_that_is_explained_leaves_the_first_step_of_a_training_its_own():
    model, optimizer, guard = made("warn")
    bad = torch.full((4, 3), float("inf"))
    with guard:
        with torch.no_grad():
            model(bad)
        assert guard.last_report.explanation.cause == "bad data"
        guard.run(lambda: model(bad).sum()).backward()
        optimizer.step()
        found = guard.last_report
    assert found.moment == "before" and found.explanation.cause == "bad data"


def test_a_step_that_auto_leaves_out_says_why_and_how_it_is_explained():
    model, optimizer, guard = made("warn")
    x = torch.ones(4, 3)
    with guard:
        for loss in (
            lambda: model(x * float("inf")).sum(),
            lambda: model(x).sum() * float("inf"),
        ):
            optimizer.zero_grad()
            guard.run(loss).backward()
            optimizer.step()
            model.square.fill_(1.0)
            with torch.no_grad():
                model.layer.weight.fill_(1.0), model.layer.bias.fill_(0.0)
    text = " ".join(str(guard.last_report).split())
    assert "last explanation was less than 100 steps before" in text
    assert "`explain=True` explains each" in text
