"""Ranks that train together act on one verdict."""

import contextlib
import functools
import io
import itertools
import json
import logging
import tempfile
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import INF, plant, state_of, train_step
from ranks import device
from sharded_models import data, ddp, fsdp2, logged, make, sgd, sharded_in_two_ways
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

# How ranks replay together is in test_replay_ranks.py.
Unexplained = functools.partial(OverflowGuard, explain=False)


def train_one(model, optimizer, batch):
    """The message of what a step raised, or None."""
    try:
        train_step(model, optimizer, batch)
    except NonFiniteError as error:
        return str(error)
    return None


class Masked(Assembled):
    """A branch that overflows and reaches no loss: no gradient tells of it."""

    def forward(self, x, y=None):
        side = self.side(x) * (INF if self.is_bad else 1.0)
        side = torch.where(torch.zeros_like(side, dtype=torch.bool), side, 0.0)
        out = self.head(x + nn.functional.relu(side).detach())
        return {
            "loss": ((out - y) ** 2).mean()
            + 0 * (self.side.weight.sum() + self.side.bias.sum())
        }


# What runs on each rank.


def one_rank_raises():
    model = ddp(make())
    optimizer = sgd(model)
    OverflowGuard(model, optimizer)
    if dist.get_rank() == 2:
        plant(model.module.blocks[1].fc1, INF).__enter__()
    return train_one(model, optimizer, data()[0])


def one_rank_skips():
    torch.manual_seed(0)
    inner = Masked(head=nn.Linear(8, 1), side=nn.Linear(8, 8), is_bad=False).to(
        device()
    )
    inner.side.register_forward_hook(
        lambda module, args, out: out * (INF if inner.is_bad else 1.0)
    )
    model = ddp(inner)
    optimizer = sgd(model)
    guard = Unexplained(model, optimizer, "skip")
    train_step(model, optimizer, data()[0])
    before = state_of(model)
    inner.is_bad = dist.get_rank() == 1
    train_step(model, optimizer, data()[0])
    is_same = all(torch.equal(a, b) for a, b in pairs(before["model"], model))
    return guard.num_skipped, is_same, guard.last_report.where


def pairs(state, model):
    return [(state[name], tensor) for name, tensor in model.state_dict().items()]


def two_ranks_are_bad():
    """Rank 3 earlier in its step than rank 1, and after more calls in its run."""
    model = ddp(make())
    optimizer = sgd(model)
    Unexplained(model, optimizer)
    rank = dist.get_rank()
    if rank == 3:
        with torch.no_grad():
            model.module(data()[0][0], y=data()[0][1])
    train_step(model, optimizer, data()[0])
    if rank in (1, 3):
        plant(model.module.blocks[0 if rank == 3 else 2].fc1, INF).__enter__()
    return train_one(model, optimizer, data()[0])


def what_a_clean_step_costs():
    sent = []
    original = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    model = ddp(make())
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer):
        dist.all_reduce = counted
        for batch in data(3):
            train_step(model, optimizer, batch)
        dist.all_reduce = original
    return sent


def sharded(wrap, **arguments):
    model = wrap(make())
    optimizer = sgd(model)
    Unexplained(model, optimizer, **arguments)
    if dist.get_rank() == 3:
        plant(model.blocks[2].act, INF).__enter__()
    return train_one(model, optimizer, data()[0])


def a_mesh():
    mesh = dist.device_mesh.init_device_mesh(device().type, (2, 2))
    return plain_with(mesh)


def a_group():
    return plain_with(dist.group.WORLD)


def plain_with(group):
    """Models that nothing wraps, and a group that is given."""
    model = make()
    optimizer = sgd(model)
    Unexplained(model, optimizer, process_group=group)
    if dist.get_rank() == 1:
        plant(model.blocks[0].fc2, INF).__enter__()
    return train_one(model, optimizer, data()[0])


def lagged():
    model = make()
    optimizer = sgd(model)
    guard = OverflowGuard(
        model, optimizer, process_group=dist.group.WORLD, sync="lagged", _defer=True
    )
    messages = []
    for step in range(3):
        if dist.get_rank() == 3 and step == 1:
            with plant(model.head, INF):
                messages.append(train_one(model, optimizer, data()[0]))
        else:
            messages.append(train_one(model, optimizer, data()[0]))
    try:
        guard.remove()
    except NonFiniteError as error:
        messages.append(str(error))
    return [message and message[:60] for message in messages]


def different_steps():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(str(record.exc_info[1]))
    logging.getLogger("overflow_fast").addHandler(handler)
    model = ddp(make())
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    guard._parts.clock.step = dist.get_rank()
    train_step(model, optimizer, data()[0])
    logging.getLogger("overflow_fast").removeHandler(handler)
    return messages, guard.coverage().failures


def a_callable():
    asked = []

    def policy(report):
        asked.append(report)
        return "skip"

    model = ddp(make())
    optimizer = sgd(model)
    guard = Unexplained(model, optimizer, policy)
    if dist.get_rank() == 0:
        plant(model.module.head, INF).__enter__()
    train_step(model, optimizer, data()[0])
    return len(asked), guard.num_skipped


