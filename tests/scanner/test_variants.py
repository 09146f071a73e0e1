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


# Frames that share a launch: what is exact about it, and what is said where it is not.


@pytest.fixture
def held(emulated, monkeypatch):
    """The emulated device, where a launch serves four frames."""
    monkeypatch.setenv("OVERFLOW_FAST_HELD_FRAMES", "4")
    return emulated


class Chain(nn.Module):
    """Identities of new tensors; something is done between the second and the third."""

    def __init__(self, between=lambda x: None, length=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(length))
        self.between = between

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x + 1)
            if i == 1:
                self.between(x)
        return x


def frames_of(between=lambda x: None, start=1.0, **options):
    model = Chain(between)
    detector = DebugUnderflowOverflow(model, _defer=True, **options)
    model(torch.full((2, 4), start))
    return detector


@pytest.mark.parametrize("memo, launches", [(True, 2), (False, 7)])
def test_held_frames_share_launches(held, memo, launches):
    detector = frames_of(memo=memo)
    assert held.state.num_scans == launches  # the root's output is known by then
    assert not detector.coverage.not_scanned
    found = list(detector.frames)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OVERFLOW_FAST_HELD_FRAMES")
        assert list(frames_of(memo=memo).frames) == found


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.mul_(2),
        lambda x: x.untyped_storage().resize_(1 << 16),
    ],
    ids=["a write", "other memory"],
)
def test_what_changed_while_it_was_held_is_listed_as_not_scanned(held, between):
    detector = frames_of(between)
    assert set(detector.coverage.not_scanned) == {"its scan did not run"}


def test_a_held_tensor_that_is_let_go_is_scanned(held):
    def let_go(x):
        x.data = torch.zeros(5, 4)

    detector = frames_of(let_go)
    assert not detector.coverage.not_scanned
    assert "3.00e+00 3.00e+00 output" in "".join(detector.frames[1].split("\n")[-1:])


def test_held_scans_run_on_their_own_stream(held):
    model, streams = Chain(lambda x: setattr(held.state, "stream", 7)), []
    detector = DebugUnderflowOverflow(model, _defer=True)
    model.layers[2].register_forward_hook(
        lambda *_: streams.append((held.state.num_scans, held.state.scanned_on))
    )
    model(torch.ones(2, 4))
    assert streams == [(1, 0)]  # the other stream's scan waits
    assert (held.state.num_scans, held.state.scanned_on) == (3, 7)
    assert not detector.coverage.not_scanned


def test_no_graph_gets_the_scans_that_were_held(held):
    model = Chain()
    detector = DebugUnderflowOverflow(model, _defer=True)
    model(torch.ones(2, 4))
    scans = held.state.num_scans
    model.between = lambda x: setattr(held.state, "is_capturing", 1)
    model(torch.ones(2, 4))
    held.state.is_capturing = 0
    assert held.state.num_scans == scans + 5  # of the graph, one for each frame
    detector.check()
    assert held.state.num_scans == scans + 6
    assert not detector.coverage.not_scanned


def test_a_bad_value_is_found_though_its_tensor_was_held(held):
    with pytest.raises(ValueError, match="inf/nan detected"):
        frames_of(lambda x: x.detach().clone(), start=torch.inf)
