"""Programs that raise at a nan or an inf which no module was given or returned."""

import json

import pytest
import torch
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.explainer.step_explainer import StepExplainer
from overflow_fast.options import Explain

BAD_STEP = 1
pytestmark = [pytest.mark.explains, pytest.mark.usefixtures("validated")]


class CheckError(Exception):
    """An exception whose text says nothing."""


def sampled(out):
    torch.multinomial(torch.exp(out), 1)
    return out.mean()


def asserted(out):
    weights = out.exp()
    assert weights.isfinite().all()
    return weights.mean()


def asserted_in_one_line(out):
    assert torch.isfinite(out.exp()).all(), "weights"
    return out.mean()


def checked(weights):
    if (weights - weights).sum() != 0:
        raise CheckError(1)
    return weights.mean()


def checked_elsewhere(out):
    return checked(out.exp())


def checked_by_name(out):
    if torch.isinf(out.exp()).any():
        raise CheckError
    return out.mean()


def as_number(out):
    int(out.exp().sum().detach())
    return out.mean()


def as_index(out):
    weights = out.exp()
    return out[(weights - weights).sum().long().clamp(max=3)].mean()


def matched(out):
    costs = out.exp()
    if not bool((costs < 1e30).all()):
        raise ValueError("cost matrix is infeasible")
    return costs.mean()


def decomposed(out):
    torch.linalg.eigvalsh(out.exp().T @ out.exp())
    return out.mean()


def raised_from(out):
    try:
        return sampled(out)
    except RuntimeError as error:
        raise CheckError("the step has failed") from error


HEADS = [
    *(sampled, asserted, asserted_in_one_line, checked_elsewhere, checked_by_name),
    *(as_number, as_index, matched, decomposed, raised_from),
]


