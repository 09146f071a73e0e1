"""Which ranks decide together: all that process groups connect, and no other."""

import functools
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from guarding import INF, train_step
from ranks import device
from sharded_models import data, ddp, fsdp2, logged, make, sgd, tensor_parallel
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.ranks.peers import num_passes
from overflow_fast.guard.watching.judged_tensors import JudgedTensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.filterwarnings("ignore"),
]
BAD_RANK = 3


def grid(*names):
    return dist.device_mesh.init_device_mesh(
        device().type, (2, 2), mesh_dim_names=names
    )


def group_of(*several):
    """The group out of several that this rank is in; all ranks make all of them."""
    groups = [(members, dist.new_group(members)) for members in several]
    return next(group for members, group in groups if dist.get_rank() in members)


def ddp_in(group):
    return nn.parallel.DistributedDataParallel(make(), process_group=group)


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def weights_of(models):
    return [local(p).clone() for model in models for p in model.parameters()]


def one_bad(models, make_optimizer=None, policy="skip", bad_rank=BAD_RANK, **arguments):
    """A clean step, one that is bad on a rank that alone sees it, and a clean one.

    Returns how many steps were skipped, whether each changed the weights, the report
    and what was logged at a step.
    """
    parameters = [p for model in models for p in model.parameters()]
    make_optimizer = make_optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    optimizer = make_optimizer(parameters)
    changed = []
    with (
        logged() as messages,
        OverflowGuard(models, optimizer, policy, **arguments) as guard,
    ):
        for step, batch in enumerate(data(3)):
            before = weights_of(models)
            for model in models:
                model(batch[0], y=batch[1])["loss"].backward()
            if step == 1 and dist.get_rank() == bad_rank:
                guard.record(seen_here_alone=torch.tensor(INF))
            try:
                optimizer.step()
            except NonFiniteError:
                changed.append("raised")
            optimizer.zero_grad()
            changed.append(
                any(map(torch.ne, map(sum_of, before), map(sum_of, weights_of(models))))
            )
    return {
        "skipped": guard.num_skipped,
        "changed": changed,
        "where": guard.last_report and guard.last_report.where,
        "logged": [
            text for text in messages if " decide" in text and "Step " not in text
        ],
        "failures": guard.coverage().failures,
        "weights": weights_of(models),
    }


def sum_of(tensor):
    return tensor.double().sum()


def plain(**arguments):
    return one_bad([make()], **arguments)


def failing():
    """The guard of the first rank fails in each step, before it has looked."""
    if dist.get_rank() > 0:
        return plain(process_group=dist.group.WORLD)
    with mock.patch.object(JudgedTensors, "scan", side_effect=KeyError("a bug")):
        return plain(process_group=dist.group.WORLD)


def ddp_over_tensor_parallel():
    mesh = grid("dp", "tp")
    model = tensor_parallel(make(), mesh["tp"])
    return one_bad([nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])])


def models_in_two_groups():
    rows, columns = group_of([0, 1], [2, 3]), group_of([0, 2], [1, 3])
    return one_bad([ddp_in(rows), ddp_in(columns)])


def chained(bad_rank):
    """0 - 1 - 2, and 3 alone: ranks 0 and 2 share no group."""
    pairs = [(pair, dist.new_group(pair)) for pair in ([0, 1], [1, 2])]
    own = [group for pair, group in pairs if dist.get_rank() in pair]
    models = [ddp_in(group) for group in own] or [make()]
    return one_bad(models, bad_rank=bad_rank)


def stages(**arguments):
    """Two stages of a pipeline, each sharded over two ranks."""
    return one_bad([fsdp2(make(), grid("pp", "dp")["dp"])], **arguments)


def replicated():
    from torch.distributed._composable.replicate import replicate

    return one_bad([replicate(make())])


def replicated_by_fsdp():
    from torch.distributed._composable.replicate_with_fsdp import replicate

    kind, names = device().type, ("ranks",)  # which torch 2.10 cannot do without
    mesh = dist.device_mesh.init_device_mesh(kind, (4,), mesh_dim_names=names)
    return one_bad([replicate(make(), mesh=mesh)])


def zero(parameters):
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


