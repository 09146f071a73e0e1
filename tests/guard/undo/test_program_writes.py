"""What other code than a forward writes to weights within a step stays as it is."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.explains


@torch.no_grad()
def counted(weight):
    weight.mul_(2)


def by_data(weight):
    weight.data.mul_(2)


def by_numpy(weight):
    weight.detach().numpy()[:] *= 2


def model_of(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))


def train(model, write, moment, last, policy="skip", **options):
    """Trains three forwards a step, up to a bad one in which it writes to a weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = model[0].weight
    with OverflowGuard(model, optimizer, policy, **options) as guard:
        for step in range(last + 1):
            optimizer.zero_grad()
            for place in range(3):
                x = torch.randn(6, model[0].in_features)
                is_bad = step == last and place == 1
                if is_bad and moment == "before":
                    write(weight)
                factor = torch.inf if is_bad else 1
                loss = guard.run(lambda x=x, n=factor: model(x * n).sum())
                if is_bad and moment == "behind":
                    write(weight)
                loss.backward()
            if step == last and moment == "judged":
                write(weight)
            before = weight.detach().clone()
            try:
                optimizer.step()
            except NonFiniteError as error:
                return before, error
    return before, guard.last_report


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("moment", ["before", "behind", "judged"])
@pytest.mark.parametrize("write", [counted, by_data, by_numpy])
def test_a_skip_leaves_it(write, moment, last):
    model = model_of()
    before, report = train(model, write, moment, last, explain=False)
    assert report.action == "skip"
    assert model[0].weight.equal(before)
    assert model[1].running_mean.isfinite().all()


def test_a_write_behind_the_forwards_is_not_taken_for_theirs_when_a_policy_is_asked():
    model = model_of(256)  # too large to be copied
    before, report = train(model, counted, "judged", 2, lambda _: "skip", explain=False)
    assert report.action == "skip" and report.notes == []
    assert model[0].weight.equal(before)


class Squared(nn.Module):
    def forward(self, x):
        return x.square()


@pytest.mark.parametrize("last", [1, 2])  # copies are kept in the second alone
@pytest.mark.parametrize("write", [counted, by_data])
def test_the_first_forward_behind_a_write_is_named(write, last):
    """Those before it are non-finite when they are run again, and were finite."""
    model = nn.Sequential(nn.Linear(4, 4), Squared())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(model, optimizer, "warn") as guard:
        for step in range(last + 1):
            optimizer.zero_grad()
            for place in range(3):
                for _ in range(100 if step == last and place == 1 else 0):
                    write(model[0].weight)
                guard.run(lambda: model(torch.ones(2, 4)).mean()).backward()
            optimizer.step()
    found = guard.last_report.explanation
    assert found.op.name.startswith("aten.pow")
    assert found.forward == (2, 3)


class Swapped:
    """Exchanges a weight for one forward."""

    def __init__(self, is_counted):
        self.is_counted = is_counted

    def put(self, weight, value):
        if self.is_counted:
            with torch.no_grad():
                weight.copy_(value)
        else:
            weight.data = value.clone()
            weight.data.copy_(value)


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("last", [1, 2])
def test_a_device_is_not_accused_where_a_weight_was_another_one(is_counted, last):
    model, swapped = nn.Sequential(nn.Linear(4, 4)), Swapped(is_counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        OverflowGuard(model, optimizer) as guard,
        pytest.raises(NonFiniteError) as error,
    ):
        for step in range(last + 1):
            optimizer.zero_grad()
            own = model[0].weight.detach().clone()
            if step == last:
                swapped.put(model[0].weight, torch.full_like(own, 3e38))
            loss = guard.run(lambda: model(torch.ones(2, 4)).sum())
            swapped.put(model[0].weight, own)
            loss.backward()
            optimizer.step()
    assert error.value.exit_code == 1
    assert error.value.report.explanation.cause != "not reproducible"


def train_alone(model, batches, write, policy, between=lambda step: None):
    """Trains until the last batch, which is bad; a write comes behind each backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, policy, explain=False) as guard:
        for step, x in enumerate(batches):
            between(step)
            before = {k: v.detach().clone() for k, v in model.state_dict().items()}
            optimizer.zero_grad()
            is_bad = step == len(batches) - 1 or step in (5, 6)
            (model(x).mean() * (torch.nan if is_bad else 1)).backward()
            write(model)
            optimizer.step()
    assert guard.coverage().failures == 0
    return before, model.state_dict()


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_a_policy_that_writes_nothing_takes_nothing_back(last):
    batches = torch.ones(last, 4, 4)
    write = lambda model: by_data(model[0].weight)  # noqa: E731
    before, after = train_alone(model_of(), batches, write, lambda report: "skip")
    assert torch.equal(after["0.weight"], 2 * before["0.weight"])


class Embeds(nn.Module):
    """Its forward rescales rows of a weight, of which a skip knows by then."""

    def __init__(self, rows=10):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(rows, 4, max_norm=0.5)

    def forward(self, x):
        return self.rows(x)

    @torch.no_grad()
    def grow(self):
        self.rows.weight.mul_(3)


@pytest.mark.parametrize("rows", [10, 6000])
def test_a_policy_that_writes_once_is_no_reason_to_forget_what_forwards_write(rows):
    model, waiting = Embeds(rows), [1.5]

    @torch.no_grad()
    def policy(report):
        if waiting:
            model.rows.weight.mul_(waiting.pop())
        return "skip"

    batches = [torch.arange(8)] * 8  # bad: 5, 6 and 7
    before, after = train_alone(
        model, batches, lambda model: None, policy, lambda step: model.grow()
    )
    assert torch.equal(after["rows.weight"], before["rows.weight"])


@pytest.mark.parametrize(
    "change",
    [nn.Module.double, lambda model: setattr(model.rows, "scale_grad_by_freq", 1)],
)
def test_weights_of_another_dtype_are_copied_anew(change):
    model = Embeds()

    def between(step):
        if step == 10:
            model.double()
        model.grow()
        with torch.no_grad():
            model.rows.weight.add_(1.23456789e-9)

    batches = [torch.arange(8)] * 13
    before, after = train_alone(model, batches, lambda model: None, "skip", between)
    assert after["rows.weight"].dtype == torch.float64
    assert torch.equal(after["rows.weight"], before["rows.weight"])
