"""A replay leaves the program's signals, finalizers, streams and memory alone."""

import contextlib
import csv
import ctypes
import functools
import gc
import io
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

from overflow_fast import OverflowGuard, explain
from overflow_fast.explainer.effects.held_signals import held_signals
from overflow_fast.explainer.effects.quiet import terminals
from overflow_fast.explainer.effects.rule import EffectRule, StoppedError

NUMBERS = signal.SIGUSR1, signal.SIGUSR2
LIBRARY = ctypes.CDLL(None)


class Net(nn.Module):
    """Takes a logarithm of what may be negative, behind what it is given to do."""

    def __init__(self, act=lambda: None):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.act = act

    def forward(self, x):
        h = self.norm(self.a(x))
        self.act()
        return self.b(torch.tanh(h)) + torch.log(x.mean(1, keepdim=True))


def batch(is_bad=True):
    x = 1 + torch.rand(4, 6)
    x[1] *= -1 if is_bad else 1
    return x


def step(guard, model, optimizer, x):
    loss = guard.run(lambda: model(x).mean())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@contextlib.contextmanager
def guarded(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"explain": True, "max_consecutive_skips": 10**6} | options
    guard = OverflowGuard(model, optimizer, "skip", **options)
    try:
        yield guard, optimizer
    finally:
        guard.remove()


def raise_signals():
    """Sends signals to this thread by a way that is no effect which is known."""
    for number in NUMBERS:
        LIBRARY["raise"](int(number))


