"""A loss that nobody has given, in steps whose gradients do not tell of it."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer import loss_line

NONE, SOME = torch.full((4,), -100), torch.tensor([0, -100, 2, 1])
NAN = float("nan")


class Training:
    """A classifier; the loss of labels that all are ignored is nan, its gradients 0."""

    def __init__(self, scale=None, is_fused=False, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 3)
        self.apart = nn.Parameter(torch.ones(()))
        parameters = [*self.model.parameters(), self.apart]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, fused=is_fused)
        if scale is not None:
            self.scaler = GradScaler("cpu", init_scale=scale)
        self.x = torch.randn(4, 2)
        self.guard = OverflowGuard(self.model, self.optimizer, **options)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()


def plain(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    loss.backward()
    t.optimizer.step()


def clipped(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    t.optimizer.step()


def accumulated(t, labels):
    for _ in range(2):
        loss = F.cross_entropy(t.model(t.x), labels)
        loss.backward()
    t.optimizer.step()


def as_an_argument(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    t.step(loss)


def under_one_name(t, labels, is_scaled=False):
    loss = F.cross_entropy(t.model(t.x), labels)
    if is_scaled:
        t.scaler.scale(loss).backward()
    else:
        loss.backward()
    t.optimizer.step()


def scaled(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    t.scaler.scale(loss).backward()
    t.scaler.step(t.optimizer)
    t.scaler.update()


def scaled_square(t, labels):
    """A nan among the labels is in all gradients but one, and the scaler skips."""
    loss = (t.model(t.x) * labels.sum()).square().mean() + t.apart
    t.scaler.scale(loss).backward()
    t.scaler.step(t.optimizer)
    t.scaler.update()


SEEN = [plain, clipped, accumulated, as_an_argument, under_one_name]


@pytest.mark.parametrize("options", [{}, {"explain": False}], ids=["", "unexplained"])
@pytest.mark.parametrize("way", SEEN)
def test_a_nan_whose_gradients_are_0_is_an_alarm(way, options):
    t = Training(**options)
    way(t, SOME)
    before = t.model.weight.clone()
    t.optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match="Step 1: the loss is nan") as raised:
        way(t, NONE)
    assert "No loss was seen" not in str(raised.value.report)
    assert before.equal(t.model.weight)


@pytest.mark.explains
@pytest.mark.parametrize("way", [plain, clipped, accumulated])
def test_its_lines_are_run_again(way):
    with pytest.raises(NonFiniteError, match="no label of the batch counts"):
        way(Training(), NONE)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("way", "bad"), [(scaled, NONE), (scaled_square, torch.tensor([NAN]))]
)
def test_a_nan_loss_under_a_scaler_is_an_alarm(way, bad, is_fused):
    t = Training(16.0, is_fused)
    way(t, SOME)
    before = t.model.weight.clone()
    t.optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match="Step 1: the loss is nan"):
        way(t, bad)
    assert before.equal(t.model.weight)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_scale_that_is_too_large_is_none(is_fused):
    t = Training(2.0**127, is_fused)
    scaled_square(t, torch.tensor([1e3]))
    assert t.guard.last_report is None
    assert t.guard.last_step_skipped


def left_out(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    if loss.isfinite():
        loss.backward()
    t.optimizer.step()


def weighed_by_0(t, labels):
    loss = F.cross_entropy(t.model(t.x), torch.zeros_like(labels)) * 0
    loss.backward()
    t.optimizer.step()


def divided_since(t, labels):
    loss = F.cross_entropy(t.model(t.x), torch.zeros_like(labels)) * 0
    loss.backward()
    loss = loss / (labels >= 0).sum()
    t.optimizer.step()


def of_another_branch(t, labels):
    other = F.cross_entropy(t.model(t.x), labels)
    loss = F.cross_entropy(t.model(t.x), torch.zeros_like(labels)) * 0
    if labels is not None:
        loss.backward()
    else:
        other.backward()
    t.optimizer.step()


def of_a_turn_before(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    loss.backward(retain_graph=True)
    for _ in range(2):
        weight = t.model(t.x).sum() * 0
        torch.autograd.backward([weight])
        t.optimizer.step()


def of_a_turn_before_elsewhere(t, labels):
    loss = F.cross_entropy(t.model(t.x), labels)
    loss.backward()
    weighed_in_a_loop(t)


def weighed_in_a_loop(t):
    for _ in range(2):
        t.optimizer.step()


def in_a_function_that_has_returned(t, labels):
    t.loss = F.cross_entropy(t.model(t.x), labels)
    t.loss.backward()
    t.optimizer.step()


SILENT = [left_out, weighed_by_0, divided_since, of_another_branch]
UNCERTAIN = [of_a_turn_before, of_a_turn_before_elsewhere]


@pytest.mark.parametrize(
    "way",
    [*SILENT, *UNCERTAIN, in_a_function_that_has_returned],
    ids=lambda w: w.__name__,
)
def test_where_no_loss_is_certain_to_be_nan_there_is_none(way):
    t = Training()
    plain(t, SOME)
    t.optimizer.zero_grad(set_to_none=False)
    way(t, NONE)
    assert t.guard.last_report is None


@pytest.mark.parametrize(
    "options",
    [
        {"watch": ("activations", "grad_outputs", "gradients")},
        {"watch": ("activations", "grad_outputs", "loss")},
        {"watch": "tripwire"},
        {"allow": {":recorded.loss": "nan"}},
        {"sync": "lagged"},
    ],
    ids=str,
)
def test_where_it_is_not_asked_for_there_is_none(options):
    t = Training(**options)
    plain(t, NONE)
    t.guard.remove()
    assert t.guard.last_report is None


def test_the_step_is_skipped():
    t = Training(on_overflow="skip")
    before = t.model.weight.clone()
    plain(t, NONE)
    assert t.guard.num_skipped == 1
    assert before.equal(t.model.weight)


def test_nothing_is_looked_for_in_other_steps(monkeypatch):
    looks = []
    monkeypatch.setattr(loss_line, "loss_at_hand", lambda: looks.append(1))
    t = Training()
    for way in (plain, clipped, accumulated):
        way(t, SOME)
    loss = t.guard.run(lambda: F.cross_entropy(t.model(t.x) * 0, SOME))
    t.optimizer.zero_grad()
    t.step(loss)
    assert not looks
    t.optimizer.zero_grad()
    weighed_by_0(t, SOME)
    assert looks == [1]


def test_nothing_of_the_step_is_held_by_the_look():
    t, held = Training(), []

    def step():
        loss = F.cross_entropy(t.model(t.x), SOME) * 0
        held.append(weakref.ref(loss))
        loss.backward()
        t.optimizer.step()

    gc.collect()
    gc.disable()
    try:
        step()
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_step_is_judged_where_it_cannot_be_looked_for(monkeypatch):
    def fail():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(loss_line, "loss_at_hand", fail)
    t = Training()
    plain(t, NONE)
    assert t.guard.last_report is None
    assert not t.guard.coverage().failures
