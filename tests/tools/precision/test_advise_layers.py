"""What is measured of one layer: magnitudes and rounding errors."""

import datetime
import math

import pytest
import torch
from torch import nn

from overflow_fast.tools.precision.again import LayerCall, RelativeDifference
from overflow_fast.tools.precision.copies import on_copies
from overflow_fast.tools.precision.layers import DTYPES, LayerProbe, expected_error
from overflow_fast.tools.precision.magnitudes import Magnitudes


def spread(count, low, high):
    """Values of both signs, evenly spread over powers of two, and a few zeros."""
    generator = torch.Generator().manual_seed(0)
    exponents = low + (high - low) * torch.rand(count, generator=generator)
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    values = signs * 2**exponents
    values[::10] = 0
    return values


@pytest.mark.parametrize("scale", [2.0**-5, 1.0, 2.0**16, 2.0**90])
def test_shares_are_those_of_a_cast(scale):
    values = spread(4000, -60, 10)
    found = Magnitudes()
    found.add(values[:1000])
    found.add(values[1000:].view(30, 100).t())
    exact = values.double() * scale
    cast = exact.half()
    nonzero = values != 0
    lost = float((cast[nonzero] == 0).double().mean())
    assert found.lost(scale) == pytest.approx(lost)
    assert (found.numel, found.zeros) == (4000, int((values == 0).sum()))
    assert found.abs_max == float(values.abs().max())


@pytest.mark.parametrize(
    "value, lost",
    [
        (2.0**-25 * (1 - 2**-24), 1),
        (2.0**-25 * (1 + 2**-23), 0),
        (1e-45, 1),  # subnormal in float32 itself
        (3e38, 0),
    ],
)
def test_what_float16_makes_0(value, lost):
    found = Magnitudes()
    found.add(torch.tensor([-value, 0.0]))
    assert found.lost() == lost


def test_what_is_not_finite_has_no_magnitude():
    found = Magnitudes()
    found.add(torch.tensor([3.0, -math.inf]))
    assert found.abs_max == 3.0 and not found.has_nan
    found.add(torch.tensor([math.nan, -4.0]))
    assert found.abs_max == 4.0 and found.has_nan
    assert found.bits(torch.float16) == math.log2(65504 / 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_other_dtypes(dtype):
    found = Magnitudes()
    found.add(torch.tensor([3.0, 4.0], dtype=dtype))
    if dtype.is_complex:
        found.add(torch.tensor([3 + 4j]))
    assert found.abs_max == (5.0 if dtype.is_complex else 4.0)


def test_sparse_gradients_and_empty_tensors():
    found = Magnitudes()
    found.add(torch.zeros(0))
    assert found.bits(torch.float16) == math.inf and found.lost() == 0.0
    found.add(torch.eye(3).to_sparse() * 1e-9)
    assert found.lost() == 1.0 and found.numel == 3


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_makes_the_error_that_the_formula_says(name):
    values = spread(40_000, -3, 3)
    rounded = values.to(DTYPES[name]).double()
    found = RelativeDifference()
    found.add(rounded[:10], values[:10])
    found.add(rounded[10:], values[10:])
    error = float((rounded - values).norm() / values.double().norm())
    assert found.relative == pytest.approx(error)
    assert error == pytest.approx(expected_error(DTYPES[name], 1), rel=0.1)


def test_differences_count_where_float32_is_finite():
    found = RelativeDifference()
    masked = torch.tensor([1.0, -math.inf])
    found.add(masked, masked)
    assert found.relative == 0.0
    found.add(torch.tensor([math.inf]), torch.tensor([1e5]))
    assert found.relative == math.inf


def test_a_call_on_copies_leaves_the_module_alone():
    module = nn.BatchNorm1d(4)
    before = {
        name: (t, t.clone()) for name, t in module.state_dict(keep_vars=True).items()
    }
    call = LayerCall(module, ((torch.randn(3, 4),), {}))
    for dtype in (torch.float16, torch.bfloat16):
        assert call.computed(dtype)[0].dtype == dtype
    after = module.state_dict(keep_vars=True)
    assert all(after[n] is t and torch.equal(t, c) for n, (t, c) in before.items())


def test_copies_of_shared_tensors_are_shared():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    model[1].weight = model[0].weight
    model[0].alias = [model[0].weight, 1]
    own = model[0].weight
    with on_copies(model):
        assert model[0].weight is model[1].weight is model[0].alias[0]
        assert model[0].weight is not own
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[0].weight.dtype == torch.float32
    assert own is model[0].weight is model[1].weight is model[0].alias[0]


def rows_in(model, *given):
    """What a probe of the model finds in one call, by the names of layers."""
    with LayerProbe(model) as probe:
        model(*given)
    model(*given)  # is not looked at any more
    assert all(row.calls == 1 for row in probe.layers.values())
    return {row.name: row for row in probe.layers.values()}


def test_a_call_is_looked_at_with_what_it_was_given():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Dropout(0.5))
    x = torch.randn(3, 2) - 9.0
    rows = rows_in(model, x)
    assert [row.has_inner for row in rows.values()] == [False, False, False]
    assert [row.is_random for row in rows.values()] == [False, False, True]
    largest = model[0](x).abs().max().item()  # before it was overwritten
    assert rows["1"].inputs.abs_max == largest
    assert set(rows["0"].errors) == {"float16", "bfloat16"}


def test_a_call_that_raised_leaves_the_others_as_they_are():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.ones(1))

        def forward(self, x):
            try:
                return self.inner(x[:, :1])
            except RuntimeError:
                return x + self.own

    rows = rows_in(nn.Sequential(Tries(), nn.ReLU()), torch.ones(1, 2))
    assert {n: row.has_inner for n, row in rows.items()} == {"0": True, "1": False}


def test_a_call_whose_arguments_cannot_be_copied_is_not_compared():
    class Day(datetime.date):
        """Cannot be made without arguments."""

    class Read(nn.Module):
        def forward(self, day):
            return day.x * 2

    day = Day(2024, 1, 1)
    day.x = torch.ones(1, 2)
    rows = rows_in(nn.Sequential(Read()), day)
    assert rows["0"].not_compared == "its arguments cannot be copied"
