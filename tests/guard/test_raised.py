"""Steps that the program's own code raises out of, at what a nan or an inf led to."""

import logging
import sys
import traceback

import pytest
import torch
from guarding import NAN, assert_same, state_of
from torch import nn
from torch.distributions import Categorical, Normal

from overflow_fast import NonFiniteError, OverflowGuard

BAD_STEP = 2


class Net(nn.Module):
    """A model whose head may raise; a row of 3e38 makes its second layer overflow."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 4))
        nn.init.normal_(self.body[0].weight)
        self.norm = nn.LayerNorm(4)
        self.head = head

    def forward(self, x):
        out = self.norm(self.body(x))
        return out if self.head is None else self.head(out)


def cholesky(h):
    return torch.linalg.cholesky(h.T @ h + torch.eye(4)).diagonal().log().sum()


def eigenvalues(h):
    return torch.linalg.eigvalsh(h.T @ h).sum()


def inverse(h):
    if not torch.isfinite(h).all():
        raise ZeroDivisionError("singular")
    return torch.linalg.inv(h.T @ h + torch.eye(4)).sum()


def svd(h):
    return torch.linalg.svd(h.T @ h + torch.eye(4)).S.sum()


def own_check(h):
    if not torch.isfinite(h).all():
        raise FloatingPointError("features are not finite, stopping")
    return h.pow(2).mean()


def own_assert(h):
    assert not h.isnan().any(), "nan"
    return h.pow(2).mean()


def multinomial(h):
    torch.multinomial(h.softmax(1), 1)
    return h.pow(2).mean()


def index_of_a_nan(h):
    return h[:, h.detach().mean().abs().clamp(max=3).to(torch.int64)].mean()


def number_of_a_nan(h):
    int(h.detach().sum())  # as for a tokenizer, or a name
    return h.pow(2).mean()


def normal(h):
    return -Normal(h, 1.0).log_prob(torch.zeros(4)).mean()


def categorical(h):
    return -Categorical(logits=h).log_prob(torch.zeros(len(h))).mean()


HEADS = [
    *(cholesky, eigenvalues, inverse, svd, own_check, own_assert, multinomial),
    *(index_of_a_nan, number_of_a_nan, normal, categorical),
]


def batches(count=4):
    torch.manual_seed(1)
    data = [torch.randn(8, 6) for _ in range(count)]
    data[BAD_STEP][5] = 3e38 * Net().body[0].weight[0].sign().detach()
    return data


def trained(head, where, policy="raise", optimizer=torch.optim.SGD, **arguments):
    """Trains until the head raises; returns the guard and the exception."""
    model = Net(head if where == "forward" else None)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, policy, **arguments)
    error = None
    try:
        for x in batches():
            if where == "run":
                loss = guard.run(lambda x=x: head(model(x)))
            else:
                loss = model(x) if where == "forward" else head(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as raised:
        error = raised
        if where == "loop":  # what Python does with what nobody catches
            sys.excepthook(type(raised), raised, raised.__traceback__)
    guard.remove()
    return guard, error


def assert_reported(guard, error, step=BAD_STEP):
    report = guard.last_report
    assert not isinstance(error, NonFiniteError)
    assert report is not None and report.step == step
    assert report.moment == "raised"
    assert report.raised == type(error).__qualname__
    assert report.verdict.first.fqn == "body.0"
    if sys.version_info >= (3, 11):
        assert [each for each in error.__notes__ if report.headline() in each]
        assert len(error.__notes__) == 1
    return report


@pytest.mark.parametrize("where", ["forward", "run", "loop"])
@pytest.mark.parametrize("head", HEADS)
def test_a_step_that_raises_is_reported_with_its_first_bad_value(head, where):
    guard, error = trained(head, where)
    report = assert_reported(guard, error)
    explanation = report.explanation
    assert explanation.op.name == "aten.addmm"
    assert explanation.cause == "range overflow"
    assert explanation.sample == 5
