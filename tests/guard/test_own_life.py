"""A run's own life: policies, monitors, loggers and hooks do what the program likes."""

import copy
import gc
import logging

import pytest
import torch
from guarding import hooks_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.monitors import Monitor

pytestmark = pytest.mark.explains

BAD = -torch.ones(4, 6)
LIMIT = 5


class Net(nn.Module):
    """Has buffers and a weight that forwards write to; a negative batch makes nan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(3, 6, max_norm=1.0)
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.words.weight.data.mul_(3)

    def forward(self, x):
        words = self.words(torch.tensor([0, 1, 2, 0]))
        scale = torch.log(x.mean(1, keepdim=True))
        return self.norm(self.a(x) + words).tanh() * scale


def good():
    return 1 + torch.rand(4, 6)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()


def make():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


# A policy that runs the model, and one that rolls back.


@pytest.mark.parametrize("watch", [("activations", "gradients"), "tripwire"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_policy_may_run_the_model(model, optimizer, watch, grad):
    asked = []

    def policy(report):
        asked.append(report.step)
        with torch.set_grad_enabled(grad):
            for _ in range(LIMIT):
                model(BAD)
        return "skip"

    with OverflowGuard(model, optimizer, policy, watch=watch) as guard:
        step(model, optimizer, BAD)
        step(model, optimizer, good())
        assert asked == [0]
        assert (guard.num_skipped, guard.last_step_skipped) == (1, False)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_of_the_policy_leaves_what_the_step_began_with(training):
    model, optimizer = make()

    def policy(report):
        model.train(training)
        with torch.no_grad():
            model(BAD)
        model.train()
        return "skip"

    with OverflowGuard(model, optimizer, policy):
        step(model, optimizer, good())
        before = copy.deepcopy(model.state_dict())
        step(model, optimizer, BAD)
    assert same(model.state_dict(), before)


def load(model, saved):
    model.load_state_dict(saved)


def assign(model, saved):
    model.load_state_dict(copy.deepcopy(saved), assign=True)


def write_data(model, saved):
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data.copy_(saved[name])


def replace_data(model, saved):
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = saved[name].clone()


@pytest.mark.parametrize("roll_back", [load, assign, write_data, replace_data])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("clean_steps", [1, 3, 4])
def test_a_policy_that_rolls_back_keeps_what_it_loaded(roll_back, runs, clean_steps):
    model, optimizer = make()
    saved = {}

    def policy(report):
        roll_back(model, saved)
        if runs:
            model(good())
        return "skip"

    with OverflowGuard(model, optimizer, policy):
        saved.update(copy.deepcopy(model.state_dict()))
        for _ in range(clean_steps):
            step(model, optimizer, good())
        model(BAD).mean().backward()
        optimizer.step()
        assert same(model.state_dict(), saved)
        # The next step begins with that.
        optimizer.param_groups[0]["params"] = list(model.parameters())
        step(model, optimizer, BAD)
        assert same(model.state_dict(), saved)


def test_a_policy_that_warns_leaves_what_the_forward_has_written(model, optimizer):
    bare, bare_optimizer = make()
    step(bare, bare_optimizer, BAD)
    with OverflowGuard(model, optimizer, lambda report: "warn"):
        step(model, optimizer, BAD)
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name])


def test_a_monitor_may_run_the_model(model, optimizer):
    class Predicts(Monitor):
        def look(self, step):
            step.models[""](BAD)
            return ()

    with OverflowGuard(model, optimizer, "raise", monitors=[Predicts()]) as guard:
        step(model, optimizer, good())
        step(model, optimizer, good())
        assert guard.last_report is None


# A guard that is switched off from inside of a step.


@pytest.mark.parametrize("how", ["remove", "disable"])
@pytest.mark.parametrize("where", ["policy", "step hook", "monitor", "forward hook"])
def test_a_guard_can_be_switched_off_within_a_step(how, where, tmp_path):
    model, optimizer = make()

    def switch_off(*_):
        getattr(guard, how)()
        assert not guard.enabled

    class SwitchesOff(Monitor):
        def look(self, step):
            switch_off()
            return ()

    def policy(report):
        if where == "policy":
            switch_off()
        return "skip"

    monitors = [SwitchesOff()] if where == "monitor" else []
    log = tmp_path / "run.jsonl"
    guard = OverflowGuard(model, optimizer, policy, monitors=monitors, log=log)
    handles = {
        "step hook": lambda: optimizer.register_step_post_hook(switch_off),
        "forward hook": lambda: model.a.register_forward_hook(switch_off),
    }
    handle = handles[where]() if where in handles else None
    is_bad = where == "policy"
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, BAD if is_bad else good())
    if handle is not None:
        handle.remove()
    assert not guard.enabled
    assert hooks_of(model, optimizer) == 0
    if is_bad:  # what the policy returned is done, and written
        assert same(model.state_dict(), before)
        assert guard.num_skipped == 1
        assert '"action": "skip"' in log.read_text() or '"skip"' in log.read_text()
    step(model, optimizer, good())
    assert hooks_of(model, optimizer) == 0
    guard.enable()
    step(model, optimizer, BAD)
    assert guard.num_skipped == 1 + is_bad or where in ("policy", "monitor")
    guard.remove()
    assert hooks_of(model, optimizer) == 0


def test_a_guard_that_is_switched_off_and_on_by_a_policy_stays_on(model, optimizer):
    def policy(report):
        guard.disable()
        guard.enable()
        return "skip"

    with OverflowGuard(model, optimizer, policy) as guard:
        step(model, optimizer, BAD)
        step(model, optimizer, BAD)
        assert guard.enabled
        assert guard.num_skipped == 2


# Loggers that raise.


class Fails(logging.Handler):
    def emit(self, record):
        raise ValueError("the disk of the log is full")


def fail(*_, **__):
    raise ValueError("the disk of the log is full")


@pytest.fixture(params=["handler", "filter", "factory"])
def failing_log(request, monkeypatch):
    logger, handler = logging.getLogger("overflow_fast"), Fails()
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    if request.param == "handler":
        logger.addHandler(handler)
    elif request.param == "filter":
        logger.addFilter(fail)
    else:
        logging.setLogRecordFactory(fail)
    yield
    logger.removeHandler(handler)
    logger.removeFilter(fail)
    logging.setLogRecordFactory(factory)


@pytest.mark.parametrize("policy", ["skip", "raise", "warn", lambda report: "skip"])
def test_a_log_that_fails_changes_no_decision(model, optimizer, failing_log, policy):
    before = copy.deepcopy(model.state_dict())
    guard = OverflowGuard(model, optimizer, policy)
    if policy == "raise":
        with pytest.raises(NonFiniteError):
            step(model, optimizer, BAD)
    else:
        step(model, optimizer, BAD)
    assert same(model.state_dict(), before) == (policy != "warn")
    guard.remove()
    assert hooks_of(model, optimizer) == 0


# Several guards, and guards that were dropped.


@pytest.mark.parametrize("outer, inner", [(0, 1), (1, 0), (0, None), (None, None)])
def test_a_replay_of_one_guard_is_no_step_of_another(outer, inner):
    pairs = [make(), make()]
    guards = [OverflowGuard(*pair, "skip", explain=True) for pair in pairs]
    skipped = []
    for batch in (good(), BAD, good(), good()):

        def loss(batch=batch):
            return sum(model(batch).mean() for model, _ in pairs)

        for place in (inner, outer):
            if place is not None:
                loss = lambda f=loss, guard=guards[place]: guard.run(f)  # noqa: E731
        loss().backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        skipped.append([guard.last_step_skipped for guard in guards])
    for guard in guards:
        guard.remove()
    assert skipped == [[False] * 2, [True] * 2, [False] * 2, [False] * 2]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Interrupted])
def test_a_constructor_that_is_interrupted_leaves_no_hook(model, optimizer, error):
    class Interrupts(Monitor):
        def begin_step(self, step):
            raise error

    with pytest.raises(error):
        OverflowGuard(model, optimizer, monitors=[Interrupts()])
    assert hooks_of(model, optimizer) == 0


def num_hooks(model):
    return len(model.a._forward_hooks)


def test_guards_that_were_dropped_with_their_optimizers_end():
    model, _ = make()
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        guard = OverflowGuard(model, optimizer, "skip")
        step(model, optimizer, good())
        del guard, optimizer
        gc.collect()
    model(good())
    assert hooks_of(model) == 0


def test_a_dropped_guard_gives_way_to_one_of_the_same_optimizer(model, optimizer):
    for _ in range(3):
        OverflowGuard(model, optimizer, "skip")
    assert num_hooks(model) == 1
    step(model, optimizer, BAD)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_dropped_guard_watches_as_long_as_its_optimizer():
    model, optimizer = make()
    OverflowGuard(model, optimizer, "skip")
    gc.collect()
    step(model, optimizer, good())
    other = torch.optim.SGD(model.parameters(), 0.1)
    with OverflowGuard(model, other, "warn"):
        assert num_hooks(model) == 2
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, BAD)
    assert same(model.state_dict(), before)


def test_a_guard_that_is_held_does_not_give_way():
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, "warn")
    copied = copy.copy(guard)
    del guard
    with OverflowGuard(model, optimizer, "warn"):
        assert num_hooks(model) == 2
    copied.remove()


@pytest.mark.parametrize("watch", [("gradients",), "tripwire", ("activations",)])
@pytest.mark.parametrize("is_bad", [False, True])
def test_a_cell_that_is_run_again_leaves_one_guard(watch, is_bad, caplog):
    model, optimizer = make()
    options = {"watch": watch, "explain": False}
    for _ in range(3):  # the name is bound once the new guard is made
        guard = OverflowGuard(model, optimizer, "skip", **options)
        step(model, optimizer, good())
    assert caplog.text.count("lets go of") == 2
    caplog.clear()
    step(model, optimizer, BAD if is_bad else good())
    assert len(caplog.records) == is_bad == guard.num_skipped
    guard.remove()
    assert hooks_of(model, optimizer) == 0


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_dropped_guard_without_an_optimizer_gives_way_to_one_of_its_model(is_whole):
    model, _ = make()
    guard = OverflowGuard(model, on_overflow="warn", explain=False)
    later = model if is_whole else model.a
    with OverflowGuard(later, on_overflow="warn", explain=False):
        parts = guard._parts
        del guard
        with torch.no_grad():
            model(good())
        assert parts.is_enabled != is_whole


def test_a_guard_that_is_off_judges_no_step_that_a_later_one_skips(model, optimizer):
    first = OverflowGuard(model, optimizer, "skip", explain=False)
    with OverflowGuard(model, optimizer, "skip", explain=False) as second:
        first.remove()
        step(model, optimizer, BAD)
        assert (first.num_skipped, second.num_skipped) == (0, 1)
    assert hooks_of(model, optimizer) == 0
