"""The kinds of non-finite values, with and without the stat of a scan."""

import itertools

import pytest
import torch

from overflow_fast import scan
from overflow_fast.explainer.memory import memory_of
from overflow_fast.explainer.tensor_kinds import (
    NAN,
    NEGATIVE_INF,
    POSITIVE_INF,
    Kinds,
    kinds_of,
)

INF = float("inf")
VALUES = {float("nan"): NAN, INF: POSITIVE_INF, -INF: NEGATIVE_INF, 1.0: 0}
SETS = [
    each
    for n in range(1, len(VALUES) + 1)
    for each in itertools.combinations(VALUES.items(), n)
]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def check(tensor, expected):
    assert kinds_of(tensor) == expected
    assert kinds_of(tensor, scan([tensor])[0]) == expected
    assert Kinds(memory_of).of([tensor])[0][0] == expected


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("pairs", SETS, ids=str)
def test_the_kinds_are_those_of_the_values(pairs, dtype):
    tensor = torch.tensor([value for value, _ in pairs]).to(dtype)
    check(tensor, sum(kind for _, kind in pairs))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "one, other", list(itertools.product(VALUES.items(), repeat=2)), ids=str
)
def test_both_parts_of_a_complex_number_count(one, other, dtype):
    tensor = torch.complex(torch.tensor([one[0], 1.0]), torch.tensor([other[0], 1.0]))
    check(tensor.to(dtype), one[1] | other[1])
