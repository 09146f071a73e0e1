"""Weights that an optimizer's step made non-finite, by its settings or by others."""

import math

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.findings import OF_OTHERS

INF, NAN = math.inf, math.nan


def run(*given, **named):
    """Trains; returns the explanation of the step that raises."""
    report = report_of(*given, **named)
    return None if report is None else report.explanation


def report_of(
    make, before_step=lambda optimizer, step: None, after=lambda *given: None
):
    """Trains; returns the report of the step that raises."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = make(model)
    guard = OverflowGuard(model, optimizer)
    try:
        for step in range(5):
            x = torch.randn(8, 4)
            guard.run(lambda x=x: model(x).pow(2).mean()).backward()
            before_step(optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            after(optimizer, step, model)
    except NonFiniteError as error:
        return error.report
    finally:
        guard.remove()
    return None


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


# But the learning rate, which is looked at in its step.
SETTINGS = [
    (sgd, "weight_decay", NAN),
    (sgd, "momentum", NAN),
    (adamw, "weight_decay", INF),
    (adamw, "eps", NAN),
    (adamw, "betas", (0.9, NAN)),
]


@pytest.mark.parametrize(("make", "name", "value"), SETTINGS)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_setting_that_was_not_finite(make, name, value, is_kept, as_kept):
    kept = {}

    def change(optimizer, step):
        if step == 2:
            kept["own"] = optimizer.param_groups[0][name]
            optimizer.param_groups[0][name] = value

    def put_back(optimizer, step, model):
        if step == 2 and not is_kept:
            optimizer.param_groups[0][name] = kept["own"]

    found = run(make, change, put_back)
    assert (found.phase, found.cause) == ("optimizer", "bad setting")
    assert found.tensor == "weight"
    place = "[1]" if isinstance(value, tuple) else ""
    number = value[1] if isinstance(value, tuple) else value
    assert f"param_groups[0]['{name}']{place} of " in found.evidence[0]
    assert f" was {number} in the last step" in found.evidence[0]
    as_kept(found.evidence[0])


def test_the_group_of_the_weight_is_named():
    def make(model):
        groups = [{"params": [model.bias]}, {"params": [model.weight], "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1)

    def change(optimizer, step):
        optimizer.param_groups[1]["lr"] = NAN if step == 1 else 0.01

    found = run(make, change)
    assert (found.cause, found.tensor) == ("bad setting", "weight")
    assert "param_groups[1]" in found.evidence[0]


def test_a_setting_that_did_no_harm_is_not_blamed():
    def change(optimizer, step):
        optimizer.param_groups[0]["unused"] = NAN

    def write(optimizer, step, model):
        if step == 1:
            with torch.no_grad():
                model.weight[0, 0] = INF

    assert run(sgd, change, write).cause == "unknown"


def test_a_write_by_other_code_is_told_apart(as_kept):
    def write(optimizer, step, model):
        if step == 1:
            with torch.no_grad():
                model.weight.mul_(NAN)

    found = run(sgd, after=write)
    assert found.cause == "unknown"
    as_kept(found.evidence[1])
    assert found.evidence[1].endswith("risen by 1")


def test_a_step_alone_is_no_write_of_others():
    def change(optimizer, step):
        if step == 1:
            for parameter in optimizer.param_groups[0]["params"]:
                optimizer.state[parameter]["momentum_buffer"].fill_(3e38)
            optimizer.param_groups[0]["lr"] = 1e30

    found = run(sgd, change)
    assert found is not None
    assert "code outside" not in str(found.evidence)


def test_a_state_that_a_checkpoint_has_brought_is_named(as_kept):
    def made(model):
        optimizer = adamw(model)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        state["state"][0]["exp_avg_sq"][1, 2] = NAN
        optimizer.load_state_dict(state)
        return optimizer

    found = run(made)
    assert (found.cause, found.tensor) == ("unknown", "weight")
    as_kept(found.evidence, found.notes)


def test_a_finite_state_is_not_blamed():
    def after(optimizer, step, model):
        with torch.no_grad():
            model.weight[0, 0] = NAN

    found = run(adamw, after=after)
    assert "the state of" not in str(found)
    assert not found.notes


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("is_evaluated", [True, False])
def test_a_weight_that_other_code_writes_after_its_step(is_evaluated, has_optimizer):
    """A forward without autograd that finds it says what a step says."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    optimizer = sgd(model if has_optimizer else model[0])
    guard = OverflowGuard(model, optimizer)
    x = torch.ones(3, 4)
    with pytest.raises(NonFiniteError) as error:
        for _ in range(3):
            guard.run(lambda: model(x).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model[1].weight.mul_(NAN)
        with torch.set_grad_enabled(not is_evaluated):
            model(x).mean()
        guard.check()
    guard.remove()
    report = error.value.report
    assert (report.moment == "evaluation") == is_evaluated
    evidence = str(report.explanation.evidence)
    assert ("risen by 1" in evidence) == has_optimizer
    assert ("no optimizer of the guard has it" in evidence) != has_optimizer
    assert (OF_OTHERS in report.explanation.notes) != has_optimizer
    assert has_optimizer or "known whether" not in str(report)  # it is known
    assert has_optimizer or "checkpoint" not in str(report)  # it would be again
    assert ("the optimizer's step made it" in evidence) == has_optimizer


def test_a_gradient_that_was_bad_before_a_weight_that_no_step_writes():
    actor = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    critic = nn.Linear(4, 1)
    models = nn.ModuleDict({"actor": actor, "critic": critic})
    guard = OverflowGuard(models, sgd(critic), "warn", explain=False)
    x = torch.ones(3, 4)
    for is_last in (False, True):
        assert guard.last_report is None
        loss = actor(x).mean() * (NAN if is_last else 1.0)
        gradient = torch.autograd.grad(loss, [actor[0].weight])[0]
        with torch.no_grad():
            actor[0].weight -= gradient
            actor(x)
    text = str(guard.last_report)
    guard.remove()
    assert guard.last_report.moment == "evaluation"
    assert "Before that, in the step at hand, a gradient was non-finite: `gr" in text
    assert "holds 6 nan" in text


class Counts(Assembled):
    """Has a weight that may be -inf: then its sigmoid is 0."""

    def forward(self, rows):
        return torch.sigmoid(self.logits[rows]).mean()


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize("change", ["grown", "replaced", "written"])
def test_a_weight_of_the_program_s_own_between_two_steps(change, value):
    model = Counts(logits=nn.Parameter(torch.zeros(6)))
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError) as error:
        for step in range(3):
            guard.run(lambda: model(torch.arange(4))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                old = model.logits.detach()
                new = torch.cat([old[: 6 if change == "grown" else 4], old[:2] + value])
                if change == "written":
                    model.logits.data.copy_(new)
                else:
                    model.logits = nn.Parameter(new)
                    optimizer.param_groups[0]["params"] = [model.logits]
    guard.remove()
    report = error.value.report
    found, text = report.explanation, str(report)
    assert found.tensor == "logits"
    assert "finite in the" not in text
    is_other = "logits is another parameter than" in str(found.evidence)
    assert is_other == (change != "written")
    assert is_other == ("load a checkpoint" not in text)
    assert ("[8] in place" in text) == (change == "grown")
    assert ("in its new rows alone, from row 6" in text) == (change == "grown")
    assert ("last seen finite" in text) != is_other


def test_a_weight_that_was_replaced_is_not_said_to_come_from_a_step():
    def put(optimizer, step, model):
        if step == 1:
            model.weight = nn.Parameter(torch.full((2, 4), INF))
            optimizer.param_groups[0]["params"][0] = model.weight

    report = report_of(sgd, after=put)
    assert "weight is another parameter than" in str(report)
    assert "came from an optimizer step" not in str(report)
