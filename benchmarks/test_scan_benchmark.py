"""The scan under pytest-benchmark: `pytest benchmarks --benchmark-only`."""

import pytest
import torch

import overflow_fast  # noqa: F401  (registers the operator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("mib", [1, 64])
def test_scan(benchmark, dtype, mib):
    tensor = torch.ones((mib << 20) // dtype.itemsize).to(dtype)
    slots = torch.tensor([[-1, 0, 0, 0]])
    benchmark.group = f"{mib} MiB"
    benchmark(torch.ops.overflow_fast.scan.default, slots, 0, [tensor])