def only_gradients_are_bad():
    """All ranks see bad gradients; the one whose backward made them is to blame."""
    model = ddp(make())
    optimizer = sgd(model)
    OverflowGuard(model, optimizer)
    if dist.get_rank() == 2:
        plant(model.module.blocks[1].fc1, INF, backward=True).__enter__()
    return train_one(model, optimizer, data()[0])


def batches_that_run_out():
    model = ddp(make())
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer) as guard, model.join():
        for batch in data(2 + dist.get_rank()):
            train_step(model, optimizer, batch)
    return guard.step, guard.coverage().failures


def join_without_the_guard():
    model = ddp(make())
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer), logged() as messages, model.join():
        for batch in data(1 + dist.get_rank()):
            train_step(model, optimizer, batch)
    return messages


class Shallow(Assembled):
    """One rank leaves its second layer out in every other step."""

    def forward(self, x, y=None):
        self.calls += 1
        x = self.first(x)
        if dist.get_rank() != 1 or self.calls % 2:
            x = self.second(x)
        return {"loss": ((self.head(x) - y) ** 2).mean()}


def one_rank_skips_a_layer():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        Shallow(
            first=nn.Linear(8, 8), second=nn.Linear(8, 8), head=nn.Linear(8, 1), calls=0
        ).to(device()),
        find_unused_parameters=True,
    )
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    messages = [train_one(model, optimizer, batch) for batch in data(4)]
    if dist.get_rank() == 2:
        plant(model.module.second, INF).__enter__()
    messages.append(train_one(model, optimizer, data()[0]))
    return guard.step, messages


def bad_state(joint):
    model = ddp(make())
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    messages = []
    for _ in range(2):
        try:
            guard.assert_finite_state(joint=joint)
            messages.append(None)
        except NonFiniteError as error:
            messages.append(str(error))
        if dist.get_rank() == 3:
            model.module.blocks[0].fc1.weight.data[0] = INF
    return messages


def bad_state_where_it_warns(wrap):
    """The policy is to warn, and nobody says what shares the model."""
    model = wrap(make())
    guard = OverflowGuard(model, sgd(model), "warn")
    if dist.get_rank() == 1:
        getattr(model, "module", model).head.weight.data[0] = INF
    try:
        guard.assert_finite_state(joint=True)
    except NonFiniteError as error:
        return str(error)
    return None


def tried_with_a_bad_batch():
    model = ddp(make())
    guard = OverflowGuard(model, sgd(model))
    x, y = data()[0]
    if dist.get_rank() == 1:
        x = x * INF
    with contextlib.redirect_stdout(io.StringIO()) as out:
        guard.self_test({"x": x, "y": y}, max_layers=2)
    return out.getvalue()


def a_policy_that_raises(report):
    raise KeyError("no such host")


def a_policy_without_an_answer(report):
    return None


