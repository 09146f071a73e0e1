"""The detector on a device without kernels: the original's text, and few waits."""

import pytest
import torch
from parity import Original, printed, small_model, spoil
from sealed import late, slow_events, watched
from torch import nn

from overflow_fast import DebugUnderflowOverflow

pytestmark = pytest.mark.sealed


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
            for _ in range(depth)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, tokens, scale=1.0):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * scale
        return self.head(x)


def made(dtype=torch.float32, depth=3):
    torch.manual_seed(0)
    model = Net(depth).to("sealed", dtype)
    tokens = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(3))
    return model, tokens.to("sealed")


@pytest.mark.parametrize("scale", [1.0, 1e38, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"trace_batch_nums": [1]}], ids=["", "traced"])
def test_the_text_is_the_originals(dtype, scale, options):
    def of(detector, **more):
        model, tokens = made(dtype)

        def drive():
            detector(model, **options, **more)
            model(tokens)
            model(tokens)
            model(tokens, scale)

        return printed(drive)

    assert of(DebugUnderflowOverflow, strict_compat=True) == of(Original)


@pytest.mark.parametrize("sync, waits", [("step", 1), ("lagged", 0), ("frame", 9)])
@torch.no_grad()
def test_how_often_the_host_waits(sync, waits):
    model, tokens = made(depth=1)
    detector = DebugUnderflowOverflow(model, sync=sync)
    with slow_events(2):  # of the last forward, they pass within this one
        model(tokens)
        before = detector.recorder.num_syncs
        with watched() as seen:
            model(tokens)
    assert seen.waits == detector.recorder.num_syncs - before
    assert bool(seen.waits) == bool(waits) and seen.waits <= waits
    assert seen.faults == 0


@torch.no_grad()
def test_a_deeper_model_waits_no_more_and_takes_four_operations_a_tensor():
    def counts(depth):
        model, tokens = made(depth=depth)
        model(tokens)
        with watched() as bare:
            model(tokens)
        detector = DebugUnderflowOverflow(model)
        model(tokens)
        before = detector.coverage.tensors_scanned
        with slow_events(9), watched() as seen:
            model(tokens)
        scanned = detector.coverage.tensors_scanned - before
        return seen.waits, seen["op"] - bare["op"], scanned

    waits, added, scanned = counts(32)
    assert waits == counts(2)[0] == 1
    assert scanned > 200 and added <= 4 * scanned


def test_a_late_device_finds_the_module_in_backward_too():
    torch.manual_seed(0)
    model = small_model().to("sealed")
    detector = DebugUnderflowOverflow(model, sync="lagged")
    x = torch.randn(2, 4, device="sealed")

    def drive():
        model(x).sum().backward()
        spoil(model[2])
        model(x)
        detector.check()

    with late():
        text, error = printed(drive)
    assert "inf/nan detected" in error and "2.0 Linear" in text
