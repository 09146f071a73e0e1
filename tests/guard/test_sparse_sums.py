"""Sparse gradients: the rows of one index are finite, and their sum is not."""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import OverflowGuard

OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
}
LARGE = {torch.float32: 3e38, torch.float16: 4e4}


def backward(model, indices, value):
    (model(torch.tensor(indices)).float() * value).sum().backward()


@pytest.mark.parametrize("watch", [None, "tripwire"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", LARGE)
def test_a_sum_that_overflows_is_skipped(dtype, optimizer, watch):
    model = nn.Embedding(4, 3, sparse=True, dtype=dtype)
    optimizer = OPTIMIZERS[optimizer](list(model.parameters()))
    arguments = {} if watch is None else {"watch": watch}
    with OverflowGuard(model, optimizer, "skip", **arguments) as guard:
        before = state_of(model)
        backward(model, [1, 1, 2], LARGE[dtype])
        optimizer.step()
        assert guard.num_skipped == 1
        assert guard.last_report.verdict.origin.source == "update"
        assert_same(state_of(model), before)


@pytest.mark.parametrize("dtype", LARGE)
def test_sgd_adds_the_rows_times_its_rate_and_overflows_in_none(dtype):
    model = nn.Embedding(4, 3, sparse=True, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with OverflowGuard(model, optimizer) as guard:
        backward(model, [1, 1, 2], LARGE[dtype])
        optimizer.step()
        assert guard.last_report is None and bool(model.weight.isfinite().all())