def a_callable_that_fails(policy):
    model = ddp(make())
    optimizer = sgd(model)
    Unexplained(model, optimizer, policy)
    if dist.get_rank() == 2:
        plant(model.module.head, INF).__enter__()
    try:
        train_step(model, optimizer, data()[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def tried():
    model = ddp(make())
    guard = OverflowGuard(model, sgd(model))
    x, y = data()[0]
    with contextlib.redirect_stdout(io.StringIO()):
        return guard.self_test({"x": x, "y": y}, max_layers=4).has_passed


def paths():
    """What each rank writes to one folder."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    model = ddp(make())
    optimizer = sgd(model)
    arguments = {"log": folder / "guard.jsonl", "evidence": folder / "evidence"}
    with Unexplained(model, optimizer, "skip", **arguments):
        with plant(model.module.head, INF):
            train_step(model, optimizer, data()[0])
    dist.barrier()
    headers = [
        json.loads(path.read_text().partition("\n")[0])
        for path in sorted(folder.glob("*.jsonl"))
    ]
    runs = [path.name for path in folder.glob("evidence/overflow_fast/*")]
    return [path.name for path in sorted(folder.glob("*.jsonl"))], headers, runs


SCENARIOS = {
    "join alone": join_without_the_guard,
    "a layer": one_rank_skips_a_layer,
    "state": functools.partial(bad_state, True),
    "own state": functools.partial(bad_state, False),
    "tried": tried,
    "paths": paths,
    "state, warn": functools.partial(bad_state_where_it_warns, ddp),
    "state, alone": functools.partial(bad_state_where_it_warns, lambda model: model),
    "tried, bad": tried_with_a_bad_batch,
    "raising": functools.partial(a_callable_that_fails, a_policy_that_raises),
    "no answer": functools.partial(a_callable_that_fails, a_policy_without_an_answer),
    "raise": one_rank_raises,
    "skip": one_rank_skips,
    "two": two_ranks_are_bad,
    "cost": what_a_clean_step_costs,
    "fsdp2": functools.partial(sharded, fsdp2),
    "fsdp2 and tp": functools.partial(sharded, sharded_in_two_ways),
    "switched off": functools.partial(sharded, fsdp2, process_group=False),
    "mesh": a_mesh,
    "group": a_group,
    "no group": functools.partial(plain_with, None),
    "lagged": lagged,
    "steps": different_steps,
    "callable": a_callable,
    "gradients": only_gradients_are_bad,
    "join": batches_that_run_out,
}


all_of = functools.partial(ranks.all_of, "test_agreement")


@pytest.mark.parametrize(
    "scenario", ["raise", "two", "fsdp2", "fsdp2 and tp", "mesh", "group", "gradients"]
)
def test_all_ranks_raise_what_one_has_found(scenario, as_kept):
    first, *others = all_of(scenario)
    as_kept(first.splitlines()[0])
    assert all(other == first for other in others)


def test_all_ranks_skip_what_no_gradient_tells_of(as_kept):
    for num_skipped, is_same, where in all_of("skip"):
        assert (num_skipped, is_same) == (1, True)
        as_kept(where)


def device_type():
    return "cuda" if ranks.backend() == "nccl" else "cpu"


def test_a_clean_step_costs_one_collective_of_64_bytes():
    assert all_of("cost") == [[64] * 3] * 4


def test_without_a_group_each_rank_decides_for_itself():
    for scenario, rank in (("no group", 1), ("switched off", 3)):
        messages = all_of(scenario)
        assert messages[rank]
        assert " on rank " not in messages[rank]
    assert [bool(message) for message in all_of("no group")] == [
        False,
        True,
        False,
        False,
    ]


def test_lagged_verdicts_are_agreed_on_in_the_same_step(as_kept):
    first, *others = all_of("lagged")
    assert [bool(message) for message in first] == [False, False, True], first
    as_kept(first[2])
    assert all(other == first for other in others)


def test_ranks_at_different_steps_are_told_of(as_kept):
    for messages, failures in all_of("steps"):
        assert failures == 1
        as_kept(messages[0])


def test_a_rank_that_runs_out_of_batches_keeps_nobody_waiting():
    assert all_of("join") == [(2, 0), (3, 0), (4, 0), (5, 0)]


def test_join_without_the_guard_is_told_of(as_kept):
    for messages in all_of("join alone"):
        assert len(messages) == 1
        as_kept(messages[0])


def test_a_rank_that_leaves_a_layer_out_waits_for_nobody(as_kept):
    for step, messages in all_of("a layer"):
        assert messages[:4] == [None] * 4
        as_kept(messages[4].splitlines()[0])
        assert step == 5


def test_all_ranks_refuse_a_state_that_is_bad_on_one(as_kept):
    first, *others = all_of("state")
    assert first[0] is None
    as_kept(first[1].splitlines()[0])
    assert all(other == first for other in others)


def test_a_state_may_be_asked_for_on_one_rank():
    assert [bool(messages[1]) for messages in all_of("own state")] == [
        *(False, False, False, True)
    ]


@pytest.mark.parametrize("scenario", ["state, warn", "state, alone"])
def test_a_joint_state_is_joint_whatever_the_policy(scenario, as_kept):
    first, *others = all_of(scenario)
    as_kept(first.splitlines()[0])
    assert all(other == first for other in others)


def test_no_rank_plants_faults_where_one_has_a_bad_batch():
    texts = all_of("tried, bad")
    assert all(text.startswith("Nothing was planted: input[0] of") for text in texts)


@pytest.mark.parametrize(
    "what, error",
    [
        ("raising", "KeyError: 'no such host'"),
        (
            "no answer",
            "TypeError: on_overflow must return 'raise', 'warn' or 'skip', got None",
        ),
    ],
)
def test_a_callable_that_fails_keeps_nobody_waiting(what, error):
    found = all_of(what)
    assert found[2] == error
    others = [text for rank, text in enumerate(found) if rank != 2]
    assert all(error in text for text in others), others


def test_the_self_test_works_on_ranks():
    assert all_of("tried") == [True] * 4


def test_each_rank_writes_to_files_of_its_own():
    for names, headers, runs in all_of("paths"):
        assert names == [f"guard.rank{rank}.jsonl" for rank in range(4)]
        assert [each["rank"] for each in headers] == [0, 1, 2, 3]
        assert {each["world_size"] for each in headers} == {4}
        assert len({each["run"] for each in headers}) == 4
        # All skip, and the one that was first to see it has the tensors.
        assert runs == [headers[0]["run"]]
        assert "-rank0-" in runs[0]


def test_a_callable_is_asked_on_one_rank():
    assert all_of("callable") == [(1, 1), (0, 1), (0, 1), (0, 1)]


def test_a_group_that_cannot_be_used_is_an_error():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="init_process_group"):
        OverflowGuard(model, process_group=object())
    assert not any(itertools.chain(model._forward_hooks, model._forward_pre_hooks))
