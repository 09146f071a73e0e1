"""Stats that lie on a device: when they are waited for, and what may go wrong."""

import gc
import logging
import weakref
from collections.abc import Mapping
from threading import Thread, get_native_id

import parity
import pytest
import torch
from assembled import Assembled
from parity import small_model, spoil
from torch import nn

from overflow_fast import DebugUnderflowOverflow

DETECTED = "inf/nan detected"
SYNCS = ["step", "lagged", "frame"]
CLEAN, BAD = torch.ones(3, 4), torch.tensor([[1.0, 2.0, 3.0, torch.inf]])

pytestmark = pytest.mark.usefixtures("emulated")
STEP_ENDS = ["default", "kernel", "mapped"]
by_every_step_end = pytest.mark.parametrize("variant", STEP_ENDS, indirect=True)


def watch(model, **options):
    return DebugUnderflowOverflow(model, _defer=True, **options)


def printed(function):
    """What a function prints, and whether it detected something."""
    text, error = parity.printed(function)
    assert error is None or DETECTED in error
    return text, error is not None


@by_every_step_end
@pytest.mark.parametrize("sync", SYNCS)
def test_every_sync_gives_the_same_report(sync, variant):
    def report(**options):
        torch.manual_seed(0)
        model = small_model()
        detector = DebugUnderflowOverflow(model, **options)

        def drive():
            for batch in (CLEAN, CLEAN, BAD):
                model(batch)
            detector.check()

        return printed(drive)

    expected = report()
    assert expected[1]
    assert report(_defer=True, sync=sync) == expected


@torch.no_grad()
def test_a_frame_is_one_launch(emulated):
    model = small_model()
    watch(model)
    model(CLEAN)
    # The inner Sequential and the root list nothing that was not scanned before.
    assert emulated.state.num_scans == len(list(model.modules())) - 2


@by_every_step_end
@torch.no_grad()
@pytest.mark.parametrize("sync, waits", [("step", 1), ("lagged", 0), ("frame", 5)])
def test_how_often_the_host_waits(emulated, sync, waits, variant):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    detector = watch(model, sync=sync)
    emulated.state.holds_events = True
    model(CLEAN)
    assert emulated.state.num_waits == detector.recorder.num_syncs == waits
    detector.check()
    assert emulated.state.num_waits == max(1, waits)


@by_every_step_end
def test_lagged_tells_when_the_stats_have_come(emulated, variant):
    model = nn.Linear(4, 4)
    watch(model, sync="lagged")
    emulated.state.holds_events = True
    model(BAD)
    emulated.state.holds_events = False
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=DETECTED):
        model(CLEAN)
    assert calls == []  # before the next forward began
    assert emulated.state.num_waits == 0


def test_lagged_tells_one_step_later_at_the_latest(emulated):
    model = nn.Linear(4, 4)
    watch(model, sync="lagged")
    emulated.state.holds_events = True
    model(BAD)
    with pytest.raises(ValueError, match=DETECTED):
        model(CLEAN)
    assert emulated.state.num_waits == 1


def test_frame_raises_from_the_hook_of_the_bad_module():
    model = small_model()
    spoil(model[2][0])
    watch(model, sync="frame")
    calls = []
    model[3].register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=DETECTED):
        model(CLEAN)
    assert calls == []


@pytest.mark.parametrize("sync", ["step", "lagged"])
def test_what_is_on_its_way_is_judged_when_watching_ends(emulated, sync, as_kept):
    emulated.state.holds_events = True
    model = nn.Linear(4, 4)
    detector = watch(model, sync=sync)
    text, detected = printed(lambda: (model(BAD), detector.remove()))
    assert detected
    as_kept(text)

    def block():
        with watch(model, sync=sync):
            model(BAD)

    assert printed(block)[1]


def test_the_users_exception_is_not_replaced_by_a_late_verdict(emulated, capsys):
    emulated.state.holds_events = True
    model = nn.Linear(4, 4)
    with pytest.raises(KeyError, match="mine"), watch(model, sync="lagged"):
        model(BAD)
        raise KeyError("mine")
    assert "Detected inf/nan" in capsys.readouterr().out


@by_every_step_end
@pytest.mark.parametrize("sync", SYNCS)
def test_slots_are_clean_in_the_next_step(sync, variant):
    model = nn.Linear(4, 4)
    detector = watch(model, sync=sync)
    assert printed(lambda: (model(BAD), detector.check()))[1]
    for _ in range(5):
        model(CLEAN)
    detector.check()
    assert "batch number=5" in detector.frames[-1]


