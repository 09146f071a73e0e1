"""What the guard does about a bad step, and that it changes nothing else."""

import enum
import logging
import sys
from contextlib import nullcontext

import pytest
import torch
from guarding import (
    INF,
    NAN,
    assert_same,
    batches,
    make,
    plant,
    state_of,
    train,
    train_step,
)
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

# Each optimizer of torch is tried in test_skip.py.
OPTIMIZERS = {"AdamW": {}, "Adam, fused": {"fused": True}, "SGD": {"momentum": 0.9}}


def optimizer_of(name, model):
    kind = getattr(torch.optim, name.partition(",")[0])
    return kind(model.parameters(), lr=1e-3, **OPTIMIZERS[name])


def spoil_gradient(model):
    model.head.weight.grad[0, 2] = NAN


def step_with_bad_gradient(model, optimizer, batch, closure=False):
    def compute():
        optimizer.zero_grad()
        loss = model(batch[0], y=batch[1])["loss"]
        loss.backward()
        spoil_gradient(model)
        return loss

    if closure:
        return optimizer.step(compute)
    compute()
    return optimizer.step()


@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_never_happened(model, name, closure):
    data = batches(4)
    optimizer = optimizer_of(name, model)
    with OverflowGuard(model, optimizer, "skip") as guard:
        train(model, optimizer, data[:2])
        before = state_of(model, optimizer)
        step_with_bad_gradient(model, optimizer, data[2], closure)
        assert_same(state_of(model, optimizer), before)
        assert guard.last_step_skipped
        assert guard.num_skipped == 1
        optimizer.zero_grad()
        losses = train(model, optimizer, data[3:])
        assert not guard.last_step_skipped
    after = state_of(model, optimizer)

    other, _ = make()
    same = optimizer_of(name, other)
    train(other, same, data[:2])
    assert_same(train(other, same, data[3:]), losses)
    assert_same(state_of(other, same), after)


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_clean_run_is_the_same_in_every_bit(name, policy):
    results = []
    for guarded in (False, True):
        model, _ = make()
        optimizer = optimizer_of(name, model)
        guard = OverflowGuard(model, optimizer, policy) if guarded else None
        losses = train(model, optimizer, batches(6))
        results.append([losses, state_of(model, optimizer), torch.rand(3)])
        if guard is not None:
            guard.remove()
    assert_same(*results)


def test_raise_comes_before_a_weight_is_touched(model, optimizer):
    with OverflowGuard(model, optimizer), pytest.raises(NonFiniteError) as raised:
        before = state_of(model, optimizer)
        step_with_bad_gradient(model, optimizer, batches(1)[0])
    after = state_of(model, optimizer)
    assert_same(after["model"]["head.weight"], before["model"]["head.weight"])
    assert raised.value.report.action == "raise"
    assert isinstance(raised.value, FloatingPointError)


def test_warn_lets_the_step_happen(model, optimizer, caplog):
    with OverflowGuard(model, optimizer, "warn") as guard:
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            step_with_bad_gradient(model, optimizer, batches(1)[0])
    assert guard.last_report.action == "warn"
    assert not guard.last_step_skipped
    assert model.head.weight.isnan().any()
    assert guard.last_report.headline() in caplog.text


def test_a_run_that_stays_bad_is_not_noisy(model, optimizer, caplog, as_kept):
    with OverflowGuard(model, optimizer, "warn"):
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            for batch in batches(20):
                step_with_bad_gradient(model, optimizer, batch)
        assert len(caplog.records) == 5  # the 1st, 2nd, 4th, 8th and 16th
        as_kept(caplog.records[-1].message)


@pytest.mark.parametrize("policy", ["warn", "skip"])
@pytest.mark.parametrize("kind", ["weight", "optimizer_state"])
def test_a_state_that_stays_bad_is_a_fact_and_asks_for_a_checkpoint(
    kind, policy, caplog, as_kept
):
    model, optimizer = make()
    watch = ["weights", "optimizer_state"]
    guard = OverflowGuard(model, optimizer, policy, watch=watch, explain=False)
    train_step(model, optimizer, batches(1)[0])
    state = optimizer.state[model.head.weight]["exp_avg"]
    (model.head.weight.data if kind == "weight" else state)[0] = NAN
    with caplog.at_level(logging.WARNING, "overflow_fast"), guard:
        for batch in batches(2):
            with pytest.raises(NonFiniteError) if policy == "skip" else nullcontext():
                train_step(model, optimizer, batch)
            assert guard.last_report.is_beyond_repair
            assert guard.last_report.to_dict()["is_beyond_repair"]
    if policy == "warn":
        as_kept(caplog.messages)


@pytest.mark.parametrize("is_in_row", [True, False])
def test_repeated_alarms_of_one_place_are_logged_ever_more_rarely(
    caplog, is_in_row, as_kept
):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip"):
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            for batch in batches(10):
                step_with_bad_gradient(model, optimizer, batch)
                optimizer.zero_grad()
                if not is_in_row:
                    train_step(model, optimizer, batch)
        assert len(caplog.records) == 4  # the 1st, 2nd, 4th and 8th
        as_kept(caplog.messages[-1])
        assert all("head.weight" in record.message for record in caplog.records)