def judged_between_forward_and_backward():
    """The root's parameters are whole then; nothing but FSDP knows of the mesh."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make())
    with OverflowGuard(model) as guard:
        loss = model(data()[0][0], y=data()[0][1])["loss"]
        if dist.get_rank() == BAD_RANK:
            guard.record(seen_here_alone=torch.tensor(INF))
        try:
            guard.check()
        except NonFiniteError as error:
            return str(error)
        loss.backward()
    return None


def joined(policy="skip", bad_step=None):
    """Ranks run out of batches; rank 3 has one step alone, which may be bad."""
    model = ddp(make())
    optimizer = zero(model.parameters())
    guard = OverflowGuard(model, optimizer, policy, process_group=dist.group.WORLD)
    message = None
    try:
        with Join([model, optimizer]):
            for step, batch in enumerate(data(1 + dist.get_rank())):
                loss = model(batch[0], y=batch[1])["loss"]
                loss.backward()
                if step == bad_step and dist.get_rank() == BAD_RANK:
                    guard.record(seen_here_alone=torch.tensor(INF))
                optimizer.step()
                optimizer.zero_grad()
    except (NonFiniteError, ValueError) as error:
        message = str(error)
    guard.remove()
    return {
        "steps": guard.step,
        "skipped": guard.num_skipped,
        "failures": guard.coverage().failures,
        "message": message,
        "weights": weights_of([model]),
    }


def accumulated():
    model = ddp(make())
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer, "skip")
    x, y = data()[0]
    with model.no_sync():
        is_bad = dist.get_rank() == BAD_RANK
        model(x * INF if is_bad else x, y=y)["loss"].backward()
    model(x, y=y)["loss"].backward()
    optimizer.step()
    return guard.num_skipped, guard.last_report.where


def with_closures(make_optimizer):
    model = ddp(make())
    optimizer = make_optimizer(model.parameters())
    guard = OverflowGuard(model, optimizer, "skip")
    x, y = data()[0]

    def closure():
        optimizer.zero_grad()
        loss = model(x, y=y)["loss"]
        loss.backward()
        if dist.get_rank() == BAD_RANK:
            guard.record(seen_here_alone=torch.tensor(INF))
        return loss

    before = weights_of([model])
    optimizer.step(closure)
    is_same = all(map(torch.equal, before, weights_of([model])))
    return guard.num_skipped, is_same, guard.coverage().failures


def two_optimizers():
    """The second optimizer's gradients are bad, on one rank alone."""
    torch.manual_seed(0)
    models = [make(), make()]
    optimizers = [sgd(model) for model in models]
    guard = OverflowGuard(models, optimizers, "skip", process_group=dist.group.WORLD)
    skipped = []
    for step, batch in enumerate(data(3)):
        for model in models:
            model(batch[0], y=batch[1])["loss"].backward()
        if step == 1 and dist.get_rank() == BAD_RANK:
            models[1].head.bias.grad[0] = INF
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(guard.num_skipped > 0)
    return guard.step, skipped, guard.coverage().failures


