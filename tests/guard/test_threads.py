"""Forwards of one model in several threads: each is a step of its own."""

import threading

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import _C, NonFiniteError, OverflowGuard
from overflow_fast.detector import steps
from overflow_fast.detector.hooks import threads_in
from overflow_fast.guard.watching.unjudged_frames import UnjudgedFrames

NUM_THREADS, NUM_FORWARDS = 6, 12


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(torch.log(self.first(x).abs() + x.mean(1, keepdim=True)))


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("width", [8, 400])  # a scan of many bytes releases the GIL
def test_each_thread_gets_the_error_of_its_own_forward(hurry, width, is_training):
    model = Net(width).train(is_training)
    wrong = []

    def work(number):
        for i in range(NUM_FORWARDS):
            x = torch.full((number + 3, width), 1.0 + number)
            is_bad = (i + number) % 3 == 0
            if is_bad:
                x[number] = float("-inf")
            try:
                with torch.no_grad():
                    model(x)
                got = None
            except NonFiniteError as error:
                got = error.report
            if (got is not None) != is_bad:
                wrong.append((number, i, got))
            # The batch of this thread, and no frame of another's.
            if got is not None and f"of its {x.numel()} float32 values" not in str(got):
                wrong.append((number, i, str(got)))

    with OverflowGuard(model) as guard:
        threads = [
            threading.Thread(target=work, args=(number,))
            for number in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert guard.check() is None


def test_a_forward_in_a_thread_is_no_part_of_a_step_that_runs():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []

    class Asks(Assembled):
        """Its forward waits for one of the same model in another thread."""

        def forward(self, x, asks=True):
            if asks:
                thread = threading.Thread(target=evaluate)
                thread.start()
                thread.join()
            return self.inner(x)

    def evaluate():
        try:
            with torch.no_grad():
                net(torch.full((2, 3), float("nan")), asks=False)
        except NonFiniteError as error:
            found.append(error.report)

    net = Asks(inner=model)
    with OverflowGuard(net, optimizer) as guard:
        net(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        assert len(found) == 1
        assert found[0].moment == "evaluation"
        assert guard.num_skipped == 0
        assert guard.step == 1


def test_the_batch_behind_forwards_that_overlapped_has_its_own_number():
    model = nn.Linear(2, 1)
    began, ended = threading.Event(), threading.Event()
    is_first = threading.local()

    def wait(*_):
        """The first forward ends its call while the other has yet to be judged."""
        if getattr(is_first, "value", False):
            began.set()
            assert ended.wait(30)

    def run_first():
        is_first.value = True
        with torch.no_grad():
            model(torch.ones(1, 2))

    with OverflowGuard(model) as guard:
        watch = guard._parts.watches[0]
        watch.on_forward_end, before = wait, watch.on_forward_end
        first = threading.Thread(target=run_first)
        first.start()
        assert began.wait(30)
        with torch.no_grad():
            model(torch.ones(1, 2))
        ended.set()
        first.join()
        watch.on_forward_end = before
        with pytest.raises(NonFiniteError), torch.no_grad():
            model(torch.full((1, 2), float("nan")))
        assert watch._roots == {}


def test_a_thread_whose_forward_lost_its_hooks_counts_on_with_the_others():
    class Waits(nn.Linear):
        def forward(self, x):
            for began, ends in waiting.pop(threading.get_ident(), ()):
                began.set()
                assert ends.wait(30)
            return super().forward(x)

    waiting, model, batches = {}, Waits(2, 1), []
    events = [threading.Event() for _ in range(4)]
    goes_on, idle = threading.Event(), threading.Semaphore(0)

    def call(value):
        try:
            with torch.no_grad():
                model(torch.full((1, 2), value))
        except NonFiniteError as error:
            batches.append(error.report.verdict.batch)

    def run(began, ends):
        waiting[threading.get_ident()] = [(began, ends)]
        call(1.0)
        idle.release()
        assert goes_on.wait(30)
        call(float("nan"))

    with OverflowGuard(model) as guard:
        threads = [
            threading.Thread(target=run, args=each) for each in (events[:2], events[2:])
        ]
        for thread, began in zip(threads, events[::2], strict=True):
            thread.start()
            assert began.wait(30)
        guard.disable()
        for ends in events[1::2]:
            ends.set()
            assert idle.acquire(timeout=30)
        guard.enable()
        for value in (1.0, 1.0, float("nan")):
            call(value)
        goes_on.set()
        for thread in threads:
            thread.join()
        assert len(batches) == 3 and len(set(batches)) == 3
        assert min(batches[1:]) > batches[0]


class Waits(nn.Linear):
    """Its forward ends once it may, where it is asked to wait."""

    def __init__(self):
        super().__init__(2, 1)
        self.began, self.ends = threading.Event(), threading.Event()
        self.waits = False

    def forward(self, x):
        if self.waits:
            self.waits = False
            self.began.set()
            assert self.ends.wait(30)
        return super().forward(x)


def is_bad(model, value):
    try:
        with torch.no_grad():
            model(torch.full((1, 2), value))
    except NonFiniteError:
        return True
    return False


@pytest.mark.parametrize("how", ["enable", "another", "first"])
@pytest.mark.parametrize("running", [1.0, float("nan")])
@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}], ids=["all", "outputs"])
def test_a_forward_that_ran_when_the_guard_was_switched_on_is_left_out(
    how, running, options
):
    model = nn.Sequential(nn.Linear(2, 2), Waits(), nn.Linear(1, 1))
    inner, found, nan = model[1], [], float("nan")
    guard = None if how == "first" else OverflowGuard(model, **options)
    inner.waits = True
    thread = threading.Thread(
        target=lambda: found.extend(
            is_bad(model, value) for value in (running, nan, 1.0)
        )
    )
    thread.start()
    assert inner.began.wait(30)
    if how == "enable":
        guard.disable()
        guard.enable()
    elif guard is not None:
        guard.remove()
    if how != "enable":
        guard = OverflowGuard(model, **options)
    assert [is_bad(model, value) for value in (1.0, nan, 1.0)] == [False, True, False]
    inner.ends.set()
    thread.join()
    assert found == [False, True, False]  # it began before: nothing is said of it
    assert guard.metrics()["requests_total"] == 5
    assert not is_bad(model, 1.0) and is_bad(model, nan)
    assert guard.check() is None and guard.coverage().failures == 0
    guard.remove()