@pytest.mark.parametrize("answer", ["raise", "warn", "skip"])
def test_a_callable_gets_the_report_and_decides(model, optimizer, answer):
    reports = []

    def decide(report):
        reports.append(report)
        return answer

    before = model.head.bias.detach().clone()
    with OverflowGuard(model, optimizer, decide) as guard:
        if answer == "raise":
            with pytest.raises(NonFiniteError):
                step_with_bad_gradient(model, optimizer, batches(1)[0])
        else:
            step_with_bad_gradient(model, optimizer, batches(1)[0])
    assert guard.last_report is reports[0]
    assert reports[0].action == answer
    assert before.equal(model.head.bias) == (answer in ("raise", "skip"))


WRONG_ANSWERS = [
    (None, TypeError, "None"),
    (True, TypeError, "True"),
    (1, TypeError, "1"),
    ("Skip", ValueError, "'Skip'"),
]


@pytest.mark.parametrize("arguments", [{}, {"sync": "lagged", "_defer": True}])
@pytest.mark.parametrize("answer, error, got", WRONG_ANSWERS)
def test_a_callable_is_told_what_to_return(answer, error, got, arguments, caplog):
    model, optimizer = make()
    before = model.head.bias.detach().clone()
    wanted = f"on_overflow must return 'raise', 'warn' or 'skip', got {got}"
    with OverflowGuard(model, optimizer, lambda report: answer, **arguments) as guard:
        with pytest.raises(error, match=wanted):
            step_with_bad_gradient(model, optimizer, batches(1)[0])
        assert before.equal(model.head.bias)
        assert guard.coverage().failures == 0  # it is no failure of the guard's
    assert "Step 0: " in caplog.text  # the alarm is not lost


def test_a_callable_that_returns_itself_is_told_by_a_check_and_an_evaluation():
    model, optimizer = make()
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, lambda report: report) as guard:
        with plant(model.head, INF):
            with torch.no_grad(), pytest.raises(TypeError, match="got Report"):
                model(x, y=y)
            model(x, y=y)["loss"].backward()
        with pytest.raises(TypeError, match="got Report"):
            guard.check()


class Choice(str, enum.Enum):
    SKIP = "skip"


@pytest.mark.parametrize("policy", [Choice.SKIP, lambda report: Choice.SKIP])
def test_an_action_may_be_of_an_enum(model, optimizer, policy, tmp_path):
    log = tmp_path / "guard.jsonl"
    with OverflowGuard(model, optimizer, policy, log=log) as guard:
        step_with_bad_gradient(model, optimizer, batches(1)[0])
    assert guard.num_skipped == 1
    assert guard.last_report.action == Choice.SKIP
    assert not guard.last_report.is_beyond_repair
    assert '"action": "skip"' in log.read_text()


def test_gradients_add_up_before_they_are_judged(model, optimizer):
    data = batches(4)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i, (x, y) in enumerate(data):
            with plant(model.blocks[0], INF) if i == 1 else torch.enable_grad():
                model(x, y=y)["loss"].backward()
        before = model.blocks[0].fc1.weight.detach().clone()
        optimizer.step()
    assert guard.num_skipped == 1
    assert guard.last_report.verdict.batch == 1
    assert guard.last_report.verdict.origin.maker == "blocks.0"
    assert before.equal(model.blocks[0].fc1.weight)


def test_an_optimizer_that_steps_more_often_makes_the_rounds(model):
    model.eval()
    parts = [list(model.blocks.parameters()), list(model.head.parameters())]
    often, seldom = (torch.optim.SGD(part, lr=0.1) for part in parts)
    with OverflowGuard(model, [often, seldom], "warn") as guard:
        for i, (x, y) in enumerate(batches(6)):
            with plant(model.blocks[0], INF) if i == 3 else torch.enable_grad():
                model(x, y=y)["loss"]
            often.step()
            if i % 2:
                seldom.step()
    assert guard.last_report.step == 3
    assert guard.step == 6


