"""The restore point of a skip: when it is made, and of which models."""

import pytest
import torch
from buffers import (
    BAD,
    LARGE,
    Stateful,
    X,
    assert_undone,
    everything,
    norm_net,
    step,
    watched,
)
from guarding import assert_same
from torch import nn
from torch.optim import swa_utils

from overflow_fast import OverflowGuard
from overflow_fast.options import Schedule


def in_place(self, x):
    self.kept.mul_(0.9).add_(x.mean(0), alpha=0.1)


def by_data(self, x):
    self.kept.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def by_numpy(self, x):
    self.kept.numpy()[0] += x.sum().item()


def anew(self, x):
    self.kept = self.kept * 0.9 + x.mean(0)


def by_copy(self, x):
    self.kept.copy_(self.kept + x.mean(0))


WRITES = [in_place, by_data, by_numpy, anew, by_copy]


def kept_of(size, kind):
    kept = torch.zeros(size, 6)
    return nn.Parameter(kept, requires_grad=False) if kind == "parameter" else kept


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("size", [1, LARGE // 6])
@pytest.mark.parametrize("write", WRITES)
def test_whatever_way_it_is_written(write, size, kind, steps_before, as_kept):
    if kind == "parameter" and write is anew:
        write = by_copy  # a parameter cannot be a plain tensor
    unseen = size > 1 and write in (by_data, by_numpy) and steps_before == 0
    model = Stateful(write, kept=kept_of(size, kind))
    optimizer, guard = watched(model)
    with guard:
        for _ in range(steps_before):
            step(model, optimizer)
        before, tensor = everything(model), model.kept
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        if unseen:  # in the very first step it is not known when it was written
            as_kept(guard.last_report.notes)
            return
        assert model.kept is tensor
        assert_same(everything(model), before)
        as_kept(guard.last_report.notes)


def test_gradients_of_several_forwards():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        before = everything(model)
        for x in (X, BAD, X):
            model(x).sum().backward()
        optimizer.step()
        assert guard.last_step_skipped
        assert_same(everything(model), before)


def test_what_is_discarded_stays():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        model(X + 1)
        guard.discard()
        assert_undone(model, optimizer, guard)


def test_two_models_with_an_optimizer_each():
    models = [norm_net(), norm_net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with OverflowGuard(models, optimizers, "skip") as guard:
        for x in (X, X):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, x)
        step(models[0], optimizers[0])
        stepped = everything(models[0])
        before = everything(models[1])
        models[0](BAD)
        step(models[1], optimizers[1], BAD)
        assert not guard.was_skipped(optimizers[0])
        assert guard.was_skipped(optimizers[1])
        assert_same(everything(models[0]), stepped)
        assert_same(everything(models[1]), before)


def test_what_runs_later_in_a_bad_round_is_put_back_too():
    models = [norm_net(), norm_net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with OverflowGuard(models, optimizers, "skip") as guard:
        before = [everything(model) for model in models]
        step(models[0], optimizers[0], BAD)
        step(models[1], optimizers[1], X)
        assert guard.was_skipped(optimizers[1])
        assert_same([everything(model) for model in models], before)


@pytest.mark.parametrize("comes", ["in place", "replaced"])
def test_parts_of_a_model_that_are_called_by_themselves(comes):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
            self.head = nn.Linear(4, 1)

    def part_step(x):
        optimizer.zero_grad()
        model.head(model.body(x)).sum().backward()
        optimizer.step()

    model = Parts()
    optimizer, guard = watched(model)
    with guard:
        before = everything(model)
        part_step(BAD)
        assert_same(everything(model), before)
        for _ in range(2):
            part_step(X)
        if comes == "in place":
            model.body[1].running_mean.add_(1)
        else:
            model.body[1].running_mean = torch.ones(4)
        before = everything(model)
        part_step(BAD)
        assert guard.num_skipped == 2
        assert_same(everything(model), before)


def test_what_hooks_write_before_a_part_that_is_called_by_itself_is_put_back():
    def count(module, args):
        module.calls.add_(1)

    model = norm_net()
    model[0].register_buffer("calls", torch.zeros(()))
    model[0].register_forward_pre_hook(count)
    optimizer, guard = watched(model)
    with guard:
        for x in (X, BAD):  # the first call of a part tells that there are such calls
            optimizer.zero_grad()
            model[0](x).sum().backward()
            optimizer.step()
        assert guard.num_skipped == 1 and model[0].calls == 1


@pytest.mark.parametrize(
    "arguments", [{"watch": ["gradients"]}, {"schedule": Schedule(warmup=1)}], ids=str
)
def test_whatever_is_watched(arguments):
    model = norm_net()
    optimizer, guard = watched(model, **arguments)
    with guard:
        for _ in range(3):
            step(model, optimizer)
        assert_undone(model, optimizer, guard)


def test_a_model_that_steps_twice_in_a_row_on_bad_batches():
    """As a critic does that steps more often than the generator."""
    critic, generator = norm_net(), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    with OverflowGuard([critic, generator], optimizers, "skip") as guard:
        for x in (X, BAD, BAD, X, BAD):
            before = everything(critic)
            step(critic, optimizers[0], x)
            assert guard.last_step_skipped == (x is BAD)
            if x is BAD:
                assert_same(everything(critic), before)
                critic[1].running_mean.add_(1)  # a user's, which stays
        assert guard.num_skipped == 3


def test_a_bad_evaluation_takes_nothing_back_that_came_before():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        swa_utils.update_bn([X + 1, X + 2], model)
        model.eval()
        with torch.no_grad():
            model(BAD)
        model.train()
        assert_undone(model, optimizer, guard)
