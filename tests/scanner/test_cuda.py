"""The detector on a GPU: the report, the syncs, graphs, streams and memory."""

import contextlib
import gc

import pytest
import torch
from parity import Original, printed, small_model, spoil
from torch import nn

from overflow_fast import DebugUnderflowOverflow, scan

DETECTED = "inf/nan detected"
SYNCS = ["step", "lagged", "frame"]

pytestmark = pytest.mark.cuda


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return small_model().to("cuda", dtype)


def batch_of(dtype=torch.float32):
    return torch.ones(3, 4, device="cuda", dtype=dtype)


def deep_model(depth=50):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth))
    return nn.Sequential(*layers).cuda()


@contextlib.contextmanager
def no_syncs():
    """Whatever synchronises through torch raises meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_report_is_the_originals(sync, dtype):
    dtype = getattr(torch, dtype)

    def report(detector, **options):
        model = model_of(dtype)
        watching = detector(model, **options)

        def drive():
            model(batch_of(dtype))
            spoil(model[2][0])
            model(batch_of(dtype))
            if options:
                watching.check()

        return printed(drive)

    expected = report(Original)
    assert expected[1] is not None and DETECTED in expected[1]
    assert report(DebugUnderflowOverflow, sync=sync) == expected


@pytest.mark.parametrize("sync", SYNCS)
def test_training_is_bit_identical(sync):
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
        model.cuda()
        if watched:
            DebugUnderflowOverflow(model, sync=sync)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(torch.ones(8, 64, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach(), *(p.detach() for p in model.parameters())]

    for a, b in zip(train(False), train(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sync, most", [("step", 1), ("lagged", 0)])
def test_syncs_in_a_step(sync, most):
    model = deep_model()
    detector = DebugUnderflowOverflow(model, sync=sync)
    x = torch.ones(16, 64, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    detector.check()
    before = detector.recorder.num_syncs
    with no_syncs():
        model(x).sum().backward()
    assert detector.recorder.num_syncs - before <= most
    detector.check()


def test_lagged_goes_on_while_the_device_is_busy():
    model = deep_model(5)
    detector = DebugUnderflowOverflow(model, sync="lagged")
    x = torch.ones(16, 64, device="cuda")
    model(x)
    detector.check()
    with no_syncs():
        torch.cuda._sleep(1_000_000_000)  # about half a second
        model(torch.full_like(x, torch.inf))
    assert detector.recorder.num_syncs <= 1
    with pytest.raises(ValueError, match=DETECTED):
        detector.check()


def test_a_graphs_replay_is_judged_by_check():
    model, x = deep_model(3), torch.ones(16, 64, device="cuda")
    detector = DebugUnderflowOverflow(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        model(x)
    graph.replay()
    detector.check()
    x[3, 4] = torch.nan
    graph.replay()
    text, error = printed(detector.check)
    assert DETECTED in error and "Detected inf/nan during batch_number=3" in text
    x.fill_(1.0)
    graph.replay()
    detector.check()
    detector.remove()
    del detector
    gc.collect()
    keep = [torch.zeros(4096, 4, dtype=torch.long, device="cuda") for _ in range(8)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(not tensor.any() for tensor in keep)  # it wrote to nobody else's memory


def test_a_whole_training_step_in_a_graph():
    model, x = deep_model(3), torch.ones(16, 64, device="cuda")
    detector = DebugUnderflowOverflow(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    for _ in range(3):
        graph.replay()
    detector.check()
    x.fill_(torch.inf)
    graph.replay()
    assert DETECTED in printed(detector.check)[1]


@torch.no_grad()
def test_modules_on_streams_of_their_own():
    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)
            self.side = torch.cuda.Stream()

        def forward(self, x):
            x = self.first(x)
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(10_000_000)
                x = self.second(x * x.new_tensor(3e38) * 10)
            torch.cuda.current_stream().wait_stream(self.side)
            return x

    model = TwoStreams().cuda()
    for _ in range(5):
        with DebugUnderflowOverflow(model):
            text, error = printed(lambda: model(torch.ones(512, 512, device="cuda")))
        assert DETECTED in error and "second Linear" in text


def test_memory_needed():
    model = deep_model(100)
    x = torch.ones(16, 64, device="cuda")
    with torch.no_grad():
        model(x)
        before = torch.cuda.memory_allocated()
        detector = DebugUnderflowOverflow(model)
        for _ in range(3):
            model(x)
    slots = detector.coverage.tensors_scanned
    assert torch.cuda.memory_allocated() - before < 2**20 + 32 * slots


@pytest.mark.parametrize("count", [1, 5, 100, 1000, 5000])
def test_lists_of_any_length(count):
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(1 + i % 700, device="cuda", generator=generator)
        for i in range(count)
    ]
    for tensor, stat in zip(tensors, scan(tensors), strict=True):
        assert stat.abs_min == tensor.abs().min().item()
        assert stat.abs_max == tensor.abs().max().item()


def test_the_operator_on_a_stream_of_its_own():
    slots = torch.zeros(2, 4, dtype=torch.long, device="cuda")
    slots[:, 0] = -1
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = torch.ones(1 << 20, device="cuda")
        x[77] = torch.nan
        torch.ops.overflow_fast.scan(slots, 0, [x, torch.ones(3, device="cuda")])
    side.synchronize()
    assert slots[:, 2].tolist() == [1, 0]


def test_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4).to("cuda:0")
            self.second = nn.Linear(4, 4).to("cuda:1")

        def forward(self, x):
            return self.second(self.first(x).to("cuda:1"))

    model = Split()
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(2, 4, device="cuda:0"))
    assert not detector.coverage.not_scanned
    spoil(model.second)
    text, error = printed(lambda: model(torch.ones(2, 4, device="cuda:0")))
    assert DETECTED in error and "second Linear" in text


def test_mixed_devices_in_one_frame():
    class Mixed(nn.Module):
        def forward(self, x):
            return x, x.cpu() * torch.inf

    model = Mixed()
    DebugUnderflowOverflow(model)
    text, error = printed(lambda: model(torch.ones(3, device="cuda")))
    assert DETECTED in error and "inf      inf output[1]" in text