@pytest.fixture
def handled():
    """Sets handlers of signals, which are as before afterwards."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield lambda handler: [signal.signal(each, handler) for each in NUMBERS]
    for number, handler in before.items():
        signal.signal(number, handler)


class Saver:
    """Saves the state when it is signalled, as before a preemption."""

    def __init__(self, folder):
        self.folder, self.model, self.numbers, self.saved = folder, None, [], []

    def __call__(self, number, frame):
        assert frame is not None
        self.numbers.append(number)
        path = self.folder / str(len(self.numbers))
        torch.save(self.model.state_dict(), path)
        print("saved", flush=True)
        self.saved.append(torch.load(path))

    def save(self, number, frame):
        self(number, frame)


@pytest.mark.parametrize(
    "kind",
    [
        lambda saver: saver,
        lambda saver: saver.save,
        lambda saver: lambda *given: saver(*given),
        lambda saver: functools.partial(saver),
    ],
)
def test_a_signals_handler_comes_to_its_end(kind, handled, tmp_path, capfd):
    saver = Saver(tmp_path)
    saver.model = model = Net(raise_signals)
    handler = kind(saver)
    handled(handler)
    with guarded(model) as (guard, optimizer):
        step(guard, model, optimizer, batch())
    assert guard.last_report.explanation.cause == "undefined"
    runs = len(saver.numbers) // 2
    assert runs > 2
    assert saver.numbers == list(NUMBERS) * runs
    assert len(saver.saved) == capfd.readouterr().out.count("saved") == 2 * runs
    # In the step itself they come before its skip, which puts the buffers back.
    for state in saver.saved[2:]:
        is_counted = state.pop("norm.num_batches_tracked")
        assert is_counted in (0, 1)
        assert torch.equal(state["a.weight"], model.a.weight)
    assert [signal.getsignal(each) for each in NUMBERS] == [handler] * 2


def test_it_sees_the_state_of_the_program(handled):
    seen = []
    model = Net(raise_signals)
    model.count = 0

    def forward(module, args):
        module.count += 1

    model.register_forward_pre_hook(forward)
    handled(lambda *_: seen.append((model.count, model.a.weight.grad is None)))
    with guarded(model) as (guard, optimizer):
        step(guard, model, optimizer, batch())
    assert seen[:2] == [(1, True)] * 2  # in the forward of the step
    assert seen[2:] == [(1, False)] * (len(seen) - 2)


def test_a_handler_may_set_another_one(handled):
    calls = []

    def first(number, frame):
        calls.append("first")
        handled(lambda *_: calls.append("second"))

    model = Net()
    with guarded(model) as (guard, optimizer):
        step(guard, model, optimizer, batch(is_bad=False))
        model.act = lambda: raise_signals() if held_signals._depth else None
        handled(first)
        step(guard, model, optimizer, batch())
    # Both of the first run were waiting; what came later is the other one's.
    assert calls[:2] == ["first"] * 2
    assert set(calls[2:]) == {"second"}


@pytest.mark.parametrize("error", [TimeoutError, SystemExit, KeyboardInterrupt])
def test_what_a_handler_raises_reaches_the_program(error, handled):
    def handler(number, frame):
        raise error("of the program")

    model = Net()
    with guarded(model) as (guard, optimizer):
        step(guard, model, optimizer, batch(is_bad=False))
        before = {name: each.clone() for name, each in model.state_dict().items()}
        model.act = lambda: raise_signals() if held_signals._depth else None
        handled(handler)
        with pytest.raises(error, match="of the program"):
            step(guard, model, optimizer, batch())
        after = model.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before if "norm" not in n)
        assert held_signals._depth == 0
        assert signal.getsignal(NUMBERS[0]) is handler
        model.act = lambda: None
        optimizer.zero_grad()
        step(guard, model, optimizer, batch(is_bad=False))
        assert guard.coverage().failures == 0
    with pytest.raises(error, match="of the program"):
        model.act = raise_signals
        explain(model, batch(), lambda x: model(x).mean())


def test_ctrl_c_is_heard_at_once(tmp_path):
    def act():
        if held_signals._depth:
            LIBRARY["raise"](int(signal.SIGINT))
            (tmp_path / "later").touch()  # would end the run, and be noted

    model = Net(act)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with guarded(model) as (guard, optimizer):
            with pytest.raises(KeyboardInterrupt):
                step(guard, model, optimizer, batch())
    finally:
        signal.signal(signal.SIGINT, before)
    assert held_signals._depth == 0
    assert guard.last_report is None


def test_handlers_run_while_another_thread_replays(handled, tmp_path):
    numbers, model = [], Net()
    handled(
        lambda number, _: (tmp_path / f"{len(numbers)}").touch() or numbers.append(0)
    )
    with guarded(model) as (guard, optimizer):
        thread = threading.Thread(target=step, args=(guard, model, optimizer, batch()))
        thread.start()
        sent = 0
        while thread.is_alive():
            thread.join(0.005)
            os.kill(os.getpid(), NUMBERS[0])
            sent += 1
    assert guard.last_report.explanation.cause == "undefined"
    assert sent == len(numbers) == len(list(tmp_path.iterdir()))


def test_the_systems_handler_is_left_alone(handled):
    def action():
        found = ctypes.create_string_buffer(256)
        LIBRARY.sigaction(int(NUMBERS[0]), None, found)
        # Of glibc's struct: the handler and mask, and the flags behind it.
        return found.raw[:16], found.raw[136:140]

    handled(lambda *_: None)
    signal.siginterrupt(NUMBERS[0], False)
    before = action()
    held_signals.hold()
    during = action()
    held_signals.release()
    assert before == during == action()


# Finalizers.


class Deleted:
    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()


def finalized(act):
    found = Deleted(None)
    weakref.finalize(found, act)
    return found


REFERENCES = []


def called_back(act):
    found = Deleted(lambda: None)
    REFERENCES.append(weakref.ref(found, lambda reference: act()))
    return found


def suspended(act):
    def items():
        try:
            yield
        finally:
            act()

    found = Deleted(lambda: None)
    found.items = items()
    next(found.items)
    return found


@pytest.mark.parametrize("make", [Deleted, finalized, called_back, suspended])
@pytest.mark.parametrize("is_cycle", [True, False])
def test_finalizers_run_to_their_end(make, is_cycle, tmp_path, capfd):
    if make is suspended and not is_cycle:
        return  # a rule holds generators that were there
    path = tmp_path / "shard"
    path.touch()

    def act():
        print("closed", flush=True)
        path.unlink()

    holder = [make(act)]
    if holder[0].act is None:
        holder[0].act = lambda: None
    if is_cycle:
        holder[0].me = holder[0]
    with EffectRule().applied(60):
        del holder[:]
        gc.collect()
        print("dropped")
    assert not path.exists()
    assert "dropped" not in capfd.readouterr().out
    assert all("_finalizers_apart" not in repr(each) for each in gc.callbacks)


def test_what_calls_the_collector_is_watched_behind_it(tmp_path):
    with pytest.raises(StoppedError, match="files or folders"):
        with EffectRule().applied(60):
            gc.collect()
            os.mkdir(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Streams.


class Slots:
    """A stream that takes no attributes."""

    __slots__ = ("_file",)

    def __init__(self, file):
        self._file = file

    def write(self, text):
        return self._file.write(text)

    def flush(self):
        self._file.flush()


class Tee:
    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for each in self.files:
            each.write(text)

    def flush(self):
        for each in self.files:
            each.flush()


def stdout(monkeypatch, make=lambda stream: stream, is_through=True):
    """Makes the process's stream one whose bytes can be read."""
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, write_through=is_through)
    for name, each in (("stdout", make(stream)), ("__stdout__", stream)):
        monkeypatch.setattr(sys, name, each)
    return stream, data


