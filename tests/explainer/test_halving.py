"""The search by halves finds each place, with few questions."""

import math

import pytest

from overflow_fast.explainer.halving import Halving


@pytest.mark.parametrize("num", [1, 2, 3, 7, 16])
def test_each_place_is_found(num):
    for wanted in range(num):
        search, asked = Halving(num), 0
        for half in search:
            asked += 1
            search.note(wanted in half)
        assert search.place == wanted
        assert asked <= math.ceil(math.log2(num))
