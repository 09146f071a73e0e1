"""A skip puts buffers back that forwards replace, register or initialize."""

import copy

import pytest
import torch
from buffers import BAD, Stateful, X, assert_undone, everything, norm_net, step, watched
from guarding import assert_same
from torch import nn

from overflow_fast import OverflowGuard


def test_a_norm_that_is_unfrozen_later():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        model[1].eval()
        for _ in range(3):
            step(model, optimizer)
        model[1].train()
        assert_undone(model, optimizer, guard)
        for _ in range(3):
            step(model, optimizer)


def test_lazy_statistics_that_a_later_step_has_made_are_not_reset():
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    norm, model[1] = model[1], nn.Sequential()  # it is called from step 9 on
    model.add_module("norm", norm)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.1)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i in range(11):
            if i == 9:
                model.forward = lambda x: model[2](norm(model[0](x)))
            step(model, optimizer)
        assert_undone(model, optimizer, guard)


def test_a_tensor_that_takes_the_place_of_a_freed_one_is_another():
    def write(model, x):
        if model.replaces:
            model.buffer = model.buffer * 0.9
        else:
            model.buffer.data.mul_(0.9)

    model = Stateful(write, buffer=torch.ones(4))
    optimizer, guard = watched(model)
    with guard:
        for _ in range(4):
            model.replaces = True
            step(model, optimizer)
            model.buffer = None
            model.buffer = torch.full((4,), 7.0)  # may have the address of the other
            model.replaces = False
            step(model, optimizer, BAD)
            assert_same(model.buffer, torch.full((4,), 7.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16).float(),
        lambda model: setattr(model[1], "running_mean", torch.ones(4)),
        lambda model: model.__setitem__(1, nn.BatchNorm1d(4)),
        lambda model: model.append(nn.BatchNorm1d(1)),
        lambda model: model.load_state_dict(norm_net().state_dict(), assign=True),
    ],
    ids=["cast", "cast twice", "assigned", "replaced", "added", "loaded"],
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_models_that_change_after_the_guard_was_made(change, steps_before):
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        for _ in range(steps_before):
            step(model, optimizer)
        change(model)
        x = BAD.to(model[0].weight.dtype)
        before = everything(model)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert guard.last_step_skipped
        assert_same(everything(model), before)


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    guard = OverflowGuard(model, torch.optim.SGD([torch.ones(1)]), "skip")
    guard.remove()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(model[1].running_var, torch.ones(4))
        assert_same(model[1].running_mean, torch.zeros(4))
        step(model, optimizer)
        assert_undone(model, optimizer, guard)


def test_buffers_that_are_none_and_become_something():
    def keep(self, x):
        if self.cache is None:
            self.cache = x.mean(0)

    model = Stateful(keep, cache=None)
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer, BAD)
        assert model.cache is None


def data_of(self, x):
    self.last.data = x


def set_to(self, x):
    self.last.set_(x)


@pytest.mark.parametrize("write", [data_of, set_to])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_memory_that_a_forward_has_exchanged_is_not_written_to(write, is_parameter):
    last = torch.zeros(5, 6)
    last = nn.Parameter(last, requires_grad=False) if is_parameter else last
    model = Stateful(write, last=last)
    data = torch.stack([X, X + 1, BAD, X + 2])
    original = data.clone()
    optimizer, guard = watched(model)
    with guard:
        for x in data:
            before = everything(model)
            step(model, optimizer, x)
            if guard.last_step_skipped:
                assert_same(everything(model), before)
        assert guard.num_skipped == 1
    assert_same(data, original)


def first_then_in_place(self, x):
    if self.kept is None:
        self.kept = x.mean(0)
    else:
        self.kept.lerp_(x.mean(0), 0.1)


def in_place_then_anew(self, x):
    self.kept[0] = x[0]
    self.kept = self.kept.roll(1, 0)


def parameter_anew(self, x):
    self.kept = nn.Parameter(self.kept * 0.9 + x.mean(0), requires_grad=False)


def registered(self, x):
    if "kept" not in self._buffers:
        self.register_buffer("kept", x.mean(0))
    else:
        self.kept.lerp_(x.mean(0), 0.1)


@pytest.mark.parametrize(
    ("write", "buffers"),
    [
        (first_then_in_place, {"kept": None}),
        (in_place_then_anew, {"kept": torch.zeros(3, 6)}),
        (parameter_anew, {"kept": nn.Parameter(torch.zeros(6), requires_grad=False)}),
        (registered, {}),
    ],
)
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_buffers_that_are_replaced_and_written_to(write, buffers, steps_before):
    model = Stateful(write, **copy.deepcopy(buffers))
    optimizer, guard = watched(model)
    with guard:
        for _ in range(steps_before):
            step(model, optimizer)
        assert_undone(model, optimizer, guard)
        step(model, optimizer)
        assert not guard.last_step_skipped


def cast(model):
    model.double().float()


def assigned(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [cast, assigned])
@pytest.mark.parametrize("place", ["between", "behind", "judged"])
def test_what_other_code_replaces_in_a_step_is_restored_in_later_ones(change, place):
    model = norm_net()
    optimizer, guard = watched(model, explain=False)
    with guard:
        for number in range(4):
            optimizer.zero_grad()
            model(X).sum().backward()
            if number == 1 and place == "between":
                change(model)
            loss = model(BAD if number == 3 else X).sum()
            if number == 1 and place == "behind":
                change(model)
            loss.backward()
            if number == 1 and place == "judged":
                change(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            if number == 2:
                before = everything(model)
            optimizer.step()
        assert guard.last_step_skipped and guard.num_skipped == 1
        assert_same(model[1].running_mean, before["1.running_mean"])
        assert guard.last_report.notes == []


@pytest.mark.parametrize("change", [cast, assigned])
def test_a_skip_leaves_what_other_code_has_replaced(change, as_kept):
    model = norm_net()
    optimizer, guard = watched(model, explain=False)
    with guard:
        step(model, optimizer)
        model(BAD).sum().backward()
        change(model)
        own = [*model.parameters(), *model.buffers()]
        optimizer.step()
        assert guard.last_step_skipped
        now = [*model.parameters(), *model.buffers()]
        assert all(a is b for a, b in zip(own, now, strict=True))
        as_kept(guard.last_report.notes)
