"""MPS's kernel, run by its emulation: its dispatches, and what happens without it."""

import json
import logging
import sys

import mps_check
import pytest
import torch
from metal import Kernel, ShaderLibrary, metal, metal_scan
from torch import nn

from overflow_fast import _C, DebugUnderflowOverflow
from overflow_fast.scanner import metal as module
from overflow_fast.scanner.metal import MetalScan
from overflow_fast.scanner.ops import scan_with

BAD = torch.tensor([[1.0, 2.0, torch.inf]])


def scan(tensors):
    return scan_with(tensors, _C.ScanBackend.DEVICE)


def dispatches(kernels):
    return [kernels[size].num_calls for size in kernels]


@pytest.fixture
def kernels():
    """The two kernels, with no calls counted."""
    with metal():
        scan([BAD])
        for kernel in metal_scan()._kernels.values():
            kernel.num_calls = 0
        yield metal_scan()._kernels


@pytest.mark.parametrize(
    "count, calls", [(1, [1, 0]), (4, [1, 0]), (5, [0, 1]), (24, [0, 1]), (50, [1, 2])]
)
def test_a_list_is_as_few_dispatches_as_it_fits_in(kernels, count, calls):
    stats = scan([torch.tensor([float(i), -3.0]) for i in range(count)])
    assert [stat.abs_max for stat in stats] == [max(3.0, i) for i in range(count)]
    assert dispatches(kernels) == calls


def test_a_frame_is_one_dispatch(kernels):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    detector = DebugUnderflowOverflow(model, _defer=True)
    model(BAD.nan_to_num(posinf=3.0))
    detector.check()
    assert dispatches(kernels) == [2, 0]  # the root lists what was scanned
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(BAD)


def test_layouts_that_take_more_than_4_kib_are_two_dispatches(kernels):
    strides = [3**i for i in range(8)]
    base = torch.arange(sum(strides) + 30.0)
    tensors = [base[i:].as_strided([2] * 8, strides) for i in range(24)]
    assert [s.abs_max for s in scan(tensors)] == [sum(strides) + i for i in range(24)]
    assert dispatches(kernels) == [1, 1] or dispatches(kernels) == [0, 2]


def test_what_the_kernel_cannot_read_is_left_to_torch(kernels):
    tensors = [torch.ones(2), torch.tensor([3 + 4j], dtype=torch.complex128), BAD]
    assert [stat.abs_max for stat in scan(tensors)] == [1.0, 5.0, torch.inf]
    assert dispatches(kernels) == [1, 0]
    assert scan(tensors[1:2])[0].abs_max == 5.0
    assert dispatches(kernels) == [1, 0]


def test_slots_are_added_to():
    slots = torch.tensor([[-1, 0, 0, 0]] * 3)
    tensors = [BAD, torch.tensor([2**40, -1]), torch.full((5,), -torch.inf)]
    for _ in range(2):
        metal_scan()(slots, 0, tensors)
    expected = torch.tensor([[-1, 0, 0, 0]] * 3)
    for _ in range(2):
        torch.ops.overflow_fast.scan(expected, 0, tensors)
    assert torch.equal(slots, expected)


def test_counts_carry_into_the_upper_half_of_their_word():
    slots = torch.tensor([[-1, 0, 2**32 - 1, 2**32 - 4]])
    metal_scan()(slots, 0, [torch.tensor([torch.nan, -torch.inf])])
    assert slots[0, 2:].tolist() == [2**32, 2**32 | 2]


class Silent(Kernel):
    def __call__(self, *args, **kwargs):
        pass


def broken_library(source):
    library = ShaderLibrary(source)
    library.scan_24 = Silent(24)
    return library


def failing_compiler(source):
    raise RuntimeError("program_source:3: error: unknown type\nwith details")


@pytest.mark.parametrize(
    "compile_shader", [failing_compiler, lambda source: object(), broken_library]
)
def test_without_its_kernel_torch_scans_and_it_is_told_once(
    compile_shader, caplog, as_kept
):
    with metal(MetalScan(compile_shader)), caplog.at_level(logging.WARNING):
        assert [scan([BAD])[0].abs_max for _ in range(3)] == [torch.inf] * 3
    (record,) = caplog.records
    assert "details" not in record.getMessage()
    as_kept(record.getMessage())


@pytest.mark.parametrize("has_mps", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_where_it_is_registered(monkeypatch, has_mps, compiles):
    registered = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    monkeypatch.setattr(_C, "register_scan", lambda *args: registered.append(args))
    if not compiles:
        monkeypatch.delattr(torch.mps, "compile_shader")
    module.register()
    assert [type_ for type_, _ in registered] == ["mps"] * (has_mps and compiles)


def test_the_check_of_a_mac_takes_its_way_on_the_cpu(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "--device", "cpu", "--quick", "--output", str(file)]
    )
    assert mps_check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(file.read_text())
    assert len(lines) <= 40 and "error" not in str(found["times"])
    assert "has_nan=True" in found["scan"] and found["guard"]["weights finite"]
    assert found["guard"]["skipped"] == 1
