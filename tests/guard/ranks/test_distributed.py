"""Wrapped and sharded models, in a process group of one."""

import pytest
import torch
import torch.distributed as dist
from parity import small_model, spoil
from torch import nn

from overflow_fast import DebugUnderflowOverflow, NonFiniteError, OverflowGuard, scan
from overflow_fast.base.modules import unwrapped_class

DETECTED = "inf/nan detected"


@pytest.fixture(scope="module")
def mesh():
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_is_scanned_in_its_local_part(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.tensor([-3.0, torch.inf]), mesh, [Shard(0)])
    stat = scan([tensor])[0]
    assert (stat.abs_min, stat.abs_max, stat.has_inf) == (3.0, torch.inf, True)


@pytest.mark.parametrize("watch_first", [True, False])
def test_fully_sharded_models(mesh, watch_first):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    detector = DebugUnderflowOverflow(model) if watch_first else None
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    detector = detector or DebugUnderflowOverflow(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert detector.batch_number == 2
    assert "not scanned" not in "".join(detector.frames)
    with pytest.raises(ValueError, match=DETECTED):
        model(torch.full((3, 4), torch.inf))


@pytest.mark.parametrize("watch_first", [True, False])
def test_data_parallel_models(mesh, watch_first):
    model = small_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    watched = model if watch_first else wrapped
    detector = DebugUnderflowOverflow(watched)
    for _ in range(2):
        wrapped(torch.randn(2, 4)).sum().backward()
    assert detector.batch_number == 2
    spoil(model)
    with pytest.raises(ValueError, match=DETECTED):
        wrapped(torch.randn(2, 4))


def test_tensor_parallel_models(mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, mesh, plan)
    detector = DebugUnderflowOverflow(model)
    model(torch.randn(3, 4)).sum().backward()
    assert "weight" in detector.frames[0] and "not scanned" not in detector.frames[0]
    with pytest.raises(ValueError, match=DETECTED):
        model(torch.full((3, 4), torch.inf))


def test_a_sharded_modules_class_is_its_authors(mesh):
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert type(module) is not nn.Linear
    assert unwrapped_class(type(module)) is nn.Linear
    assert unwrapped_class(nn.Linear) is nn.Linear
    model = nn.Sequential(module)
    with DebugUnderflowOverflow(model) as detector:
        model(torch.ones(1, 2))
        assert "0 Linear\n" in detector.frames[0]


def replicated(module, mesh):
    from torch.distributed._composable.replicate import replicate

    return replicate(module)


def replicated_by_fsdp(module, mesh):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh)


@pytest.mark.parametrize("wrap", [replicated, replicated_by_fsdp])
def test_a_replicated_modules_class_is_its_authors(mesh, wrap):
    module = wrap(nn.Linear(2, 2), mesh)
    assert type(module) is not nn.Linear
    assert unwrapped_class(type(module)) is nn.Linear
    model = nn.Sequential(module)
    with DebugUnderflowOverflow(model) as detector:
        model(torch.ones(1, 2)).sum().backward()
        assert "0 Linear\n" in detector.frames[0]


@pytest.mark.explains
def test_the_state_of_a_shard_is_looked_at(mesh, as_kept):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.randn(2, 4)).sum().backward()
    with OverflowGuard(model, optimizer, watch=["optimizer_state"]) as guard:
        optimizer.step()
        guard.assert_finite_state()
        parameter, state = next(iter(optimizer.optim.state.items()))
        state["exp_avg"].view(-1)[0] = torch.inf
        name = next(n for n, p in model.named_parameters() if p is parameter)
        for look in (guard.assert_finite_state, optimizer.step):
            with pytest.raises(NonFiniteError) as raised:
                look()
            assert name in str(raised.value)
            as_kept(raised.value)
