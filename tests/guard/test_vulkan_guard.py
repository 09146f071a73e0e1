"""A real asynchronous device without kernels here: Vulkan, with Mesa's CPU driver."""

import importlib.util
import subprocess
import sys

import pytest

# Its device takes torch's one place for other backends: in a process of its own.
SCRIPT = """
import torch, torchvulkan
from torch import nn
from overflow_fast import OverflowGuard, scan

DTYPES = "float32 float16 bfloat16 int32 uint8 bool int64"
for dtype in (getattr(torch, name) for name in DTYPES.split()):
    x = (torch.randn(100, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    if dtype.is_floating_point:
        x[3], x[7] = torch.nan, -torch.inf
    (here,), (there,) = scan([x]), scan([x.to("vulkan")])
    assert there.not_scanned is None and repr(here) == repr(there), (here, there)

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to("vulkan")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
clean = torch.randn(4, 16).to("vulkan")
bad = (torch.ones(4, 16) * torch.inf).to("vulkan")
with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
    for i, x in enumerate((clean, clean, bad, clean)):
        before = [each.detach().cpu() for each in model.parameters()]
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = [each.detach().cpu() for each in model.parameters()]
        assert all(map(torch.equal, before, after)) == (x is bad), i
    assert guard.num_skipped == 1 and guard.last_report.step == 2
    assert guard.num_syncs == 4  # one wait a step, counted
    assert not guard.coverage().not_scanned
print("passed")
"""


@pytest.mark.slow
def test_scans_and_steps_on_vulkan():
    if importlib.util.find_spec("torchvulkan") is None:
        pytest.skip("needs torchvulkan: pip install --no-deps torchvulkan")
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "Failed to initialize Vulkan" in done.stderr:
        pytest.skip("needs a Vulkan driver: apt install mesa-vulkan-drivers")
    assert done.stdout.endswith("passed\n"), done.stderr[-3000:]
