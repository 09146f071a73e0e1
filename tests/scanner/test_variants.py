"""Ways that only a GPU can decide between: what chooses them, that all are right."""

import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch
from decisions import DECISIONS
from emulation import VARIANTS
from torch import nn

from overflow_fast import DebugUnderflowOverflow

READER = Path(__file__).parents[2] / "csrc/scan/variants.cpp"
EMPTY = [-1, 0, 0, 0]
POSITIVE_INF, NEGATIVE_INF, NAN = 1, 2, 4  # kinds, as in csrc/scan/stat.h


def watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, DebugUnderflowOverflow(model, _defer=True)


@pytest.mark.parametrize(
    "variable, value",
    [(d.variable, value) for d in DECISIONS for value in d.values],
)
def test_every_value_that_is_to_be_measured_is_taken(
    emulated, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    model, detector = watched()
    model(torch.ones(2, 4))
    assert not detector.coverage.not_scanned


@pytest.mark.parametrize("variable", [decision.variable for decision in DECISIONS])
@pytest.mark.parametrize("value", ["none", "-1", "10000", "4 "])
def test_a_value_that_means_nothing_is_told(emulated, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    model, detector = watched()
    model(torch.ones(2, 4))
    (why,) = detector.coverage.not_scanned
    assert variable in why and "must be" in why and f"got {value}" in why


def test_every_variable_is_decided():
    decided = {decision.variable for decision in DECISIONS}
    assert {name for variant in VARIANTS.values() for name in variant} <= decided
    assert set(re.findall(r"OVERFLOW_FAST_\w+", READER.read_text())) == decided
    assert all(decision.margin >= 0 for decision in DECISIONS)


def test_a_step_ends_in_one_launch(emulated, variant):
    model, _ = watched()
    for _ in range(3):
        model(torch.ones(2, 4))
    is_launched = variant in ("kernel", "mapped")
    assert emulated.state.num_ends == (3 if is_launched else 0)


@pytest.mark.parametrize("variant", ["kernel", "mapped"], indirect=True)
def test_a_launch_that_fails_at_the_end_is_told(emulated, variant):
    model, detector = watched()
    emulated.state.fails_ends = 1
    with pytest.raises(ValueError, match="inf/nan detected"):  # so much has been seen
        model(torch.full((2, 4), torch.inf))
    assert list(detector.coverage.not_scanned) == ["launch failed"]
    emulated.state.fails_ends = 0
    model(torch.ones(2, 4))
    assert "inf" not in detector.frames[-1]
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(torch.full((2, 4), torch.inf))


# The kernel itself, by the definition of what it does.


def slots_of(count):
    """Slots of all kinds in turn: clean, inf, -inf, both, nan, empty."""
    one_inf = 4
    kinds = [
        [3, 9, 0, 0],
        [3, 9, 0, one_inf + POSITIVE_INF],
        [3, 9, 0, one_inf + NEGATIVE_INF],
        [3, 9, 2, 2 * one_inf + POSITIVE_INF + NEGATIVE_INF],
        [3, 9, 7, 0],
        EMPTY,
    ]
    return torch.tensor(list(itertools.islice(itertools.cycle(kinds), count)))


def pointer(tensor):
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def end_step(emulated, slots, masks, flags, sets_flags, host, epoch, number):
    emulated.library.emulated_step_end(
        pointer(slots),
        ctypes.c_int64(len(slots)),
        pointer(masks),
        ctypes.c_int64(0 if masks is None else masks.stride(0)),
        pointer(flags),
        ctypes.c_bool(sets_flags),
        pointer(host),
        pointer(epoch),
        ctypes.c_uint64(number),
    )


@pytest.mark.parametrize("count", [1, 6, 33, 1025, 4096])
def test_the_slots_are_published_and_reset(emulated, count):
    slots, host = slots_of(count), torch.zeros(count + 1, 4, dtype=torch.long)
    epoch = torch.tensor([6, 99])
    end_step(emulated, slots, None, None, True, host, epoch, 7)
    assert host[:count].equal(slots_of(count)) and not host[count].any()
    assert slots.tolist() == [EMPTY] * count
    assert epoch.tolist() == [7, 99]


def test_without_memory_for_them_the_slots_are_only_reset(emulated):
    slots = slots_of(6)
    end_step(emulated, slots, None, None, True, None, None, 1)
    assert slots.tolist() == [EMPTY] * 6


@pytest.mark.parametrize("before", [0.0, 1.0])
@pytest.mark.parametrize("sets_flags", [True, False])
@pytest.mark.parametrize(
    "at, mask, is_up",
    [
        (1, POSITIVE_INF, True),
        (1, NEGATIVE_INF | NAN, False),
        (2, NEGATIVE_INF, True),
        (2, POSITIVE_INF | NAN, False),
        (3, NAN, True),
        (4, NAN, True),
        (4, POSITIVE_INF | NEGATIVE_INF, False),
        (0, POSITIVE_INF | NEGATIVE_INF | NAN, False),
        (5, POSITIVE_INF | NEGATIVE_INF | NAN, False),
        (1200, POSITIVE_INF, False),
        (1201, POSITIVE_INF, True),
    ],
)
def test_masks_say_what_puts_up_a_flag(emulated, at, mask, is_up, sets_flags, before):
    masks = torch.zeros(2, 3000, dtype=torch.long)
    masks[1, 10 + at] = mask  # of a longer list's, as a chunk has them
    flags = torch.tensor([before, before])
    end_step(emulated, slots_of(1300), masks[:, 10:], flags, sets_flags, None, None, 1)
    kept = 0.0 if sets_flags else before
    assert flags.tolist() == [kept, 1.0 if is_up else kept]