def compressed(clears):
    """PowerSGD adds what it left out of one step's gradients to the next ones."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    model = ddp(make())
    state = powersgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer, "skip")
    skipped = []
    for step, (x, y) in enumerate(data(6)):
        is_bad = step == 3 and dist.get_rank() == BAD_RANK
        train_step(model, optimizer, (x * INF if is_bad else x, y))
        skipped.append(guard.last_step_skipped)
        if guard.last_step_skipped and clears:
            state.error_dict.clear()
            state.p_memory_dict.clear()
            state.q_memory_dict.clear()
    return skipped


SCENARIOS = {
    "ddp over tp": ddp_over_tensor_parallel,
    "two groups": models_in_two_groups,
    "chain, 0": functools.partial(chained, 0),
    "chain, 2": functools.partial(chained, 2),
    "stages": stages,
    "stages, told": lambda: stages(process_group=dist.group.WORLD),
    "replicate": replicated,
    "replicate, fsdp": replicated_by_fsdp,
    "failing": failing,
    "alone": plain,
    "alone, warn": functools.partial(plain, policy="warn"),
    "alone, told": functools.partial(plain, process_group=False),
    "zero": functools.partial(plain, make_optimizer=zero),
    "zero, raise": functools.partial(plain, make_optimizer=zero, policy="raise"),
    "zero, clean": functools.partial(plain, make_optimizer=zero, bad_rank=None),
    "forward": judged_between_forward_and_backward,
    "accumulated": accumulated,
    "closure": functools.partial(
        with_closures, functools.partial(torch.optim.SGD, lr=0.1)
    ),
    "lbfgs": functools.partial(with_closures, torch.optim.LBFGS),
    "two optimizers": two_optimizers,
    "compressed": functools.partial(compressed, False),
    "compressed, cleared": functools.partial(compressed, True),
    "join": joined,
    "join, skip": functools.partial(joined, "skip", 2),
    "join, raise": functools.partial(joined, "raise", 2),
}


all_of = functools.partial(ranks.all_of, "test_groups")


TOGETHER = {"skipped": 1, "changed": [True, False, True], "failures": 0, "logged": []}


@pytest.mark.parametrize(
    "scenario",
    [
        *("ddp over tp", "two groups", "stages, told"),
        *("replicate", "replicate, fsdp", "zero"),
    ],
)
def test_all_ranks_that_groups_connect_skip_what_one_has_found(scenario, as_kept):
    for found in all_of(scenario):
        assert {name: found[name] for name in TOGETHER} == TOGETHER
        as_kept(found["where"])


def test_a_rank_whose_guard_fails_decides_with_the_others():
    for rank, found in enumerate(all_of("failing")):
        assert (found["skipped"], found["changed"]) == (1, [True, False, True])
        assert found["failures"] == (3 if rank == 0 else 0)


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_ranks_that_share_no_group_decide_together_through_others(bad_rank, as_kept):
    *connected, alone = all_of(f"chain, {bad_rank}")
    for found in connected:
        assert (found["skipped"], found["failures"]) == (1, 0)
        assert found["changed"] == [True, False, True]
        [line] = found["logged"]
        as_kept(found["where"], line)
    assert (alone["skipped"], alone["failures"]) == (0, 0)


def test_stages_decide_separately_and_say_so(as_kept):
    first, second = all_of("stages")[:2], all_of("stages")[2:]
    assert [found["skipped"] for found in [*first, *second]] == [0, 0, 1, 1]
    for found in [*first, *second]:
        [line] = found["logged"]
        as_kept(line)


def test_a_rank_that_decides_alone_says_so_once(as_kept):
    for rank, found in enumerate(all_of("alone")):
        [line] = found["logged"]
        as_kept(line)
        assert found["skipped"] == 0
        assert ("raised" in found["changed"]) == (rank == BAD_RANK)


@pytest.mark.parametrize("scenario", ["alone, warn", "alone, told"])
def test_nothing_is_said_where_nobody_acts_or_the_user_has_decided(scenario):
    assert [found["logged"] for found in all_of(scenario)] == [[]] * 4


@pytest.mark.explains
def test_sharding_shows_between_forward_and_backward(as_kept):
    first, *others = all_of("forward")
    as_kept(first)
    assert others == [first] * 3


def test_zero_raises_on_all_ranks_before_it_steps():
    for found in all_of("zero, raise"):
        assert found["changed"] == [True, "raised", False, True]


def test_zero_leaves_all_ranks_alike_after_a_skip():
    for scenario in ("zero", "zero, clean"):
        first, *others = [found["weights"] for found in all_of(scenario)]
        for other in others:
            assert all(map(torch.equal, first, other))


def test_a_joined_zero_keeps_nobody_waiting():
    for found in all_of("join"):
        assert (found["steps"], found["skipped"]) == (4, 0)
        assert (found["failures"], found["message"]) == (0, None)


def test_a_joined_zero_skips_on_all_ranks():
    found = all_of("join, skip")
    assert [(each["steps"], each["skipped"]) for each in found] == [(4, 1)] * 4
    for each in found:
        assert all(map(torch.equal, found[0]["weights"], each["weights"]))


@pytest.mark.explains
def test_a_joined_zero_raises_on_all_ranks(as_kept):
    for found in all_of("join, raise"):
        as_kept(found["message"].splitlines()[0])


def test_a_bad_microbatch_of_one_rank_is_skipped_by_all(as_kept):
    for num_skipped, where in all_of("accumulated"):
        assert num_skipped == 1
        as_kept(where)


@pytest.mark.parametrize("scenario", ["closure", "lbfgs"])
def test_ranks_agree_within_closures(scenario):
    assert all_of(scenario) == [(1, True, 0)] * 4


def test_ranks_agree_on_each_of_two_optimizers():
    assert all_of("two optimizers") == [(3, [False, True, True], 0)] * 4


def test_powersgd_is_clean_after_a_skip_if_its_memory_is_cleared():
    """As docs/guides/distributed.md says; else each later step is bad too."""
    assert all_of("compressed") == [[False, False, False, True, True, True]] * 4
    cleared = [False, False, False, True, False, False]
    assert all_of("compressed, cleared") == [cleared] * 4


@pytest.mark.parametrize(
    "groups, passes",
    [
        ([(0, 1, 2)], 1),
        ([(0, 1), (2, 3), (0, 2), (1, 3)], 1),  # a mesh: one after the other dimension
        ([(0, 1), (1, 2)], 2),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], 4),
        ([(0, 4), (1, 4), (2, 4), (3, 4)], 2),
        ([(0, 1, 2, 3), (0, 1), (2, 3)], 1),
    ],
)
def test_passes_reach_all_ranks(groups, passes):
    members = sorted({rank for group in groups for rank in group})
    known = {rank: [g for g in groups if rank in g] for rank in members}
    assert num_passes(known) == passes
    if len(groups) > 1:
        assert num_passes({0: known[0]}) == float("inf")
