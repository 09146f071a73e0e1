"""The drop-in against the installed transformers class, on the same scenario."""

import contextlib
import io
import math

import pytest
import torch
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow


def small_model():
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        nn.Linear(8, 2),
    )


def run(detector, make_model, drive, **arguments):
    """Stdout and error of a scenario under a detector class."""
    torch.manual_seed(0)
    model = make_model()
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            drive(model, detector(model, **arguments))
        except ValueError as raised:
            error = str(raised)
    return out.getvalue(), error


def check_parity(make_model, drive, **arguments):
    expected = run(Original, make_model, drive, **arguments)
    assert run(DebugUnderflowOverflow, make_model, drive, **arguments) == expected
    strict = {**arguments, "strict_compat": True}
    assert run(DebugUnderflowOverflow, make_model, drive, **strict) == expected
    return expected


def clean_batches_then_inf(model, detector):
    for _ in range(3):
        model(torch.randn(2, 4))
    with torch.no_grad():
        model[2][0].weight[0, 0] = math.inf
    model(torch.randn(2, 4))


@pytest.mark.parametrize("limit", [0, 1, 3, 21, 1000, None])
def test_frame_limits(limit):
    _, error = check_parity(
        small_model, clean_batches_then_inf, max_frames_to_save=limit
    )
    assert "inf/nan detected" in error


@pytest.mark.parametrize(
    "arguments",
    [
        {"trace_batch_nums": [1]},
        {"trace_batch_nums": {0, 2}, "abort_after_batch_num": 1},
        {"abort_after_batch_num": 0},
        {"abort_after_batch_num": False},
        {"trace_batch_nums": range(9), "abort_after_batch_num": 2},
    ],
)
def test_tracing_and_abort(arguments):
    check_parity(small_model, clean_batches_then_inf, **arguments)


def test_deferred_verdict_prints_the_same_report():
    now = run(DebugUnderflowOverflow, small_model, clean_batches_then_inf)
    later = run(
        DebugUnderflowOverflow, small_model, clean_batches_then_inf, _composite=True
    )
    assert later == now


def test_remove_leaves_nothing_behind():
    model = small_model()
    with DebugUnderflowOverflow(model):
        assert all(m._forward_hooks for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        DebugUnderflowOverflow(3)
    with pytest.raises(TypeError, match="max_frames_to_save must be an int or None"):
        DebugUnderflowOverflow(small_model(), "21")
    with pytest.raises(ValueError, match="max_frames_to_save must not be negative"):
        DebugUnderflowOverflow(small_model(), -1)
    with pytest.raises(TypeError, match="trace_batch_nums must be a container of ints"):
        DebugUnderflowOverflow(small_model(), trace_batch_nums=3)
