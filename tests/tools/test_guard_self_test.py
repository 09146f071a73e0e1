"""The guard tries itself on the user's own model, and leaves no trace."""

import copy
import dataclasses
import random

import guarding
import numpy as np
import pytest
import torch
from assembled import Assembled
from containers import FEW, Model
from guarding import NAN, Net, assert_same, batches, hooks_of, plant, train, train_step
from torch import nn
from workloads import WORKLOADS

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Schedule

pytestmark = pytest.mark.slow


def everything(model, optimizer):
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "gradients": [
            None if p.grad is None else p.grad.clone() for p in model.parameters()
        ],
        "random": torch.get_rng_state(),
        "training": [module.training for module in model.modules()],
    }


def make(depth=1):
    """A model of few layers: each is tried four times."""
    return guarding.make(depth=depth)


def batch_of():
    x, y = batches(1)[0]
    return {"x": x, "y": y}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_fault_is_caught_and_attributed(name, capsys, as_kept):
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    model, optimizer = workload.model, workload.optimizer
    with OverflowGuard(model, optimizer, allow=workload.allow) as guard:
        result = guard.self_test(
            workload.make_batch(), loss=workload.loss, max_layers=7
        )
    assert result.has_passed, str(result)
    assert sum(fault.is_planted for fault in result.faults) > 24
    out = capsys.readouterr().out
    assert out == f"{result}\n"
    as_kept(out)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_alarm_is_false(name):
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    with OverflowGuard(
        workload.model, workload.optimizer, allow=workload.allow
    ) as guard:
        for _ in range(30):
            workload.step()
    assert guard.metrics()["bad_steps_total"] == 0
    assert guard.coverage().rules_unused == []


def test_everything_is_left_as_it_was(model, optimizer):
    model.head = nn.Sequential(nn.Dropout(), model.head)
    batch = batch_of()
    with OverflowGuard(model, optimizer, log=None) as guard:
        train(model, optimizer, batches(2))
        model(**batch)["loss"].backward()  # gradients that a step waits for
        gradients = [p.grad for p in model.parameters()]
        before, hooks = everything(model, optimizer), hooks_of(model, optimizer)
        told = guard.metrics()
        assert guard.self_test(batch).has_passed
        assert_same(before, everything(model, optimizer))
        assert all(
            p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)
        )
        assert hooks_of(model, optimizer) == hooks
        assert guard.metrics() == told
        assert guard.num_skipped == 0 and guard.last_report is None
        optimizer.step()
        assert guard.step == 3
    assert hooks_of(model, optimizer) == 0


def test_training_goes_on_as_if_there_had_been_no_test():
    losses = []
    for tests in (False, True):
        model, optimizer = make()
        with OverflowGuard(model, optimizer) as guard:
            first = train(model, optimizer, batches(2))
            if tests:
                guard.self_test(batch_of())
            losses.append(first + train(model, optimizer, batches(2, seed=2)))
    assert_same(losses[0], losses[1])


def test_what_it_has_found_is_not_forgotten(model, optimizer):
    with OverflowGuard(model, optimizer) as guard:
        with plant(model.head, NAN):
            model(**batch_of())
        assert guard.self_test(batch_of()).has_passed
        with pytest.raises(NonFiniteError, match=r"of head \(Linear\)"):
            optimizer.step()


def test_it_still_guards_afterwards(model, optimizer):
    with OverflowGuard(model, optimizer, "skip") as guard:
        guard.self_test(batch_of())
        with plant(model.head, NAN):
            train_step(model, optimizer, batches(1)[0])
    assert guard.num_skipped == 1