class Net(nn.Module):
    """A linear layer, whose outputs a head may look at within the forward."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.head = nn.Linear(6, 4), head
        nn.init.ones_(self.lin.weight)

    def forward(self, x):
        out = self.lin(x)
        return out if self.head is None else self.head(out)


def batch(step):
    torch.manual_seed(step)
    x = torch.randn(8, 6)
    if step == BAD_STEP:
        x[5] = 20.0  # of which exp makes inf
    return x


def trained(head, where, policy="raise", **arguments):
    """Trains until the head raises; returns the guard and the exception."""
    model = Net(head if "forward" in where else None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with OverflowGuard(model, optimizer, policy, **arguments) as guard:
        for step in range(3):
            x = batch(step)
            try:
                if where == "forward":
                    loss = model(x)
                elif where == "run of forward":
                    loss = guard.run(lambda x=x: model(x))
                else:
                    loss = guard.run(lambda x=x: head(model(x)))
            except Exception as error:
                return guard, error
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return guard, None


def assert_told(guard, error, head, step=BAD_STEP):
    report = guard.last_report
    assert report is not None and report.step == step
    first, found = report.verdict.first, report.explanation
    assert (first.kind, first.num_nan, first.num_inf > 0) == ("value", 0, True)
    assert (found.op.name, found.sample) == ("aten.exp", 5)
    assert report.raised == type(error).__qualname__
    (note,) = error.__notes__
    assert note.startswith(f"[overflow_fast] {report.headline()}")
    assert "exp" in report.headline() and head.__name__ not in report.headline()
    return report


@pytest.mark.parametrize("where", ["run", "run of forward", "forward"])
@pytest.mark.parametrize("head", HEADS)
def test_the_operation_is_named_that_led_to_the_exception(head, where):
    guard, error = trained(head, where)
    assert assert_told(guard, error, head).moment == "raised"
    assert guard.metrics()["bad_steps_total"] == 1


@pytest.mark.parametrize("how", ["run", "forward", "run with autograd", "request"])
@pytest.mark.parametrize("head", [sampled, asserted, raised_from])
def test_a_request_that_raises_by_itself_is_explained(head, how):
    model = Net(head if how in ("forward", "request") else None).eval()
    with OverflowGuard(model) as guard, torch.set_grad_enabled("auto" in how):
        for step in range(2):
            x = batch(step)
            try:
                if how == "request":
                    with guard.request(ids=list("abcdefgh")):
                        model(x)
                elif how == "forward":
                    model(x)
                else:
                    guard.run(lambda x=x: head(model(x)))
            except Exception as error:
                report = assert_told(guard, error, head)
                assert report.requests == (["f"] if how == "request" else None)
    assert guard.metrics()["bad_requests_total"] == 1


def test_bad_data_that_no_module_was_given_is_named():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    target = torch.zeros(8, 4)
    target[2, 1] = float("nan")

    def compared():
        distance = (model(x) - target).abs()
        assert not distance.isnan().any()
        return distance.mean()

    x = batch(0)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(AssertionError) as raised:
            guard.run(compared)
    found = guard.last_report.explanation
    assert (found.cause, found.tensor, found.sample) == ("bad data", "target", 2)
    assert "`target` holds" in raised.value.__notes__[0]


def test_log_and_evidence_have_the_step(tmp_path):
    guard, error = trained(
        *(sampled, "run"), evidence=tmp_path / "evidence", log=tmp_path / "guard.jsonl"
    )
    report = assert_told(guard, error, sampled)
    lines = [json.loads(e) for e in (tmp_path / "guard.jsonl").read_text().splitlines()]
    bad = [each for each in lines if each.get("is_clean") is False]
    assert [each["step"] for each in bad] == [BAD_STEP]
    (saved,) = (tmp_path / "evidence").glob("**/report.json")
    assert json.loads(saved.read_text())["verdict"]["first"]["kind"] == "value"
    assert report.evidence == str(saved.parent)


# Left alone: what has nothing to do with values, and what nothing was found of.


def of_a_key(out):
    torch.zeros(3).log()
    return {}["nan"]


def of_shapes(out):
    weights = out.exp()
    return weights @ torch.ones(7, 3)


def of_memory(out):
    out.exp()
    raise torch.OutOfMemoryError("nan")


def of_a_mistake(out):
    weights = out.exp()
    return weights.no_such_method()


def of_an_interruption(out):
    out.exp()
    raise KeyboardInterrupt


def of_a_count(out):
    least = torch.zeros(3)
    raise ValueError(f"{len(least)} rows")


UNRELATED = [of_a_key, of_shapes, of_memory, of_a_mistake, of_an_interruption]
UNRELATED += [of_a_count]


def masked(out):
    masked = out.masked_fill(torch.eye(8, 4, dtype=torch.bool), -float("inf"))
    raise ValueError(f"nan in {len(masked)}")


def first_of_minima(out):
    least = torch.full((3,), float("inf"))
    raise ValueError(f"inf in {len(least)}")


FINITE = [masked, first_of_minima]


@pytest.fixture
def searches(monkeypatch):
    """The second runs."""
    seen, search = [], StepExplainer.search
    counted = lambda *given: seen.append(0) or search(*given)  # noqa: E731
    monkeypatch.setattr(StepExplainer, "search", counted)
    return seen


def ends_alone(head, **arguments):
    """Runs a head that raises, with an optimizer and without; returns what was said."""
    said = []
    for has_optimizer in (True, False):
        model = Net().eval()
        given = [torch.optim.SGD(model.parameters(), 1e-6)] * has_optimizer
        with OverflowGuard(model, given, **arguments) as guard:
            with pytest.raises(BaseException) as raised:
                guard.run(lambda m=model: head(m(batch(BAD_STEP))))
        said.append(guard.last_report)
        said += [e for e in getattr(raised.value, "__notes__", []) if "Request" in e]
    return said


@pytest.mark.parametrize("head", UNRELATED)
def test_an_exception_of_something_else_runs_nothing_again(head, searches):
    assert ends_alone(head) == [None, None] and not searches


@pytest.mark.parametrize("head", FINITE)
def test_nothing_is_said_where_nothing_is_found(head, searches):
    assert ends_alone(head) == [None, None] and len(searches) == 2


def test_what_need_not_be_explained_is_not_run_again(searches):
    for arguments in ({"explain": False}, {"explain": Explain(replay_safe=False)}):
        assert ends_alone(sampled, **arguments) == [None, None] and not searches


def test_what_was_not_handed_over_is_not_run_again():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with pytest.raises(RuntimeError) as raised:
        with OverflowGuard(model, optimizer) as guard:
            sampled(model(batch(BAD_STEP)))
    assert guard.last_report is None and not hasattr(raised.value, "__notes__")


def test_a_step_goes_on_after_an_exception_that_nothing_was_found_of():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(ValueError, match="inf"):
            guard.run(lambda: first_of_minima(model(batch(0))))
        guard.run(lambda: model(batch(2)).mean()).backward()
        optimizer.step()
        assert guard.last_report is None and guard.coverage().failures == 0


def test_buffers_are_put_back_where_the_loop_goes_on():
    model = nn.Sequential(nn.BatchNorm1d(6), Net(asserted))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with OverflowGuard(model, optimizer, "skip") as guard:
        model(batch(0)).backward()
        optimizer.step()
        before = model[0].running_mean.clone()
        model[1].lin.weight.data.fill_(100.0)
        with pytest.raises(AssertionError):
            model(batch(BAD_STEP))
    assert guard.last_report.verdict.first.kind == "value"
    assert torch.equal(model[0].running_mean, before)