MODES = {"inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("order", [["inference", "grad"], ["grad", "inference"]])
@pytest.mark.parametrize("is_emulated", [True, False])
def test_steps_in_and_out_of_inference_mode(emulated, sync, order, is_emulated):
    if not is_emulated:
        emulated.unregister()  # torch operations scan then
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    detector = watch(model, sync=sync)
    for mode in [*order, *order]:
        with MODES[mode]():
            model(CLEAN)
    detector.check()
    assert not detector.coverage.not_scanned
    for mode in order:
        with MODES[mode]():
            assert printed(lambda: (model(BAD), detector.check()))[1]


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(4)),
    "vmap": lambda f: torch.vmap(f)(torch.ones(3, 4)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("is_emulated", [True, False])
def test_steps_inside_a_transform(emulated, name, is_emulated):
    if not is_emulated:
        emulated.unregister()
    model = nn.Linear(4, 4)
    detector = watch(model)
    TRANSFORMS[name](lambda x: model(x).sum())
    assert detector.coverage.not_scanned == {"inside a torch.func transform": 2}
    assert "weight" in detector.frames[-1].splitlines()[-4]
    assert printed(lambda: model(BAD))[1]


class Many(Assembled):
    def forward(self, x):
        return tuple(x + i for i in range(self.count))


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, count",
    [
        *(("default", count) for count in (1, 4, 5, 89)),
        *(("lists", count) for count in (1, 5, 180)),
        ("mapped", 4097),
    ],
    indirect=["variant"],
)
def test_a_frame_of_any_number_of_tensors(count, variant):
    model = Many(count=count)
    detector = watch(model, max_frames_to_save=None)
    for _ in range(2):
        model(torch.ones(2))
    lines = detector.frames[-1].splitlines()
    values = [float(line.split()[1]) for line in lines if "output" in line]
    assert values == [float(f"{1 + i:.2e}") for i in range(count)]


# Graphs: the hooks run while it is captured, the scans whenever it is replayed.


@torch.no_grad()
def captured(emulated, model, static, **options):
    detector = watch(model, **options)
    model(static)
    with emulated.capture():
        detector.graphs_output = model(static)  # a graph keeps its memory
    return detector


@by_every_step_end
@pytest.mark.parametrize("sync", SYNCS)
def test_a_replay_is_judged_by_check(emulated, sync, variant, as_kept):
    static = CLEAN.clone()
    model = nn.Linear(4, 4)
    detector = captured(emulated, model, static, sync=sync)
    detector.check()
    emulated.replay()
    detector.check()
    static[1, 2] = torch.nan
    emulated.replay()
    text, detected = printed(detector.check)
    assert detected
    as_kept(text)
    static.fill_(1.0)
    emulated.replay()
    detector.check()


def test_a_bad_replay_is_not_forgotten_when_clean_ones_follow(emulated):
    static = CLEAN.clone()
    detector = captured(emulated, nn.Linear(4, 4), static)
    static[0, 0] = torch.inf
    emulated.replay()
    static.fill_(1.0)
    emulated.replay()
    assert printed(detector.check)[1]


def test_nothing_waits_while_a_graph_is_captured(emulated):
    static = CLEAN.clone()
    model = nn.Linear(4, 4)
    detector = watch(model, sync="lagged")
    emulated.state.holds_events = True
    model(static)
    with emulated.capture(), torch.no_grad():
        for _ in range(3):
            model(static)  # a wait here raises in the emulation
            detector.check()
    assert emulated.state.num_waits == 0 and not detector.coverage.not_scanned


def test_a_captured_scan_is_not_taken_from_what_was_scanned_before(emulated):
    class Mixed(Assembled):
        def forward(self, x):
            self.first(x)
            with emulated.capture():
                return self.second(x)

    model, static = Mixed(first=nn.Identity(), second=nn.Identity()), CLEAN.clone()
    detector = watch(model)
    model(static)
    model(static)
    static[0, 0] = torch.nan
    emulated.replay()
    assert printed(detector.check)[1]


