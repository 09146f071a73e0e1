"""What a step was given, and the entries of it that are non-finite, in words."""

import math

import pytest
import torch
from containers import CONTAINERS, FEW

from overflow_fast.guard.watching.inputs import Given, samples
from overflow_fast.guard.watching.loop_batches import LoopBatch


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


@pytest.mark.parametrize("kind", FEW)
def test_inputs_are_held_weakly_by_their_labels(kind):
    x = torch.randn(2, 4)
    given = Given((CONTAINERS[kind].make(x),), {"more": CONTAINERS[kind].make(x)})
    path = CONTAINERS[kind].path
    assert list(given.tensors) == [f"input[0]{path}", f"input.more{path}"]
    assert given.unseen == []
    assert given.find(f"input[0]{path}").tensor() is x


@pytest.mark.parametrize("kind", FEW)
def test_the_place_in_a_trainer_s_batch_is_named(kind, as_kept):
    x = torch.randn(8, 4)
    x[5, 2] = math.nan
    path = CONTAINERS[kind].path
    noted = LoopBatch(CONTAINERS[kind].make(x))
    place = noted.place_of(x)
    assert place.startswith(f"`batch{path}`") and noted.bad_places() == [place]
    as_kept(place.replace(path, ""))