def test_a_guard_that_is_off_can_be_tried(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    guard.disable()
    assert guard.self_test(batch_of()).has_passed
    assert not guard.enabled
    assert hooks_of(model, optimizer) == 0


def test_what_it_does_not_look_at_is_missed(model, optimizer, as_kept):
    watch = ["activations", "loss"]
    result = OverflowGuard(model, optimizer, watch=watch).self_test(batch_of())
    assert not result.has_passed
    for fault in result.faults:
        assert fault.is_caught == (fault.direction == "forward"), fault
        assert fault.is_attributed == fault.is_caught
    assert "MISSED" in str(result)
    as_kept(result)


def test_a_wrong_blame_is_shown(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer, watch=["gradients"])
    result = guard.self_test(batch_of(), layers=["head"])
    fault = result.faults[2]  # in backward, of which the first parameter tells
    assert fault.is_caught and not fault.is_attributed and not result.has_passed
    as_kept(fault.text)


def test_a_batch_that_is_bad_itself_is_reported(model, optimizer, as_kept):
    batch = batch_of()
    batch["x"][0, 0] = NAN
    result = OverflowGuard(model, optimizer).self_test(batch)
    assert not result.has_passed
    as_kept(result)
    assert result.faults == []


def test_layers_can_be_chosen():
    model, optimizer = make(depth=3)
    guard = OverflowGuard(model, optimizer)
    result = guard.self_test(batch_of(), layers=["blocks.*.act", "head"])
    assert [f.layer for f in result.faults[::4]] == [
        *(f"blocks.{i}.act" for i in range(3)),
        "head",
    ]
    most = guard.self_test(batch_of(), max_layers=3)
    layers = [fault.layer for fault in most.faults[::4]]
    assert layers == ["the model", "blocks.1.act", "head"]
    assert len(guard.self_test(batch_of(), max_layers=1).faults) == 4


def test_layers_that_backward_does_not_reach_are_not_missed(model, optimizer):
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    result = OverflowGuard(model, optimizer).self_test(batch_of())
    texts = {(f.layer, f.direction): f.text for f in result.faults}
    assert texts["blocks.0.fc1", "backward"] == "not reached"
    assert texts["blocks.0.fc1", "forward"] == "caught"
    assert result.has_passed


class Pair(Assembled):
    """Takes positional arguments, returns no loss."""

    def forward(self, x, y):
        return self.a(x), {"b": [self.b(y)]}


def test_batches_come_in_any_form():
    model = Pair(a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    guard = OverflowGuard(model)
    assert guard.self_test([torch.ones(2, 3), torch.ones(2, 3)]).has_passed
    assert guard.self_test((torch.ones(2, 3), torch.ones(2, 3))).has_passed
    assert OverflowGuard(model.a).self_test(torch.ones(2, 3)).has_passed
    both = OverflowGuard({"x": model.a, "y": model.b})
    loss = lambda batch: model(*batch)[0].sum() + model.b(batch[1]).sum()  # noqa: E731
    result = both.self_test((torch.ones(2, 3), torch.ones(2, 3)), loss=loss)
    assert result.has_passed
    assert {fault.layer for fault in result.faults} == {"x", "y"}


@pytest.mark.parametrize(
    "change",
    [
        {"sync": "lagged", "_defer": True},
        {"schedule": Schedule(7, warmup=3)},
        {"evidence": "evidence"},
    ],
    ids=str,
)
def test_it_does_not_depend_on_how_the_guard_is_set(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    assert OverflowGuard(model, optimizer, **change).self_test(batch_of()).has_passed
    assert list(tmp_path.iterdir()) == []


class Copy(nn.Module):
    """Buffers that cannot be written to, and random numbers of three kinds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.zeros(1, 4).expand(3, 4))
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = x + random.random() + float(np.random.rand())
        return self.norm(self.linear(x) + self.wide[0])


def test_all_random_states_and_odd_buffers_are_left_alone():
    model = Copy()
    guard = OverflowGuard(model)
    random.seed(3)
    np.random.seed(3)
    x = torch.randn(5, 4)
    before = copy.deepcopy(model.state_dict())
    assert guard.self_test(x).has_passed
    assert_same(before, model.state_dict())
    expected = random.Random(3).random(), np.random.RandomState(3).rand()
    assert (random.random(), np.random.rand()) == expected


def test_what_a_model_has_done_to_a_buffer_is_undone_when_it_raises():
    class Raises(Assembled):
        def forward(self, x):
            self.a += 1
            self.b = torch.ones(2)
            raise ValueError("no such batch")

    model = Raises(
        a=nn.Buffer(torch.zeros(2)),
        b=nn.Buffer(torch.zeros(2)),
        weight=nn.Parameter(torch.ones(2)),
    )
    own = model.b
    with pytest.raises(ValueError, match="no such batch"):
        OverflowGuard(model).self_test(torch.ones(2))
    assert model.b is own and not model.a.any() and not model.b.any()


def test_a_backward_that_waits_goes_on_where_no_buffer_was_written_to(model, optimizer):
    model.eval()
    with OverflowGuard(model, optimizer) as guard:
        loss = model(**batch_of())["loss"]
        assert guard.self_test(batch_of(), max_layers=3).has_passed
        loss.backward()
        optimizer.step()
    assert guard.step == 1


def test_layers_that_run_without_autograd_are_tried():
    student, teacher = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))

    def loss(x):
        with torch.no_grad():
            target = teacher(x)
        return (student(x) - target).square().mean()

    guard = OverflowGuard([student, teacher])
    result = guard.self_test(torch.ones(2, 3), loss=loss)
    assert result.has_passed, str(result)
    assert "1.0" in {fault.layer for fault in result.faults if fault.is_attributed}


def test_wrappers_have_a_row_of_their_own():
    model = Pair(a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    compiled = torch.compile(model, backend="aot_eager")
    result = OverflowGuard(compiled).self_test((torch.ones(2, 3), torch.ones(2, 3)))
    rows = str(result).splitlines()[1:-1]
    assert 4 * len(rows) == len(result.faults)


def test_compiled_models_are_tried_in_eager_mode(model, optimizer):
    compiled = torch.compile(model, backend="eager")
    with OverflowGuard(compiled, optimizer) as guard:
        x, y = batches(1)[0]
        compiled(x, y=y)
        guard.discard()
        assert guard.self_test(batch_of(), max_layers=4).has_passed
        train_step(compiled, optimizer, (x, y))
        assert guard.step == 1


def test_checkpointed_layers_are_tried():
    class Checkpointed(Net):
        def forward(self, x, y=None):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return {"loss": ((self.head(x) - y) ** 2).mean()}

    model = Checkpointed()
    result = OverflowGuard(model).self_test(batch_of())
    assert result.has_passed, str(result)


def test_an_optimizer_within_backward_makes_no_step(model):
    def double(parameter):
        parameter.data.mul_(2)  # which no version tells of

    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    guard = OverflowGuard(model)
    guard.self_test(batch_of())
    guard.disable()
    assert hooks_of(model) == len(list(model.parameters()))
    assert_same(before, model.state_dict())


def test_an_error_of_the_model_leaves_nothing_behind(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    before = hooks_of(model, optimizer)
    with pytest.raises(TypeError):
        guard.self_test({"z": 1})
    assert hooks_of(model, optimizer) == before
    train(model, optimizer, batches(1))
    assert guard.step == 1


def test_wrong_arguments_are_reported(as_kept):
    def call(arguments):
        model, _ = make()
        OverflowGuard(model).self_test(batch_of(), **arguments)

    as_kept.errors(
        call, [{"loss": 3}, {"layers": "head"}, {"layers": ["tail"]}, {"max_layers": 0}]
    )


def test_a_loss_that_is_no_tensor_is_reported(model, as_kept):
    with pytest.raises(TypeError) as raised:
        OverflowGuard(model).self_test(batch_of(), loss=lambda batch: 3.0)
    as_kept(raised.value)


def test_a_model_that_is_gone_is_reported(as_kept):
    guard = OverflowGuard(make()[0])
    as_kept.error(RuntimeError, guard.self_test, batch_of())
    as_kept.error(RuntimeError, guard.assert_finite_state)


def test_a_model_without_anything_to_sum_needs_a_loss(as_kept):
    class Counter(nn.Module):
        def forward(self, x):
            return {"count": 3}

    with pytest.raises(ValueError) as raised:
        model = Counter()
        OverflowGuard(model).self_test(torch.ones(1))
    as_kept(raised.value)


def test_results_are_data(model):
    result = OverflowGuard(model).self_test(batch_of(), layers=["head"])
    assert dataclasses.asdict(result)["faults"][0] == {
        "layer": "head",
        "class_name": "Linear",
        "direction": "forward",
        "value": "nan",
        "is_planted": True,
        "is_caught": True,
        "found_at": "output of head",
        "is_attributed": True,
    }


@pytest.mark.parametrize("kind", FEW[:3])
def test_faults_are_planted_in_containers(kind):
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        result = guard.self_test(torch.randn(3, 4))
    assert result.has_passed
    assert "block (Block)" in str(result)
