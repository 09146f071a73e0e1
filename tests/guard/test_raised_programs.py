"""Programs whose own code raises at a nan: each is reported in its own step."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.distributions import (
    Bernoulli,
    Dirichlet,
    Gamma,
    MultivariateNormal,
    Poisson,
    kl_divergence,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard

BAD_STEP = 2
pytestmark = pytest.mark.usefixtures("validated")


class Net(nn.Module):
    """Its layer `first` overflows for a row of 3e38."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)
        nn.init.constant_(self.first.weight, 1.0)
        self.head = head

    def forward(self, x):
        h = self.first(x)
        out = self.last(self.act(h - h.mean()))
        return out if self.head is None else self.head(out)


def batch(step):
    torch.manual_seed(step)
    x = torch.randn(8, 6)
    if step == BAD_STEP:
        x[5] = 3e38
    return x


# Distributions, linear algebra, lookups: within the forward, or behind it in the loop.


def multivariate(h):
    cov = h.T @ h + torch.eye(4)
    return -MultivariateNormal(torch.zeros(4), cov).log_prob(torch.ones(4))


def bernoulli(h):
    return -Bernoulli(h.sigmoid()).log_prob(torch.ones(8, 4)).mean()


def gamma(h):
    return -Gamma(h.exp(), torch.ones(4)).rsample().mean()


def dirichlet(h):
    return -Dirichlet(h.exp()).log_prob(torch.full((4,), 0.25)).mean()


def divergence(h):
    return kl_divergence(Poisson(h.exp()), Poisson(torch.ones(4))).mean()


def hermitian(h):
    return torch.linalg.eigh(h.T @ h).eigenvalues.sum()


def pseudo_inverse(h):
    return torch.linalg.pinv(h.T @ h + torch.eye(4)).sum()


def word_of(h):
    words = dict.fromkeys(range(4), 1.0)
    return h.mean() * words[round(float(h.detach().sum()) % 4) % 4]


def target(h):
    labels = h.detach().mean(1).nan_to_num(nan=9.0).clamp(0, 9).long()
    return F.cross_entropy(h, labels)


def histogram(h):
    torch.histc(h.detach(), bins=4)
    return h.mean()


def table(h):
    index = h.detach().mean(1).abs().clamp(max=3).long()
    return h.mean() + F.embedding(index, torch.ones(4, 2)).mean()


HEADS = [
    *(multivariate, bernoulli, gamma, dirichlet, divergence, hermitian),
    *(pseudo_inverse, word_of, target, histogram, table),
]


def assert_reported(guard, error, moment="raised"):
    report = guard.last_report
    assert error is not None and not isinstance(error, NonFiniteError), error
    assert report is not None and report.step == BAD_STEP
    assert report.moment == moment
    assert report.raised == type(error).__qualname__
    if sys.version_info >= (3, 11):
        notes = getattr(error, "__notes__", [])
        assert len([each for each in notes if report.headline() in each]) == 1
    return report


def uncaught(function):
    """Runs a program as Python does: what nobody catches is printed."""
    try:
        function()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return error
    return None


@pytest.mark.parametrize("where", ["forward", "loop"])
@pytest.mark.parametrize("head", HEADS)
def test_what_a_head_raises_is_reported_in_its_step(head, where):
    model = Net(head if where == "forward" else None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = OverflowGuard(model, optimizer)

    def program():
        for step in range(4):
            out = model(batch(step))
            loss = out if where == "forward" else head(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    report = assert_reported(guard, uncaught(program))
    assert report.verdict.first.fqn == "first"
    guard.remove()


# Backward, the optimizer's step, evaluation.


class Strict(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not gradient.isfinite().all():
            raise ArithmeticError("a gradient of my own is not finite")
        return gradient


def in_a_function(model, optimizer, x):
    out = Strict.apply(model(x))
    (out * out.detach()).mean().backward()
    optimizer.step()


def in_a_hook(model, optimizer, x):
    out = model(x)

    def ask(gradient):
        assert gradient.isfinite().all(), "a hook of my own"

    out.register_hook(ask)
    (out * out.detach().exp()).mean().backward()
    optimizer.step()


def in_anomaly_mode(model, optimizer, x):
    with torch.autograd.set_detect_anomaly(True):
        model(x).square().mean().backward()
    optimizer.step()


def in_a_checkpoint(model, optimizer, x):
    def part(x):
        out = model(x)
        assert out.isfinite().all(), "in a checkpoint"
        return out

    checkpoint(part, x, use_reentrant=False).mean().backward()
    optimizer.step()


def in_clipping(model, optimizer, x):
    model(x).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


def in_a_closure(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).mean()
        if loss.isnan():
            raise ValueError("a loss of my own")
        loss.backward()
        return loss

    optimizer.step(closure)


def in_a_step_hook(model, optimizer, x):
    def ask(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            assert all(p.grad.isfinite().all() for p in group["params"]), "before it"

    handle = optimizer.register_step_pre_hook(ask)
    try:
        model(x).mean().backward()
        optimizer.step()
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "run",
    [
        *(in_a_function, in_a_hook, in_anomaly_mode, in_a_checkpoint),
        *(in_clipping, in_a_closure, in_a_step_hook),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_backward_and_steps_raise_is_reported_in_its_step(run, policy):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = OverflowGuard(model, optimizer, policy)

    def program():
        for step in range(4):
            run(model, optimizer, batch(step))
            optimizer.zero_grad()

    error = uncaught(program)
    assert_reported(guard, error)
    guard.remove()


def test_a_metric_that_raises_in_an_evaluation_is_reported(caplog):
    model = Net()
    guard = OverflowGuard(model, on_overflow="warn")

    def program():
        with torch.no_grad():
            scores = [model(batch(step)).mean().item() for step in range(4)]
        for score in scores:
            if score != score:
                raise ValueError("Input contains NaN.")

    with caplog.at_level(logging.WARNING, "overflow_fast"):
        assert isinstance(uncaught(program), ValueError)
    # The forward was judged when it ended, before the metric.
    assert guard.last_report.verdict.first.fqn == "first"
    guard.remove()


def test_a_generation_that_raises_is_reported(caplog):
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16
    )
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).eval()
    model.transformer.h[1].mlp.c_fc.bias.data[0] = 3e38
    model.transformer.h[1].mlp.c_proj.weight.data[0] = 3e38
    ids = torch.ones(1, 4, dtype=torch.long)
    guard = OverflowGuard(model, on_overflow="warn")
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        error = uncaught(
            lambda: model.generate(
                ids, do_sample=True, max_new_tokens=4, pad_token_id=0
            )
        )
    assert "probability tensor contains" in str(error)
    assert guard.last_report.verdict.first.fqn.startswith("transformer.h.1")
    guard.remove()


@pytest.mark.slow
def test_a_compiled_model_whose_loop_raises_is_reported():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    guard = OverflowGuard(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager")

    def program():
        for step in range(4):
            loss = multivariate(compiled(batch(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    report = assert_reported(guard, uncaught(program))
    assert report.verdict.first.fqn == "first"
    guard.remove()