def test_several_models_have_their_names():
    models = {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    with OverflowGuard(models, optimizers, "warn") as guard:
        with plant(models["critic"], INF):
            models["critic"](models["generator"](torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert guard.last_report.verdict.origin.maker == "critic"
    listed = [nn.Linear(2, 2), nn.Linear(2, 1)]
    with OverflowGuard(listed, on_overflow="warn") as guard:
        with plant(listed[1], INF):
            listed[1](listed[0](torch.ones(1, 2)))
        assert guard.check().verdict.origin.maker == "1"


def test_frozen_unused_and_unset_gradients_are_fine(model):
    model.unused = nn.Linear(3, 3)
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        for set_to_none in (True, False):
            for x, y in batches(2):
                model(x, y=y)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    assert guard.coverage().without_gradient == 2


def test_parameters_of_no_watched_model_are_judged(model):
    stranger = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        stranger.grad = torch.tensor([1.0, INF])
        optimizer.step()
    assert guard.last_report.verdict.first.fqn == "param_groups[0]['params'][16]"
    assert stranger.tolist() == [1, 1]


def test_modules_that_come_later_have_their_names(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        train_step(model, optimizer, batches(1)[0])
        model.late = nn.Linear(2, 2)
        optimizer.add_param_group({"params": list(model.late.parameters())})
        model.late.bias.grad = torch.tensor([INF, 0])
        optimizer.step()
    assert guard.last_report.verdict.first.fqn == "late.bias"


def test_sparse_gradients_are_judged():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with OverflowGuard(model, optimizer, "skip") as guard:
        before = model.weight.detach().clone()
        (model(torch.tensor([1, 3])) * INF).sum().backward()
        optimizer.step()
    assert guard.num_skipped == 1
    assert before.equal(model.weight)


def test_a_closure_that_raises_is_the_users(model, optimizer):
    def compute():
        raise KeyError("mine")

    with OverflowGuard(model, optimizer, "skip"):
        with pytest.raises(KeyError, match="mine"):
            optimizer.step(compute)
        train(model, optimizer, batches(1))


def raising(report):
    raise KeyError("the pager is down")


@pytest.mark.parametrize("policy", [raising, lambda report: None])
@pytest.mark.parametrize("where", ["loop", "run", "update", "hook", "evaluation"])
def test_a_policy_that_fails_is_asked_once_and_leaves_the_step_unmade(policy, where):
    model, asked = nn.Linear(2, 1), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def own(report):
        asked.append(report)
        return policy(report)

    def step(factor):
        optimizer.zero_grad()
        if where == "evaluation":
            with torch.no_grad():
                return model(torch.full((1, 2), factor))
        (model(torch.ones(1, 2)).sum() * factor).backward()
        return optimizer.step()

    with OverflowGuard(model, optimizer, own, explain=False) as guard:
        step(1.0)
        before = state_of(model, optimizer)
        number = guard.step
        factor = 1e30 if where == "update" else NAN
        with pytest.raises((KeyError, TypeError)) as raised:
            guard.run(lambda: step(factor)) if where == "run" else step(factor)
        if where == "hook":
            sys.excepthook(raised.type, raised.value, None)
        assert len(asked) == 1 == guard.metrics()["bad_steps_total"]
        report = guard.last_report
        assert report is asked[0] and report.action == "raise" and not report.raised
        assert not getattr(raised.value, "__notes__", None)
        assert_same(state_of(model, optimizer), before)
        assert guard.step == number + (where != "evaluation")
        if where != "evaluation":
            step(1.0)
            assert len(asked) == 1 and guard.step == number + 2


class Interrupted(logging.Handler):
    def emit(self, record):
        raise self.kind


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["step", "block"])
def test_a_handler_that_is_interrupted_leaves_nothing_behind(where, kind):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler, log = Interrupted(), logging.getLogger("overflow_fast")
    handler.kind = kind
    log.addHandler(handler)
    try:
        with (
            pytest.raises(kind),
            OverflowGuard(model, optimizer, "warn", explain=False),
        ):
            (model(torch.ones(1, 2)).sum() * NAN).backward()
            if where == "block":
                raise ValueError("own")
            if where == "step":
                optimizer.step()
    finally:
        log.removeHandler(handler)
    assert "step" not in vars(optimizer) and not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    "clears", ["before the forward", "behind the forward", "in the handler"]
)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_batch_that_the_loop_gives_up_is_no_part_of_the_next_step(policy, clears):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, policy, explain=False) as guard:
        for factor in (1.0, NAN, 1.0, 1.0):
            if clears == "before the forward":
                optimizer.zero_grad()
            try:
                loss = model(torch.ones(3, 2)).sum() * factor
                if clears == "behind the forward":
                    optimizer.zero_grad()
                loss.backward()
                if not loss.isfinite():
                    raise FloatingPointError("own")
                optimizer.step()
            except NonFiniteError:
                raise
            except FloatingPointError:
                pass
            if clears == "in the handler":
                optimizer.zero_grad()
        assert guard.num_skipped == 0 and guard.last_report is None
        assert guard.step == 3


@pytest.mark.parametrize("order", ["accumulates", "one backward", "bad again"])
def test_what_the_loop_keeps_is_judged(order):
    """Gradients that add up; two forwards with one backward; a later bad batch."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(factor):
        return model(torch.full((3, 2), factor)).sum()

    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        if order == "one backward":
            both = loss(NAN), loss(1.0)
            both[1].backward()  # which does not tell that the first is given up
        elif order == "accumulates":
            loss(NAN).backward()
            loss(1.0).backward()
        else:
            loss(NAN).backward()
            optimizer.zero_grad()
            loss(NAN).backward()
        optimizer.step()
        assert guard.num_skipped == 1
