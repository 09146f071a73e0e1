"""Runs one scenario under transformers' detector and under this package's."""

import contextlib
import io

import torch
from emulation import emulation
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


def spoil(module):
    """Makes the first element of the module's first parameter inf."""
    with torch.no_grad():
        next(module.parameters()).view(-1)[0] = torch.inf


def printed(function):
    """The output of a function, and the text of its ValueError, or None."""
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            function()
        except ValueError as raised:
            error = str(raised)
    return out.getvalue(), error


def run(detector, make_model, drive, **arguments):
    """Stdout and error of a scenario under a detector class."""
    torch.manual_seed(0)
    model = make_model()
    return printed(lambda: drive(model, detector(model, **arguments)))


# Judged at once on the CPU, or as on a device: scanned by torch, or by CUDA's kernels.
WATCHES = {
    "at once": {},
    "deferred": {"_defer": True},
    "emulated": {"_defer": True},
    "emulated, by frame": {"_defer": True, "sync": "frame"},
}


def check_parity(
    make_model, drive, *, only_strict=False, only_at_once=False, **arguments
):
    """Compares at once and deferred, with and without strict_compat."""
    expected = run(Original, make_model, drive, **arguments)
    for strict in (True,) if only_strict else (True, False):
        for name in ("at once",) if only_at_once else WATCHES:
            options = {"strict_compat": strict, **WATCHES[name], **arguments}
            with emulation("emulated" in name):
                found = run(DebugUnderflowOverflow, make_model, drive, **options)
            assert found == expected, (name, options)
    return expected
