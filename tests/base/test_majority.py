"""Who differs from most."""

from overflow_fast.base.majority import odd_ones


def test_those_with_another_value_than_most_are_listed():
    assert odd_ones({0: "a", 1: "a"}) is None
    assert odd_ones({0: "a", 1: "a", 2: "b"}) == ("a", [2])
    assert odd_ones({0: "a", 1: "b"}) == (None, [0, 1])