STREAMS = [lambda stream: stream, Slots, lambda stream: Tee(stream, io.StringIO())]


@pytest.mark.parametrize("make", STREAMS)
def test_what_is_shown_by_a_stream_of_before_is_dropped(make, monkeypatch):
    stream, data = stdout(monkeypatch, make)
    shown, before = sys.stdout, dict(vars(stream))
    rule = EffectRule()
    with rule.applied(60):
        print("own")
        print("own", file=stream)
        print("own", file=shown, flush=True)
        assert stream.write("own\n") == 4
        stream.writelines(["own", "own"])
        assert stream.buffer.write(b"own") == 3
        sys.__stdout__.write("own")
        assert sys.stdout is shown
    with rule.applied(60):  # again
        print("own")
    assert data.getvalue() == b""
    assert vars(stream) == before
    stream.write("later")
    assert data.getvalue() == b"later"


def test_other_threads_write_to_it_meanwhile(monkeypatch):
    stream, data = stdout(monkeypatch)
    is_over = []

    def write():
        while not is_over:
            stream.write("other ")
            print("other", file=stream)
            stream.buffer.write(b"other")

    thread = threading.Thread(target=write)
    thread.start()
    with EffectRule().applied(60):
        while len(data.getvalue()) < 1000:
            stream.write("own")
            stream.buffer.write(b"own")
    is_over.append(True)
    thread.join()
    assert b"own" not in data.getvalue()


def test_a_programs_own_method_of_a_stream_is_kept(monkeypatch):
    stream, data = stdout(monkeypatch)
    calls, plain = [], stream.write
    stream.write = own = lambda text: calls.append(text) or plain(text)
    with EffectRule().applied(60):
        print("own", file=stream, end="")
    assert (calls, stream.write) == ([], own)
    stream.write("later")
    assert data.getvalue() == b"later"


def rows_of(stream):
    rows = csv.writer(stream)
    return lambda text: rows.writerow([text])


KEPT = {
    "write": lambda stream: stream.write,
    "writelines": lambda stream: stream.writelines,
    "csv": rows_of,
}


@pytest.mark.parametrize("is_through", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_what_a_method_of_before_shows_is_dropped(kind, is_through, monkeypatch):
    stream, data = stdout(monkeypatch, is_through=is_through)
    write = KEPT[kind](stream)
    stream.write("before ")
    with EffectRule().applied(60):
        for _ in range(3):
            write("own")
    assert stream.write_through is is_through
    assert not set(vars(stream)) & {"write", "writelines", "flush"}
    stream.write("later")
    stream.flush()
    assert data.getvalue() == b"before later"


def test_bytes_by_a_method_of_before_end_it(monkeypatch):
    stream, data = stdout(monkeypatch)
    kept = stream.buffer.write
    with pytest.raises(StoppedError, match="to the terminal"):
        with EffectRule().applied(60):
            kept(b"own")
    assert data.getvalue() == b""


def test_a_bar_of_before_is_shown_once(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    stream, data = stdout(monkeypatch)
    bar = tqdm.tqdm(total=9, file=stream, mininterval=0)
    shown = data.getvalue()
    with EffectRule().applied(60):
        bar.update()
        bar.set_postfix(loss=1.0)
    assert data.getvalue() == shown
    bar.close()


def test_a_stream_that_was_detached_is_none(monkeypatch):
    stream, _ = stdout(monkeypatch)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream.detach()))
    with EffectRule().applied(60):
        print("own")
    assert id(stream) in terminals()


