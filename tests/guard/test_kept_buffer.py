"""A skip puts buffers back, however forwards write to them."""

import pytest
import torch
from buffers import BAD, Stateful, X, assert_undone, everything, norm_net, step, watched
from guarding import assert_same
from torch.optim import swa_utils


@pytest.mark.parametrize("policy", ["skip", lambda report: "skip"])
def test_running_statistics_of_the_first_step(policy):
    model = norm_net()
    optimizer, guard = watched(model, policy)
    with guard:
        assert_undone(model, optimizer, guard)


@pytest.mark.parametrize("is_in_loop", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda model: model[1].running_mean.add_(1),
        lambda model: model[1].running_mean.data.add_(1),
        lambda model: model.load_state_dict(
            {**model.state_dict(), "1.running_mean": torch.full((4,), 7.0)}
        ),
        lambda model: swa_utils.update_bn([X, X + 1], model),
    ],
    ids=["in place", "by data", "load_state_dict", "update_bn"],
)
def test_what_users_write_between_steps_survives(write, is_in_loop):
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        for _ in range(2):
            step(model, optimizer)
            if is_in_loop:
                write(model)
        write(model)
        assert_undone(model, optimizer, guard)


def test_a_bad_forward_without_autograd_before_the_step_is_put_back_too():
    """A teacher's pass of the same model, say."""
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        before = everything(model)
        with torch.no_grad():
            model(BAD)
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(everything(model), before)


def test_users_data_is_never_written_to():
    def keep(self, x):
        self.last = x

    data = torch.stack([X, X + 1, BAD + 2, X + 3])
    original = data.clone()
    model = Stateful(keep, last=torch.zeros(5, 6))
    optimizer, guard = watched(model)
    with guard:
        for x in data:
            step(model, optimizer, x)
        assert guard.num_skipped == 1
    assert_same(data, original)


def test_a_batch_that_is_reused_is_not_written_to():
    """The next batch may be in it when the step is judged."""

    def keep(self, x):
        self.last = x

    model = Stateful(keep, last=torch.zeros(5, 6))
    optimizer, guard = watched(model)
    x = X.clone()
    with guard:
        step(model, optimizer, x)
        x.copy_(BAD)
        optimizer.zero_grad()
        model(x).sum().backward()
        x.copy_(X + 7)
        optimizer.step()
        assert guard.last_step_skipped
        assert_same(x, X + 7)


def test_expanded_buffers():
    def add(self, x):
        self.row.add_(x.sum())

    row = torch.zeros(3)
    model = Stateful(add, row=row, pos=row.expand(4, 3))
    model.register_buffer("constant", torch.ones(1).expand(7))
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        for _ in range(2):
            assert_undone(model, optimizer, guard)


def test_an_interrupt_in_the_middle():
    model = norm_net()
    optimizer, guard = watched(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    with guard:
        step(model, optimizer)
        before = everything(model)
        handle = model[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(BAD)
        handle.remove()
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(everything(model), before)
