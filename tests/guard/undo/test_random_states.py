"""Random numbers are the same ones in a replay, and in runs that are compared."""

import gc
import random
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from assembled import Assembled
from failed_runs import failed
from torch import nn

from overflow_fast import advise_precision, compare_live
from overflow_fast.guard.undo.random import RandomStates

pytestmark = pytest.mark.explains

DRAWS = {
    "torch": (torch.manual_seed, lambda: float(torch.rand(()))),
    "python": (random.seed, random.random),
    "numpy": (numpy.random.seed, lambda: float(numpy.random.rand())),
}


class Drawing(Assembled):
    def forward(self, x):
        keep = 0.0 if self.draw() < 0.3 else 1.0
        return (self.linear(x) * keep / keep).sum()


@pytest.mark.parametrize("name", DRAWS)
def test_every_global_generator_draws_the_same_in_a_replay(name):
    seed, draw = DRAWS[name]
    for number in range(2000):  # one bad draw, and only good ones after it
        seed(number)
        drawn = [draw() for _ in range(12)]
        if drawn[0] < 0.3 < min(drawn[1:]):
            break
    model = Drawing(linear=nn.Linear(4, 4), draw=draw)
    seed(number)
    found = failed(model, lambda: model(torch.ones(3, 4))).explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.div.Tensor")


def test_the_second_of_two_normal_numbers_is_drawn_again():
    numpy.random.seed(0)
    states = [RandomStates()]
    drawn = []
    for _ in range(4):
        drawn.append(numpy.random.randn())
        states.append(RandomStates())
    for place, expected in enumerate(drawn):
        states[place].restore()
        assert not states[place].drawn()
        assert numpy.random.randn() == expected
        assert states[place].drawn() == ["numpy"]
    numpy.random.seed(1)
    assert states[-1].drawn() == ["numpy"]


class Scaled(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.drop, self.last = (
            nn.Linear(16, 16),
            Times(draw=draw),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


class Times(Assembled):
    def forward(self, x):
        return x * self.draw()


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_make_no_difference_between_runs(name):
    seed, draw = DRAWS[name]
    seed(0)
    torch.manual_seed(0)
    model, twin, x = Scaled(draw), Scaled(draw), torch.randn(8, 16)
    twin.load_state_dict(model.state_dict())
    assert not compare_live(model, twin, x).differs
    assert "keep_in_fp32" not in str(advise_precision(model, [x]))
    found = compare_live(model.bfloat16(), twin, x.bfloat16())
    assert "computes differently" not in str(found)


FIRST_DRAW = """
import sys
import threading
import numpy, torch, overflow_fast
from torch import nn

assert "numpy.random" not in sys.modules or {loads}

class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * numpy.random.rand()

model = Dropped()
print(overflow_fast.compare_live(model, model, torch.ones(2, 4)).first)
"""


@pytest.mark.slow
def test_a_generator_whose_first_draw_is_in_the_forward_is_restored():
    loads = numpy.__version__.startswith("1.")  # it imports all at once
    command = [sys.executable, "-c", FIRST_DRAW.format(loads=loads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]


def test_threads_that_read_states_at_once_all_go_on():
    """torch alone does not: one waits for Python's lock with a generator's, one with
    Python's for the generator's."""

    def read():
        for _ in range(500):
            with RandomStates():
                cycle = [torch.zeros(1)]
                cycle.append(cycle)  # which the collector frees

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    threads = [threading.Thread(target=read, daemon=True) for _ in range(8)]
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(3)
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert not any(each.is_alive() for each in threads)
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