# Memory.


class Raises(Net):
    def forward(self, x):
        if len(x) == 1:
            try:
                raise ValueError("inner")
            except ValueError as error:
                raise RuntimeError("one sample is too few") from error
        return super().forward(x)


def writes():
    if held_signals._depth:  # in a replay
        with open(os.path.join(tempfile.gettempdir(), "x"), "w"):
            pass


@pytest.mark.parametrize("make", [Net, Raises, lambda: Net(writes)])
@pytest.mark.parametrize("is_loss_outside", [False, True])
def test_a_step_that_was_explained_is_freed_at_once(make, is_loss_outside, tmp_path):
    model, options = make(), {}
    if make is Net:
        options["evidence"] = tmp_path

    def one(is_bad):
        x = batch(is_bad)
        if is_loss_outside:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = step(guard, model, optimizer, x)
        return weakref.ref(x), weakref.ref(loss)

    with guarded(model, **options) as (guard, optimizer):
        one(is_bad=False)
        gc.collect()
        gc.disable()
        try:
            kept = one(is_bad=True)
            one(is_bad=False)
            one(is_bad=False)
            assert [each() for each in kept] == [None, None]
        finally:
            gc.enable()


# What replays change for good.

COUNT = 0
HISTORY: list[int] = []
SAME = 0


class Counts(Net):
    calls = 0

    def forward(self, x):
        global COUNT, SAME
        COUNT, SAME = COUNT + 1, 0
        type(self).calls += 1
        HISTORY.append(len(x))
        return super().forward(x)


class Warns(Net):
    """Python notes in the module's globals where it has warned."""

    def forward(self, x):
        warnings.warn(f"{len(x)} rows", stacklevel=1)
        globals().setdefault("__warningregistry__", {})[len(x), time.time_ns()] = 1
        return super().forward(x)


class Compiles(Net):
    """A compiler writes what it has compiled, and takes it away, as torch's does."""

    def forward(self, x):
        globals()[f"__compiled_fn_{time.time_ns()}"] = globals()[
            "__builtins_dict___1"
        ] = []
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Counts, "`COUNT`, `HISTORY`, `Counts.calls`"),
        (Warns, ""),
        (Compiles, ""),
        (Net, ""),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_note_names_what_replays_change(make, names):
    model = make()
    with guarded(model) as (guard, optimizer):
        step(guard, model, optimizer, batch())
    notes = guard.last_report.explanation.notes
    start = "Changed while the step was run again, and not put back: "
    found = [note for note in notes if note.startswith(start)]
    assert len(found) == bool(names)
    assert not names or found[0].startswith(f"{start}{names}. ")


# A working directory that is gone, and a profiler.


def test_operations_are_named_where_the_working_directory_is_gone(tmp_path):
    source = "def take(x):\n    return x.log()\n"
    space = {}
    exec(compile(source, "of_a_folder_that_is_gone.py", "exec"), space)
    folder, before = tmp_path / "gone", os.getcwd()
    folder.mkdir()
    model = nn.Sequential(nn.Linear(2, 1))
    try:
        os.chdir(folder)
        folder.rmdir()
        found = explain(
            model, -torch.ones(1, 2), lambda x: space["take"](x).sum() * model(x).sum()
        )
    finally:
        os.chdir(before)
    assert found.op is not None
    assert (found.op.file, found.op.line) == ("of_a_folder_that_is_gone.py", 2)


def test_a_profiler_records_the_step_once():
    model = Net()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with guarded(model) as (guard, optimizer):
        with torch.profiler.profile(activities=activities) as profiler:
            step(guard, model, optimizer, batch())
            torch.sin(torch.ones(1))
    names = [each.name for each in profiler.events()]
    assert guard.last_report.explanation.cause == "undefined"
    assert [names.count(f"aten::{each}") for each in ("log", "sin")] == [1, 1]
