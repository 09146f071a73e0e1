"""Operations that are too large to be copied are computed in float64 in part."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overflow_fast import explain

pytestmark = pytest.mark.usefixtures("untried")
HALF = torch.float16


def large(x, dtype=HALF):
    return (x * 0 + 300).to(dtype)


def masked(x):
    mask = torch.zeros_like(x)
    mask[3] = float("-inf")
    return (x + mask).softmax(-1).sum()


def product_of_batches(x):
    y = large(x).view(4, 8, 1).expand(4, 8, 8)
    return torch.bmm(y, y.mT).float().sum()


# Functions of a layer's output of 4 x 8 or 8 x 8, and the cause.
CASES = {
    "elementwise": (4, lambda x: torch.log(x * 0).sum(), "undefined"),
    "broadcast": (4, lambda x: (x / (x[:1] * 0)).sum(), "undefined"),
    "of a row and a column": (4, lambda x: (large(x) @ large(x).T).float(), "range"),
    "square": (8, lambda x: (large(x) @ large(x)).float().sum(), "range"),
    "square with a bias": (
        *(8, lambda x: F.linear(large(x), large(x), large(x)[0]).float().sum()),
        "range",
    ),
    "in batches": (4, product_of_batches, "range"),
    "of rows": (4, masked, "undefined"),
    "a norm of rows": (4, lambda x: (large(x) * 200).norm(dim=-1).float(), "range"),
    "sums on the way": (4, lambda x: (large(x) * 100).cumsum(-1).float(), "range"),
    "in backward": (4, lambda x: torch.sqrt(x * 0).sum(), "singular gradient"),
    "a convolution": (
        *(4, lambda x: F.conv1d(large(x)[:, None], large(x)[:, None, :3]).float()),
        "range",
    ),
}


def explained(size, function):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return explain(model, torch.randn(size, 8), lambda x: function(model(x)).sum())


@pytest.mark.parametrize("case", CASES)
def test_the_part_has_the_cause_of_the_whole(monkeypatch, case, as_kept):
    size, function, cause = CASES[case]
    monkeypatch.setattr("overflow_fast.explainer.tape._MOST_NUMEL", 0)
    whole = explained(size, function)
    monkeypatch.setattr("overflow_fast.explainer.float64._MAX_NUMEL", 30)
    part = explained(size, function)
    assert whole.cause.startswith(cause)
    assert (part.cause, part.op.name) == (whole.cause, whole.op.name)
    assert "alone" not in str(whole.evidence)
    as_kept(part.evidence[1])


def test_the_value_is_that_of_its_place(monkeypatch):
    monkeypatch.setattr("overflow_fast.explainer.float64._MAX_NUMEL", 30)
    scale = torch.arange(1.0, 9.0)[:, None].half()

    def loss(x):
        left = scale * 10 * large(x).sign()
        return (left @ (large(x) * 4)).float().sum()

    found = explained(8, loss)
    # Row 0 is 8 * 10 * 1200 = 96,000, which is beyond float16; so are all others.
    assert found.op.first_index == (0, 0)
    assert found.op.true_value == 96_000


def test_what_has_no_part_is_said_to_be_too_large(monkeypatch):
    monkeypatch.setattr("overflow_fast.explainer.float64._MAX_NUMEL", 30)
    found = explained(8, lambda x: (large(x) * 100).sum().float())
    assert found.cause == "unknown"
    assert "too large" in found.reason


def test_an_operation_that_mixes_rows_is_not_cut(monkeypatch):
    monkeypatch.setattr("overflow_fast.explainer.float64._MAX_NUMEL", 30)
    found = explained(8, lambda x: (large(x) * 100).cumsum(0).float().sum())
    assert found.cause == "unknown"
    assert "too large" in found.reason
