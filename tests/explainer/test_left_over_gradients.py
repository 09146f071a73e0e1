"""Gradients that a bad step has left for the next one."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

CAUSE = "left-over gradients"


class Loop:
    def __init__(self, **arguments):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = OverflowGuard(self.model, self.optimizer, **arguments)

    def step(self, is_bad=False, before=lambda loop: None, in_run=True):
        x = torch.ones(2, 4) * (torch.nan if is_bad else 1)
        before(self)
        compute = lambda: self.model(x).mean()  # noqa: E731
        (self.guard.run(compute) if in_run else compute()).backward()
        try:
            self.optimizer.step()
        except NonFiniteError as error:
            return error
        self.optimizer.zero_grad()
        return None


@pytest.mark.parametrize("in_run", [True, False])
def test_they_are_named_with_the_step_that_made_them(in_run, as_kept):
    loop = Loop()
    loop.step()
    assert loop.step(is_bad=True).report.explanation.cause == "bad data"
    for step in (2, 3):  # it stays step 1, however often it is seen again
        error = loop.step(in_run=in_run)
        found = error.report.explanation
        assert (error.report.step, found.cause) == (step, CAUSE)
        text = str(error)
        as_kept(text)
        assert text.splitlines()[-1] == "    optimizer.zero_grad()"
        assert "not known" not in text and error.exit_code == 1
    loop.optimizer.zero_grad()
    assert loop.step(in_run=in_run) is None


def zeroed(loop):
    loop.optimizer.zero_grad(set_to_none=False)


def cleared(loop):
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("before", [zeroed, cleared])
def test_a_step_after_cleared_gradients_is_not_blamed(before):
    loop = Loop()
    loop.step(is_bad=True)
    assert loop.step(before=before) is None


def spoiled(loop):
    """Clears what was there, and writes other bad values into the same tensors."""
    zeroed(loop)
    for each in loop.model.parameters():
        each.grad.fill_(torch.inf)


def test_other_bad_gradients_in_their_place_are_not_left_over():
    loop = Loop()
    loop.step(is_bad=True)
    assert loop.step(before=spoiled).report.explanation.cause != CAUSE


def test_a_step_that_is_bad_itself_is_explained_as_one():
    loop = Loop()
    loop.step(is_bad=True)
    assert loop.step(is_bad=True).report.explanation.cause == "bad data"


@pytest.mark.slow
def test_clean_steps_between_end_it():
    loop = Loop()
    loop.step(is_bad=True)
    loop.step(before=cleared)
    seen = []

    def hook(gradient):
        seen.append(gradient)
        return gradient * torch.nan

    handle = loop.model[0].weight.register_hook(hook)
    found = loop.step().report.explanation
    handle.remove()
    assert seen and found.cause != CAUSE