def test_graphs_that_are_not_replayed_say_nothing(emulated, as_kept):
    static = CLEAN.clone()
    detector = captured(emulated, nn.Linear(4, 4), static, trace_batch_nums=[1])
    assert printed(detector.check) == ("", False)
    emulated.replay()
    as_kept(printed(detector.check)[0].splitlines()[0])


def test_a_capture_without_a_forward_before_says_why(emulated, caplog, as_kept):
    model = nn.Linear(4, 4)
    detector = watch(model)
    with emulated.capture():
        model(CLEAN)
    assert list(detector.coverage.not_scanned.values()) == [4]
    as_kept(list(detector.coverage.not_scanned))


def test_memory_that_a_graph_writes_to_outlives_the_detector(emulated):
    static = CLEAN.clone()
    model = nn.Linear(4, 4)
    detector = captured(emulated, model, static)
    detector.remove()
    recorder = weakref.ref(detector)
    del detector
    gc.collect()
    assert recorder() is None
    others = [torch.zeros(4096, 4, dtype=torch.int64) for _ in range(64)]
    emulated.replay()
    assert not any(tensor.any() for tensor in others)


# What may go wrong.


def test_a_launch_that_fails_is_made_up_for_by_torch(emulated, caplog):
    model = nn.Linear(4, 4)
    detector = watch(model)
    emulated.state.fails_scans = True
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        for _ in range(3):
            model(CLEAN)
        with pytest.raises(ValueError, match=DETECTED):
            model(BAD)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "launch failed" in caplog.text and "with details" not in caplog.text
    coverage = detector.coverage
    assert not coverage.not_scanned
    assert coverage.tensors_listed == coverage.tensors_scanned == 16


@by_every_step_end
@pytest.mark.parametrize("sync", SYNCS)
def test_a_device_that_is_lost_is_reported_and_leaves_no_stale_slots(
    emulated, sync, variant
):
    model = nn.Linear(4, 4)
    detector = watch(model, sync=sync)
    model(CLEAN)
    emulated.state.fails_events = True
    model(CLEAN)
    detector.check()
    emulated.state.fails_events = False
    assert "not scanned" in detector.frames[-1] and "device lost" in detector.frames[-1]
    assert list(detector.coverage.not_scanned) == ["device lost"]
    for _ in range(3):
        model(CLEAN)
    detector.check()
    assert "device lost" not in detector.frames[-1]


def test_a_device_that_is_lost_before_the_check_of_a_graph_is_reported(emulated):
    detector = captured(emulated, nn.Linear(4, 4), CLEAN.clone())
    emulated.replay()
    emulated.state.fails_streams = 1
    detector.check()
    assert detector.coverage.not_scanned == {"device lost": 4}


@by_every_step_end
def test_slots_that_could_not_be_sent_are_not_used_again(emulated, variant):
    model = nn.Sequential(nn.Linear(4, 4))
    lost = model.register_forward_hook(
        lambda *_: setattr(emulated.state, "fails_streams", 1)
    )
    detector = watch(model)
    with pytest.raises(ValueError, match=DETECTED):  # its scans have seen that much
        model(BAD)
    lost.remove()
    emulated.state.fails_streams = 0
    assert set(detector.coverage.not_scanned) == {"device lost"}
    model(CLEAN)
    assert "inf" not in detector.frames[-1]


@by_every_step_end
def test_memory_that_cannot_be_had_is_reported_and_asked_for_in_the_next_step(
    emulated, variant
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    detector = watch(model)
    emulated.state.fails_events = True  # a new chunk is reset and its reset is marked
    model(BAD)
    assert detector.coverage.not_scanned == {
        "device lost": detector.coverage.tensors_listed
    }
    emulated.state.fails_events = False
    with pytest.raises(ValueError, match=DETECTED):
        model(BAD)


class Empty(Mapping):
    """A mapping whose `items()`, which the detector calls, can do anything."""

    def __getitem__(self, key):
        raise KeyError(key)

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())


def test_a_step_that_is_ended_while_a_frame_is_recorded(as_kept):
    class Ends(Empty):
        def items(self):
            detector.check()  # as another thread could
            return ()

    class Model(Assembled):
        def forward(self, x):
            return self.child(x), Ends()

    model = Model(child=nn.Identity())
    detector = watch(model)
    model(CLEAN)
    assert "not scanned output[0]: " in detector.frames[-1]
    as_kept(list(detector.coverage.not_scanned))


