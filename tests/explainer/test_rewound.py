"""Random states of before what was drawn."""

import pytest
import torch

from overflow_fast.explainer import rewound as rewinding
from overflow_fast.explainer.rewound import rewound
from overflow_fast.guard.undo.random import RandomStates


@pytest.fixture(autouse=True)
def _random_states_are_kept():
    with RandomStates():
        yield


@pytest.mark.parametrize("count", [1, 7, 623, 624, 625, 1247, 1248, 100_000])
@pytest.mark.parametrize("before", [0, 1, 624, 2000])
def test_the_same_is_drawn_again(before, count):
    torch.manual_seed(before)
    torch.rand(before)
    first = torch.rand(count)
    known = RandomStates()
    torch.rand(count)
    rewound(known, RandomStates()).restore()
    assert torch.equal(torch.rand(count), first) and not known.drawn()


def test_where_nothing_was_drawn_states_stay():
    torch.manual_seed(0)
    known = RandomStates()
    assert not known.others_in(rewound(known, RandomStates()))


def test_too_much_that_was_drawn(monkeypatch):
    monkeypatch.setattr(rewinding, "_MOST_BLOCKS", 3)
    known = RandomStates()
    torch.rand(5000)
    assert not known.others_in(rewound(known, RandomStates()))


@pytest.mark.cuda
def test_the_same_is_drawn_again_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    first = torch.rand(1000, device=device)
    known = RandomStates([device])
    torch.rand(1000, device=device)
    rewound(known, RandomStates([device])).restore()
    assert torch.equal(torch.rand(1000, device=device), first)
    assert not known.drawn()
