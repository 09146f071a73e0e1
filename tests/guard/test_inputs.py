"""The entries of a batch that are non-finite, in words."""

import math

import pytest
import torch

from overflow_fast.guard.watching.inputs import samples


@pytest.mark.parametrize(
    "bad, named",
    [
        ([], None),
        ([0], "{one} 0"),
        ([7], "{one} 7"),
        ([2, 5], "{several} 2, 5"),
        ([1, 2, 3, 4], "{several} 1, 2, 3, 4"),
        ([1, 2, 3, 4, 6], "{several} 1, 2, 3, 4 ..."),
        (range(8), None),
    ],
)
@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_the_bad_entries_are_named_unless_all_are(shape, bad, named):
    x = torch.ones(shape)
    for place in bad:
        x[place] = math.nan
    of_samples = of_indices = ""
    if named is not None:
        named_samples = named.format(one="sample", several="samples")
        of_samples = f", {named_samples} of 8 (from 0)"
        named_indices = named.format(one="index", several="indices")
        of_indices = f", {named_indices} of 8 in dimension 0 (from 0)"
    assert samples(x, True) == of_samples
    assert samples(x, False) == of_indices


@pytest.mark.parametrize("shape", [(), (1,), (1, 3)])
def test_what_has_one_entry_has_none_to_name(shape):
    assert samples(torch.full(shape, math.nan), True) == ""
    assert samples(None, True) == ""


@pytest.mark.explains
def test_an_entry_is_named_if_some_of_it_is_bad(as_kept):
    x = torch.ones(2, 3)
    x[1, 2] = math.inf
    as_kept(samples(x, True))