def test_a_slot_that_nobody_wrote_is_not_clean(emulated, as_kept):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    detector = watch(model)
    model(CLEAN)
    static = CLEAN.clone()
    with emulated.capture():
        model(static)
    emulated.library.emulated_drop_node()
    emulated.replay()
    detector.check()
    as_kept(list(detector.coverage.not_scanned))


@by_every_step_end
@torch.no_grad()
def test_streams_wait_for_each_other(emulated, variant):
    class TwoStreams(Assembled):
        def forward(self, x):
            x = self.first(x)
            emulated.state.stream = 7
            x = self.second(x)
            emulated.state.stream = 0
            return x

    model = TwoStreams(first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    watch(model)
    model(CLEAN)
    # The side stream waits for the slots' first reset, the copy for the side stream.
    assert emulated.state.num_stream_waits == 2
    model(CLEAN)
    assert emulated.state.num_stream_waits == 4
    model.first, model.second = nn.Identity(), nn.Identity()
    model(CLEAN)  # only the root is watched now, on one stream
    assert emulated.state.num_stream_waits == 4


class OnStream(nn.Module):
    """A layer on a stream of its own."""

    def __init__(self, emulated, stream):
        super().__init__()
        self.emulated, self.stream, self.layer = emulated, stream, nn.Linear(4, 4)

    def forward(self, x):
        self.emulated.state.stream = self.stream
        x = self.layer(x)
        self.emulated.state.stream = 0
        return x


@by_every_step_end
@torch.no_grad()
def test_a_stream_that_ends_within_the_step_is_asked_for_nothing(emulated, variant):
    model = nn.Sequential(nn.Linear(4, 4), OnStream(emulated, 7))

    def end(*_):
        emulated.state.ended_stream = 7

    model[1].register_forward_hook(end)
    detector = watch(model)
    model(CLEAN)
    assert not detector.coverage.not_scanned
    assert emulated.state.num_stream_waits == 2


@torch.no_grad()
def test_a_stream_that_lasts_has_one_event_in_a_step(emulated):
    def num_records(depth):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        watch(model)
        model(CLEAN)
        before = emulated.state.num_records
        model(CLEAN)
        return emulated.state.num_records - before

    emulated.state.has_own_streams, emulated.state.stream = 1, 7
    assert num_records(2) == num_records(9)
    emulated.state.stream = 8
    assert num_records(2) < num_records(9)


@torch.no_grad()
def test_a_capture_is_that_of_its_thread(emulated):
    """Within a frame, another thread runs one of the same model in a capture."""

    class Elsewhere(Empty):
        has_run = False

        def items(self):
            if not Elsewhere.has_run:
                Elsewhere.has_run = True
                thread = Thread(target=capture)
                thread.start()
                thread.join()
            return ()

    class Model(Assembled):
        def forward(self, x, value):
            return self.child(x), value

    def capture():
        emulated.state.capturing_thread = get_native_id()
        emulated.state.is_capturing = 1
        model(CLEAN, None)

    model = Model(child=nn.Identity())
    watch(model)
    model(CLEAN, None)
    with pytest.raises(ValueError, match=DETECTED):
        model(BAD, Elsewhere())
    assert Elsewhere.has_run


@torch.no_grad()
def test_a_stream_that_is_first_used_as_slots_run_out_waits_for_their_reset(emulated):
    class Two(Assembled):
        def forward(self, many, few):
            self.first(many)
            emulated.state.stream = 7
            self.second(few)  # its first slot is the chunk's last
            emulated.state.stream = 0

    many = [torch.ones(1) for _ in range(4095)]
    model = Two(first=nn.Identity(), second=nn.Identity())
    watch(model)
    # So that the frame of the root lists nothing that was not scanned before.
    model(many, [torch.ones(1), torch.ones(1)])
    assert emulated.state.num_stream_waits == 2


@by_every_step_end
@torch.no_grad()
def test_events_are_recorded_again(emulated, variant):
    model = nn.Sequential(nn.Linear(4, 4), OnStream(emulated, 7))
    watch(model, sync="lagged")
    for _ in range(3):
        model(CLEAN)
    made = emulated.state.num_events
    for _ in range(10):
        model(CLEAN)
    assert emulated.state.num_events == made


def test_wrong_sync(as_kept):
    as_kept.error(ValueError, DebugUnderflowOverflow, nn.Linear(1, 1), sync="never")