def test_what_another_guard_has_raised_is_not_of_the_next_forward():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with OverflowGuard(model), OverflowGuard(model):
        found = [is_bad(model, v) for v in (1.0, float("nan"), 1.0, 1.0)]
    assert found == [False, True, False, False]


@pytest.mark.slow
def test_switching_on_and_off_under_running_threads_blames_no_innocent_one(hurry):
    model, found, ends = Net(8).eval(), [], threading.Event()
    guard = OverflowGuard(model)

    def work(number):
        while not ends.is_set():
            value = float("nan") if number == 0 else 1.0
            try:
                with torch.no_grad():
                    model(torch.full((2, 8), value))
            except Exception as error:
                # Of a forward that raises, torch walks through the table of hooks that
                # the guard is changing, and may raise that in its place.
                if number or not isinstance(error, (NonFiniteError, RuntimeError)):
                    found.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        guard.disable()
        guard.enable()
    ends.set()
    for thread in threads:
        thread.join()
    assert found == []
    guard.remove()


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_forward_between_whose_hooks_the_guard_is_switched_belongs_to_no_one(value):
    """torch calls the hooks that a module had when the first of them was called."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    guard = OverflowGuard(model)

    def switch(*_):
        handle.remove()
        guard.disable()
        guard.enable()

    handle = model.register_forward_hook(switch, prepend=True)
    assert not is_bad(model, value)
    assert [is_bad(model, v) for v in (1.0, float("nan"), 1.0)] == [False, True, False]
    assert guard.coverage().failures == 0 and guard.check() is None
    guard.remove()


def test_a_forward_that_begins_while_the_hooks_are_put_on_is_left_out(monkeypatch):
    model, nan = nn.Sequential(nn.Linear(2, 2), Waits(), nn.Linear(1, 1)), float("nan")
    guard, inner, found = OverflowGuard(model), model[1], []
    inner.waits = True
    thread = threading.Thread(target=lambda: found.append(is_bad(model, nan)))
    guard.disable()

    def find(module):
        running = threads_in(module)
        thread.start()
        inner.began.wait(1)  # it is there, or waits until the hooks are on
        return running

    monkeypatch.setattr(steps, "threads_in", find)
    guard.enable()
    monkeypatch.undo()
    assert inner.began.wait(30)

    def let_end(*_):
        inner.ends.set()
        thread.join(30)

    model[0].register_forward_hook(let_end)  # while the forward of another runs
    assert [is_bad(model, value) for value in (1.0, nan, 1.0)] == [False, True, False]
    assert len(found) == 1  # True if it has waited for the hooks
    assert guard.coverage().failures == 0 and guard.check() is None
    guard.remove()


def test_a_replay_ends_no_forward_that_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with OverflowGuard(model) as guard:
        (watch,), thread = guard._parts.watches, threading.get_ident()
        watch._strays.add(thread)
        with _C.Unwatched():
            assert not watch.resumes("before_root", model)
        assert watch._strays == {thread}
        assert watch.resumes("before_root", model) and not watch._strays


def test_a_note_of_weights_that_comes_late_is_of_no_call(monkeypatch):
    """As where another thread has listed a call between weights and their note."""

    def note(frames, batch):
        for order in range(1, 20):
            frames._evaluated_weights[_C.Recorder.num_frames() + order] = batch

    monkeypatch.setattr(UnjudgedFrames, "note_evaluated_weights", note)
    model, x = Net(8).eval(), torch.full((3, 8), float("-inf"))
    with OverflowGuard(model), torch.no_grad():
        for _ in range(3):
            with pytest.raises(NonFiniteError):
                model(x)


class Relayed:
    """A recorder, one function of which is another."""

    def __init__(self, recorder, record_output):
        self._recorder, self._function = recorder, record_output

    def __getattr__(self, name):
        return getattr(self._recorder, name)

    def record_output(self, *given):
        return self._function(self._recorder, *given)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_no_other_thread_takes_what_an_output_has_just_shown(monkeypatch, is_recorded):
    """As a forward does that an exception has left: it takes what nobody judges."""
    record = _C.Recorder.record_output
    model, x = Net(8).eval(), torch.full((3, 8), float("-inf"))

    def record_output(recorder, batch, *named):
        found = record(recorder, batch, *named)
        watch.frames.take_evaluated(batch - 100)
        return found

    guard = OverflowGuard(model, watch="tripwire", explain=False)
    watch = guard._parts.watches[0]
    monkeypatch.setattr(watch, "recorder", Relayed(watch.recorder, record_output))
    with guard, torch.no_grad(), pytest.raises(NonFiniteError):
        if is_recorded:
            with guard.request():
                guard.record(found=x)
        else:
            model(x)
