"""What forwards write to buffers: a skip puts it back, and nothing else."""

import pytest
import torch
from guarding import NAN, assert_same, flat
from torch import nn
from torch.optim import swa_utils

from overflow_fast import NonFiniteError, OverflowGuard

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
BAD = X.clone()
BAD[0, 0] = NAN


def step(model, optimizer, x=X):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def norm_net():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def watched(model, policy="skip", **arguments):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return optimizer, OverflowGuard(model, optimizer, policy, **arguments)


def everything(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


class Stateful(nn.Module):
    """Keeps something of what it sees, by `write(self, x)`."""

    def __init__(self, write, **buffers):
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.write = write
        for name, value in buffers.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        with torch.no_grad():
            self.write(self, x)
        return self.linear(x)


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
LARGE = 20_000  # 80 kB: copied only once it has been seen to change


def kept_of(size, kind):
    kept = torch.zeros(size, 6)
    return nn.Parameter(kept, requires_grad=False) if kind == "parameter" else kept


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("size", [1, LARGE // 6])
@pytest.mark.parametrize("write", WRITES)
def test_whatever_way_it_is_written(write, size, kind, steps_before):
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
            assert "kept could not be put back (it was written" in str(
                guard.last_report
            )
            return
        assert model.kept is tensor
        assert_same(everything(model), before)
        assert "could not be put back" not in str(guard.last_report)


@pytest.mark.parametrize("policy", ["skip", lambda report: "skip"])
def test_running_statistics_of_the_first_step(policy):
    model = norm_net()
    before = everything(model)
    optimizer, guard = watched(model, policy)
    with guard:
        step(model, optimizer, BAD)
    assert_same(everything(model), before)


def test_a_norm_that_is_unfrozen_later():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        model[1].eval()
        for _ in range(3):
            step(model, optimizer)
        model[1].train()
        before = everything(model)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)
        for _ in range(3):
            step(model, optimizer)


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
        before = everything(model)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)


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
        before = everything(model)
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(everything(model), before)


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
        for x in (X, BAD, BAD):
            before = everything(model)
            step(model, optimizer, x)
            if x is BAD:
                assert guard.last_step_skipped
                assert_same(everything(model), before)
        assert guard.num_skipped == 2


def test_buffers_that_are_none_and_become_something():
    def keep(self, x):
        if self.cache is None:
            self.cache = x.mean(0)

    model = Stateful(keep, cache=None)
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer, BAD)
        assert model.cache is None


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
        before = everything(model)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)


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


def test_what_users_write_after_a_skipped_step_survives_the_next_one():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer, BAD)
        model[1].running_mean.add_(1)
        step(model, optimizer, BAD)
        assert guard.num_skipped == 2
        assert_same(model[1].running_mean, torch.ones(4))


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


@pytest.mark.parametrize(
    "arguments", [{"watch": ["gradients"]}, {"budget": 0.5}, {"every": 1, "warmup": 1}]
)
def test_whatever_is_watched(arguments):
    model = norm_net()
    optimizer, guard = watched(model, **arguments)
    with guard:
        for _ in range(3):
            step(model, optimizer)
        before = everything(model)
        step(model, optimizer, BAD)
        if guard.last_step_skipped:
            assert_same(everything(model), before)
        assert guard.last_step_skipped or "budget" in arguments


def test_what_cannot_be_put_back_is_said_and_the_step_is_not_made(monkeypatch):
    from overflow_fast.guard import kept_buffer

    def fail(*_):
        raise NotImplementedError("no such kernel")

    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        weight = model[0].weight.detach().clone()
        monkeypatch.setattr(kept_buffer, "_write", fail)
        monkeypatch.setattr(kept_buffer, "_like", fail)
        step(model, optimizer, BAD)
        assert weight.equal(model[0].weight)
        assert guard.last_step_skipped
    text = str(guard.last_report)
    assert "The buffer 1.running_mean could not be put back" in text
    assert "no such kernel" in flat(text)


