"""What is out of bounds, what is near, and which dtypes stand for which."""

import math

import pytest
import torch

from overflow_fast.explainer.bounds import WEIGHT, WHOLE_BATCH, is_near, tolerance
from overflow_fast.explainer.wider import CASTS, cast


@pytest.mark.parametrize(
    ("bound", "now", "usual", "is_passed"),
    [
        (WHOLE_BATCH, 10.1, 1.0, True),
        (WHOLE_BATCH, 10.0, 1.0, False),
        (WHOLE_BATCH, 1.0, 0.0, False),  # 0 is usual: any number would be passed
        (WHOLE_BATCH, math.nan, 1.0, False),
        (WEIGHT, 0.9, 1e-3, False),  # below 1
        (WEIGHT, 1.1, 0.0, True),
    ],
)
def test_a_bound_is_passed_by_a_factor(bound, now, usual, is_passed):
    assert bound.is_passed(now, usual) == is_passed


def test_the_tolerance_is_that_of_the_coarsest_dtype():
    assert tolerance([]) == tolerance([torch.float16, torch.float32]) == 0.01
    assert 0.019 < tolerance([torch.float32, torch.bfloat16]) < 0.02


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.005, 100.0, math.inf], True),
        ([2.0, 100.0, math.inf], True),  # beside 100 it is rounding
        ([1.0, 102.5, math.inf], False),
        ([1.0, 100.0, -math.inf], False),
        ([1.0, 100.0], False),
    ],
)
def test_results_are_near_but_for_rounding(values, expected):
    own = torch.tensor([1.0, 100.0, math.inf])
    assert is_near(own, torch.tensor(values)) == expected


@pytest.mark.parametrize("wide", CASTS)
def test_a_cast_leaves_what_is_as_wide_and_packed_pairs(wide):
    packed = getattr(torch, "float4_e2m1fn_x2", torch.int8)
    for dtype in (wide, torch.int64, packed):
        tensor = torch.zeros(2, dtype=torch.uint8 if dtype is packed else dtype)
        assert cast(tensor, CASTS[wide]) is tensor
        assert cast(dtype, CASTS[wide]) is dtype
    assert cast(torch.zeros(2, dtype=torch.float16), CASTS[wide]).dtype == wide
