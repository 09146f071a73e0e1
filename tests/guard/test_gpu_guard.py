"""The guard on a GPU, with bodies that run on the emulated one too; and on two GPUs."""

import pytest
import ranks
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import INF, NAN, assert_same, batches, make, plant, state_of
from torch import nn

from overflow_fast import OverflowGuard


def data_on(device, count):
    return [(x.to(device), y.to(device)) for x, y in batches(count)]


@pytest.mark.parametrize(
    "sync, fused", [("step", False), ("step", True), ("lagged", True)]
)
def test_autocast_to_float16_with_a_scaler(gpu, sync, fused):
    model, _ = make()
    model.to(gpu.device).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    kind = gpu.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**24, growth_interval=1000)
    data = data_on(gpu.device, 4)

    def is_taken(batch):
        before = state_of(model)["model"]
        with torch.autocast(kind, torch.float16):
            loss = model(batch[0], y=batch[1])["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = model.state_dict()
        return any(not before[name].equal(after[name]) for name in before)

    with OverflowGuard(model, optimizer, "skip", sync=sync, **gpu.options) as guard:
        assert not is_taken(
            data[0]
        )  # float16 gradients overflow: the scaler's business
        assert scaler.get_scale() == 2.0**23
        scaler.update(2.0**8)
        assert is_taken(data[1])
        with plant(model.blocks[1].act, INF):
            assert not is_taken(data[2])
        assert is_taken(data[3])
        guard.check()
    assert guard.num_skipped == 1
    assert guard.last_report.step == 2
    assert guard.last_report.verdict.origin.maker == "blocks.1.act"


def needs_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, there is one")


class Split(Assembled):
    def forward(self, x):
        return self.second(self.first(x).to("cuda:1"))


@pytest.mark.cuda
@pytest.mark.parametrize("bad", ["first", "second"])
def test_lagged_the_kernels_of_two_devices_skip_together(bad):
    needs_two_gpus()
    torch.manual_seed(0)
    model = Split(
        first=nn.Linear(4, 4).to("cuda:0"), second=nn.Linear(4, 4).to("cuda:1")
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(3, 4, device="cuda:0")

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with OverflowGuard(model, optimizer, "skip", sync="lagged") as guard:
        step()
        before = state_of(model, optimizer)
        with plant(getattr(model, bad), NAN):
            step()
        assert_same(state_of(model, optimizer), before)
        step()
        guard.check()
    assert guard.num_skipped == 1
    assert guard.last_report.verdict.origin.maker == bad


def one_bad_rank():
    """What a rank does in three steps, of which the second is bad on rank 1."""
    device = ranks.device()
    model, _ = make()
    model.to(device).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changed = []
    with OverflowGuard(
        model, optimizer, "skip", process_group=dist.group.WORLD
    ) as guard:
        for step, (x, y) in enumerate(data_on(device, 3)):
            before = model.head.bias.detach().clone()
            is_bad = step == 1 and dist.get_rank() == 1
            with plant(model.head, INF if is_bad else 1.0):
                model(x, y=y)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            changed.append(not before.equal(model.head.bias))
    return changed, guard.num_skipped, dist.get_backend()


@pytest.mark.cuda
def test_ranks_agree_over_nccl():
    needs_two_gpus()
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    found = ranks.on_ranks(2, one_bad_rank, over="nccl")
    assert found == [([True, False, True], 1, "nccl")] * 2
