"""Sparse gradients: the rows of one index are finite, and their sum is not."""

import pytest
import torch
from guarding import assert_same, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3),
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
        assert_same(state_of(model), before)


@pytest.mark.explains
def test_the_report_names_the_gradient_and_the_index(as_kept):
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with OverflowGuard(model, optimizer):
        backward(model, [1, 3, 3, 2], 3e38)
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
    report = raised.value.report
    first, explanation = report.verdict.first, report.explanation
    assert (first.kind, first.label, first.num_inf) == ("gradient", "weight", 3)
    assert report.verdict.dirty_gradients == ["weight"]
    assert (explanation.phase, explanation.cause) == ("backward", "range overflow")
    assert explanation.tensor == "weight"
    as_kept(explanation.evidence[0])
    assert any("sparse" in note for note in report.notes)


@pytest.mark.parametrize("indices", [[1, 2, 3], [1, 1, 2]])
def test_sums_within_the_range_are_finite(indices):
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-40)
    value = 3e38 if len(set(indices)) == 3 else 1.5e38
    with OverflowGuard(model, optimizer) as guard:
        backward(model, indices, value)
        optimizer.step()
        assert guard.last_report is None


def test_check_looks_at_the_sums_too():
    model = nn.Embedding(4, 3, sparse=True)
    with OverflowGuard(model, on_overflow="warn") as guard:
        backward(model, [1, 1, 2], 3e38)
        assert guard.check().verdict.first.label == "weight"


def test_rows_of_small_gradients_are_not_added_up(monkeypatch):
    """Clean steps do not pay for it: adding up sorts the indices."""
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with OverflowGuard(model, optimizer):
        backward(model, [1, 1, 2], 1.0)
        calls, coalesce = [], torch.Tensor.coalesce
        monkeypatch.setattr(
            torch.Tensor, "coalesce", lambda t: calls.append(t) or coalesce(t)
        )
        optimizer.step()
    assert not calls
