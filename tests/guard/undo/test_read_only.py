"""Memory that may not be written to, as that of a file that is mapped, is left alone.

A write to it ends the process: each guard runs in a child.
"""

import os

import numpy
import pytest
import torch
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.guard.undo.restore_point import RestorePoint
from overflow_fast.guard.undo.tensors import is_same_bits
from overflow_fast.monitors import MaskedOps

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*(not writable|Sparse):UserWarning"),
]


def mapped(path, *shape):
    numpy.ones(shape, numpy.float32).tofile(path)
    return torch.from_numpy(numpy.memmap(path, numpy.float32, "r", shape=shape))


def compressed(values):
    rows, columns = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
    return torch.sparse_csr_tensor(rows, columns, values[0], (2, 2))


def jagged(values):
    offsets = torch.tensor([0, 1, 3])
    return torch.nested.nested_tensor_from_jagged(values.reshape(4, 1)[:3], offsets)


FORMS = {
    "as it is": lambda values: values,
    "expanded": lambda values: values.expand(3, 4),
    "strided": lambda values: values[:, ::2],
    "compressed": compressed,
    "jagged": jagged,
}


class Mapped(nn.Module):
    def __init__(self, table, kind):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        if kind == "buffer":
            self.register_buffer("table", table)
        elif kind == "parameter":
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.table = table.numpy() if kind == "array" else table

    def forward(self, x):
        return self.linear(x) + x.mean(1, keepdim=True).log()


def ends_well(function):
    """Calls a function in a child; returns whether that came to its end."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def trained(model, closure=False, **options):
    weights = [p for p in model.parameters() if p.requires_grad or closure]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    guard = OverflowGuard(model, optimizer, "skip", **options)
    for number in (1.0, 1.0, -1.0, 1.0):

        def evaluate(number=number):
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), number)).mean()
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    assert guard.num_skipped == 1 and guard.coverage().failures == 0


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("buffer", form) for form in FORMS),
        *((kind, "as it is") for kind in ("parameter", "attribute", "array")),
    ],
)
def test_replays_of_clean_and_of_bad_steps(tmp_path, kind, form):
    model = Mapped(FORMS[form](mapped(tmp_path / "table", 1, 4)), kind)
    assert ends_well(lambda: trained(model, monitors=[MaskedOps(1)]))


def test_an_optimizer_that_is_restored_behind_its_closure(tmp_path):
    model = Mapped(mapped(tmp_path / "table", 1, 4), "parameter")
    assert ends_well(lambda: trained(model, closure=True, explain=False))


def test_a_flag_on_the_device(tmp_path):
    model = Mapped(mapped(tmp_path / "table", 1, 4), "buffer")

    class Watch:
        prefix, has_submodule_calls, is_attached = "", False, True

        def __init__(self, model):
            self.model = model

    def restored():
        start = RestorePoint([Watch(model)], has_optimizers=True)
        start.begin()
        for flag in (0.0, 1.0):
            start.restore_where(torch.tensor(flag))

    assert ends_well(restored)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[1:],
        lambda x: x.to(torch.complex128),
        lambda x: x.to(torch.float16)[:3],
        lambda x: x.to_sparse(),
        lambda x: x.reshape(2, 4).to_sparse_csc(),
        lambda x: torch.quantize_per_tensor(x.nan_to_num(), 0.1, 0, torch.qint8),
    ],
)
def test_bits_are_compared(make):
    x = torch.tensor([1.0, float("nan"), 0.0, 2.0, 3.0, 0.0, 1.0, 1.0])
    other = x.clone()
    assert is_same_bits(make(x), make(other))
    other[-1] = other[2] = 5.0
    assert not is_same_bits(make(x), make(other))
    other[-1], other[2] = 1.0, -0.0
    is_of_zeros = make(x).layout is torch.strided and not make(x).is_quantized
    assert is_same_bits(make(x), make(other)) != is_of_zeros