def test_large_frozen_parameters_are_not_copied(monkeypatch):
    from overflow_fast.guard import kept_buffer

    monkeypatch.setattr(kept_buffer, "_MAX_FROZEN", 2**16)
    frozen = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
    model = Stateful(lambda self, x: None, kept=frozen)
    optimizer, guard = watched(model)
    with guard:
        for _ in range(3):
            step(model, optimizer)
        points = guard._loop._judge.buffers._points
        assert all(k.copy is None for p in points for k in p._known.values())
        model.write = lambda self, x: self.kept.add_(x.sum())
        step(model, optimizer, BAD)
        assert "frozen parameter kept could not be put back (it is large" in str(
            guard.last_report
        )


def test_functional_calls_leave_the_models_own_buffers_in_place():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        own = model[1].running_mean
        before = everything(model)
        state = {**dict(model.named_parameters()), "1.running_mean": torch.ones(4)}
        optimizer.zero_grad()
        torch.func.functional_call(model, state, (BAD,)).sum().backward()
        optimizer.step()
        assert guard.last_step_skipped
        assert model[1].running_mean is own
        assert_same(model[1].running_mean, before["1.running_mean"])


def test_forwards_in_transforms_and_traces():
    model = norm_net().eval()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        before = everything(model)
        torch.func.vmap(model)(X[:, None])
        traced = torch.jit.trace(model, X)
        assert not any("copy" in str(n) for n in traced.graph.nodes())
        assert_same(everything(model), before)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)


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


def test_optimizers_in_backward_do_not_disturb_autograd():
    model = norm_net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with OverflowGuard(model, list(optimizers.values()), "skip") as guard:
        for x in (X, BAD, X):
            before = everything(model)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            model(x).sum().backward()
            if x is BAD:
                assert_same(everything(model), before)
        assert guard.num_skipped == 1


def test_a_graph_that_is_kept_can_still_be_used():
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    heads = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    with OverflowGuard([body, *heads], optimizers, "skip") as guard:
        hidden = body(X)
        (heads[0](hidden).sum() * NAN).backward(retain_graph=True)
        optimizers[0].step()
        heads[1](hidden).sum().backward()
        optimizers[1].step()
        assert guard.num_skipped == 1


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
    buffers = (
        {
            name: value if value is None else value.clone()
            for name, value in buffers.items()
        }
        if write is not parameter_anew
        else buffers
    )
    model = Stateful(write, **buffers)
    optimizer, guard = watched(model)
    with guard:
        for _ in range(steps_before):
            step(model, optimizer)
        before = everything(model)
        step(model, optimizer, BAD)
        assert guard.last_step_skipped
        assert_same(everything(model), before)
        step(model, optimizer)
        assert not guard.last_step_skipped


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
        before = everything(model)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)


@pytest.mark.parametrize("policy", ["skip", "warn", "raise"])
@pytest.mark.parametrize("make", [torch.jit.script, None])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_in_torchscript(make, policy, caplog):
    part = nn.Linear(4, 1)
    part = torch.jit.trace(part, torch.randn(3, 4)) if make is None else make(part)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), part)
    with caplog.at_level("INFO", "overflow_fast"):
        optimizer, guard = watched(model, policy)
        with guard:
            step(model, optimizer)
            before = everything(model)
            if policy == "raise":
                with pytest.raises(NonFiniteError):
                    step(model, optimizer, BAD)
            else:
                step(model, optimizer, BAD)
            assert guard.last_report is not None
            assert guard.coverage().failures == 0
            if policy == "skip":
                assert_same(everything(model), before)


def test_a_policy_that_never_skips_copies_nothing():
    model = norm_net()
    for policy in ("warn", "raise"):
        optimizer, guard = watched(model, policy)
        with guard:
            step(model, optimizer)
            assert guard._loop._judge.buffers is None
