"""The detector on a GPU, with bodies that run on the emulated one too."""

import gc
import subprocess
import sys

import pytest
import torch
from gpus import Emulated, Sealed
from parity import printed, small_model
from torch import nn

from overflow_fast import DebugUnderflowOverflow, scan

DETECTED = "inf/nan detected"


def watch(model, gpu, **options):
    return DebugUnderflowOverflow(model, **gpu.options, **options)


class Fills(nn.Module):
    """Returns a new tensor full of a value; nothing else keeps it."""

    def __init__(self, device, numel=1 << 16):
        super().__init__()
        self.device, self.numel = device, numel
        self.value = 1.0

    def forward(self):
        return torch.full((self.numel,), self.value, device=self.device)


class OnASideStream(nn.Module):
    """Drops a tensor at once, whose memory the same stream then gives to another."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.first, self.second = gpu, Fills(gpu.device), Fills(gpu.device)

    def forward(self):
        with self.gpu.side_stream():
            self.gpu.spend_time()
            self.first()
            self.second()


@pytest.mark.parametrize("sync", ["step", "lagged", "frame"])
@pytest.mark.parametrize("bad", ["none", "first", "second"])
def test_tensors_of_a_side_stream_that_are_freed_early(gpu, sync, bad):
    model = OnASideStream(gpu)
    detector = watch(model, gpu, sync=sync)
    for _ in range(3):
        model()
    if bad != "none":
        getattr(model, bad).value = torch.inf
    text, error = printed(lambda: (model(), detector.check()))
    assert (error is not None) == (bad != "none")
    assert (f"{bad} Fills" in text) == (bad != "none")
    assert not detector.coverage.not_scanned


@torch.no_grad()
def test_modules_on_several_streams(gpu):
    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(6))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                if i % 2:
                    with gpu.side_stream():
                        gpu.spend_time()
                        x = layer(x * 1e10)
                else:
                    x = layer(x * 1e10)
            return x

    model = Streams()
    x = torch.ones(256, device=gpu.device)
    detector = watch(model, gpu)
    for _ in range(3):
        text, error = printed(lambda: model(x))
        assert error is not None and DETECTED in error
        # 1e40 is the first that float32 does not hold
        lines = [line for line in text.splitlines() if "layers." in line]
        assert "layers.3 Identity" in lines[-1]
    assert not detector.coverage.not_scanned


def test_two_models_on_one_device(gpu):
    models, detectors = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(small_model().to(gpu.device))
        detectors.append(watch(models[-1], gpu, sync="lagged"))
    x = torch.ones(3, 4, device=gpu.device)
    for _ in range(3):
        for model in models:
            model(x)
    bad = torch.full_like(x, torch.inf)
    late = printed(lambda: (models[1](bad), models[0](x), detectors[1].check()))
    assert late[1] is not None and DETECTED in late[1]
    detectors[0].check()
    for model, detector in zip(models, detectors, strict=True):
        model(x)
        detector.check()
        assert not detector.coverage.not_scanned


FLOAT8 = {
    torch.float8_e5m2: (0x7C, "5.00e-01", "inf"),
    torch.float8_e4m3fn: (0x7F, "nan", "nan"),  # which has no inf
}


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_outputs(gpu, dtype):
    pattern, *extremes = FLOAT8[dtype]

    class Model(nn.Module):
        def forward(self, bits):
            return bits.view(dtype)

    model = Model()
    watch(model, gpu)
    bits = torch.full((1000,), 0x38, dtype=torch.uint8, device=gpu.device)
    model(bits)
    bits[517] = pattern
    text, error = printed(lambda: model(bits))
    assert error is not None and DETECTED in error
    lines = [line for line in text.splitlines() if line.endswith(" output")]
    assert lines[-1].split()[:2] == extremes


class OutOfMemory:
    """No memory of the size of a chunk of slots can be had, on the GPU."""

    def __init__(self, gpu):
        self.gpu, self.ballast = gpu, []

    def __enter__(self):
        if isinstance(self.gpu, Emulated):
            self.gpu.emulated.state.fails_events = True
            return
        if isinstance(self.gpu, Sealed):
            self.ballast = self.gpu.module.memory_limit(1 << 16)
            self.ballast.__enter__()
            return
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            max(1, torch.cuda.memory_reserved()) / total
        )
        for size in (1 << 20, 1 << 17):
            try:
                while True:
                    empty = torch.empty(size, dtype=torch.uint8, device="cuda")
                    self.ballast.append(empty)
            except torch.OutOfMemoryError:
                pass

    def __exit__(self, *exception):
        if isinstance(self.gpu, Emulated):
            self.gpu.emulated.state.fails_events = False
            return
        if isinstance(self.gpu, Sealed):
            self.ballast.__exit__(*exception)
            return
        self.ballast.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_no_memory_for_slots_is_told_and_asked_for_in_the_next_step(gpu):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    bad = torch.full((8,), torch.inf, device=gpu.device)
    detector = watch(model, gpu)
    with OutOfMemory(gpu):
        assert model(bad) is bad
    assert sum(detector.coverage.not_scanned.values()) == 6
    expected = "device lost" if isinstance(gpu, Emulated) else "out of memory"
    assert all(expected in why for why in detector.coverage.not_scanned)
    assert DETECTED in printed(lambda: model(bad))[1]


@pytest.mark.cuda
@pytest.mark.parametrize("at", [0, 2**31 - 1, 2**31, 2**31 + 4])
def test_more_elements_than_31_bits_count(at):
    if torch.cuda.mem_get_info()[0] < 3 * 2**30:
        pytest.skip("needs 3 GiB of GPU memory")
    bits = torch.zeros(2**31 + 5, dtype=torch.uint8, device="cuda")
    bits[at] = 0x7C  # the inf of float8_e5m2
    (stat,) = scan([bits.view(torch.float8_e5m2)])
    assert (stat.has_inf, stat.has_nan, stat.numel) == (True, False, 2**31 + 5)


LOST = """
import os, torch
from torch import nn
from overflow_fast import DebugUnderflowOverflow
model = nn.Sequential(nn.Identity(), nn.Identity())
x = torch.ones(8, device="cuda")
detector = DebugUnderflowOverflow(model)
model(x)
detector.check()
torch._assert_async(torch.zeros((), device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("lost")
model(x)
detector.check()
print("not scanned", sum(detector.coverage.not_scanned.values()))
detector.remove()
print("still here", flush=True)
os._exit(0)  # what a lost device makes of the interpreter's end is torch's business
"""


@pytest.mark.cuda
def test_launches_that_fail_on_a_lost_device_are_told():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert said == ["lost", "not scanned 6", "still here"], done.stderr
