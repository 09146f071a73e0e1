"""A replay ends before its first effect, and says what it was and where."""

import array
import asyncio
import atexit
import collections
import concurrent.futures
import csv
import ctypes
import gc
import io
import itertools
import locale
import logging
import math
import multiprocessing
import os
import pickle
import queue
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import numpy as safetensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import overflow_fast
from overflow_fast.explainer.effects.lookups import places_of
from overflow_fast.explainer.effects.rule import EffectRule, StoppedError
from overflow_fast.explainer.op_table import OpTable
from overflow_fast.explainer.op_trace import OpTrace
from overflow_fast.explainer.torch_calls import TorchCalls

SHORT = 0.5  # seconds


class World:
    """What a program may have at hand when a step of it is run again."""

    def __init__(self, folder):
        self.folder = folder
        self.path = folder / "there.txt"
        self.path.write_text("one\ntwo\n")
        self.log = self.path.open("a")
        self.bytes = self.path.open("ab", buffering=0)
        self.read = self.path.open()
        self.data = self.path.open("rb")
        self.pickler = pickle.Pickler(self.bytes)
        self.memory = io.StringIO()
        self.rows = csv.writer(self.log)
        self.queue, self.simple = queue.Queue(), queue.SimpleQueue()
        self.empty = queue.Queue()
        for each in (self.queue, self.simple):
            each.put("an item")
        self.stack = queue.LifoQueue()
        self.stack.put("an item")
        self.shared = multiprocessing.get_context("spawn").Lock()
        self.event, self.condition = threading.Event(), threading.Condition()
        self.set = threading.Event()
        self.set.set()
        self.held, self.free = threading.Lock(), threading.Lock()
        self.held.acquire()
        self.recursive = threading.RLock()
        self.taken, self.semaphore = threading.Semaphore(0), threading.Semaphore(1)
        self.locks = {"a": [self.held]}
        self.sockets = socket.socketpair()
        self.pipe = os.pipe()
        self.store, self.library = torch.distributed.HashStore(), ctypes.CDLL(None)
        self.functions = {"a": self.library.usleep}
        self.base = sqlite3.connect(folder / "base")
        self.base.execute("create table t (x)")
        self.items, self.pairs = iter([1, 2, 3]), zip([1, 2], [3, 4], strict=True)
        self.numbers = itertools.count()
        self.generator = (each for each in range(9))
        next(self.generator)
        data = torch.utils.data.DataLoader(torch.arange(6.0), 2)
        self.loader = iter(data)
        self.poll = select.poll()
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.future = concurrent.futures.Future()
        self.logger = logging.getLogger("a program's")
        self.logger.propagate = False
        self.handler = logging.FileHandler(folder / "log.txt")
        self.logger.addHandler(self.handler)
        self.logger.setLevel("INFO")

    def lock_of(self, name):
        """A lock of it."""
        return self.locks[name][0]

    def close(self):
        """Lets go of it."""
        self.held.release()
        self.logger.removeHandler(self.handler)
        self.handler.close()
        self.pool.shutdown()
        for each in (
            *self.sockets,
            self.base,
            self.log,
            self.bytes,
            self.read,
            self.data,
        ):
            each.close()
        for each in self.pipe:
            os.close(each)

    def state(self):
        """All of it that can be counted."""
        self.handler.flush()
        return {
            "files": {p.name: p.stat().st_size for p in self.folder.iterdir()},
            "written": tuple(
                e.tell() for e in (self.log, self.memory, self.read, self.data)
            ),
            "queues": (self.queue.qsize(), self.simple.qsize(), self.stack.qsize()),
            "tasks": self.queue.unfinished_tasks,
            "locks": (self.held.locked(), self.free.locked(), self.semaphore._value),
            "shared": self.shared._semlock._is_zero(),
            "events": (self.event.is_set(), self.set.is_set()),
            "items": (self.items.__length_hint__(), repr(self.numbers)),
            "loader": self.loader._num_yielded,
            "rows": self.base.execute("select count(*) from t").fetchone(),
            "threads": threading.active_count(),
            "environment": [os.environ.get(name) for name in ("PATH", "A_NEW_ONE")],
            "folder": Path.cwd(),
        }


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


def in_a_library(w):
    """Waits for a lock as code of an installed package does."""
    code = "def hold(lock):\n    with lock:\n        pass"
    own: dict = {}
    exec(compile(code, str(Path(pytest.__file__).parent / "hold.py"), "exec"), own)
    own["hold"](w.held)


def with_a_lock(w):
    with w.held:
        pass


def with_an_item(w):
    with w.locks["a"][0]:
        pass


def with_what_a_function_returns(w):
    with w.lock_of("a"):
        pass


def with_a_condition(w):
    with w.condition:
        w.condition.wait()


def over_an_iterator(w):
    return [each for each in w.items]


def over_a_pair(w):
    for _ in w.pairs:
        break


def unpacking(w):
    first, *_ = w.generator
    return first


def yielding(w):
    def from_it():
        yield from w.generator

    return next(from_it())


def swallowing(w):
    while True:
        try:
            return w.empty.get()
        except BaseException:
            continue


def until_it_is_set(w):
    while not w.event.is_set():
        pass


def until_a_number_changes(w):
    numbers = [0]
    while not numbers[0]:
        pass


def in_a_finally(w):
    try:
        return w.queue.get()
    finally:
        w.queue.task_done()


class Stuck(torch.autograd.Function):
    """Its backward waits."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.event.wait()
        return gradient, None


def in_backward(w):
    x = torch.ones(2, requires_grad=True)
    Stuck.apply(x, w.event).sum().backward()


def in_a_hook(w):
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: w.queue.get())
    y.sum().backward()


def in_a_checkpoint(w):
    x = torch.ones(2, requires_grad=True)
    seen = []

    def again(x):
        seen.append(x)
        if len(seen) > 1:
            w.log.write("again")
        return x.sin()

    checkpoint(again, x, use_reentrant=False).sum().backward()


EFFECTS = {
    "writes to a file": [
        lambda w: w.log.write("x"),
        lambda w: w.log.writelines(["x"]),
        lambda w: w.bytes.write(b"x"),
        lambda w: w.memory.write("x"),
        lambda w: print("x", file=w.log),
        lambda w: print("x", "y", sep=", ", file=w.log, end=""),
        lambda w: w.rows.writerow([1]),
        lambda w: w.rows.writerows([[1]]),
        lambda w: (w.folder / "new").write_text("x"),
        lambda w: (w.folder / "new").open("xb"),
        lambda w: w.path.open("r+"),
        lambda w: os.open(w.folder / "new", os.O_CREAT),
        lambda w: torch.save(1, w.folder / "new.pt"),
        lambda w: torch.save(1, w.path),
        lambda w: os.write(w.pipe[1], b"x"),
        lambda w: os.copy_file_range(w.read.fileno(), w.log.fileno(), 1),
        lambda w: print("x", **{"file": w.log}),
        lambda w: print(*"xy", file=w.log),
        lambda w: pickle.dump([1], w.bytes),
        lambda w: w.pickler.dump([1]),
        lambda w: np.ones(1).tofile(w.bytes),
        lambda w: np.ones(1).tofile(w.folder / "new"),
        lambda w: np.save(w.folder / "new.npy", np.ones(1)),
        lambda w: array.array("b", [1]).tofile(w.bytes),
        lambda w: safetensors.save_file({"a": np.ones(1)}, w.folder / "new"),
        in_a_checkpoint,
    ],
    "reads from a file that was open before": [
        lambda w: w.read.readline(),
        lambda w: w.read.read(1),
        lambda w: w.read.seek(0),
        lambda w: os.read(w.pipe[0], 1),
        lambda w: pickle.load(w.data),
        lambda w: np.fromfile(w.data, "u1", 1),
        lambda w: np.load(w.data),
    ],
    "takes from a queue": [
        lambda w: w.queue.get(),
        lambda w: w.queue.get_nowait(),
        lambda w: w.queue.put(1),
        lambda w: w.empty.get(),
        lambda w: w.empty.get(timeout=9),
        lambda w: w.simple.get(),
        lambda w: w.simple.put(1),
        lambda w: w.stack.get(),
        swallowing,
        in_a_finally,
        in_a_hook,
    ],
    "takes from an iterator": [
        lambda w: next(w.items),
        lambda w: next(w.items, None),
        lambda w: w.items.__next__(),
        lambda w: list(itertools.islice(w.items, 2)),
        lambda w: dict(zip("ab", w.items, strict=False)),
        lambda w: next(w.numbers),
        lambda w: next(w.pairs),
        lambda w: next(w.generator),
        lambda w: w.generator.send(None),
        lambda w: next(w.loader),
        lambda w: list(w.generator),
        lambda w: list(itertools.islice(w.generator, 2)),
        lambda w: dict(zip("ab", w.generator, strict=False)),
        lambda w: max(w.generator),
        lambda w: [e for e in zip(range(2), w.generator, strict=False)],
        lambda w: list(zip(range(max(1, 2)), w.items, strict=False)),
        lambda w: [*w.generator],
        lambda w: print(*w.generator),
        lambda w: 5 in w.generator,
        over_an_iterator,
        over_a_pair,
        unpacking,
        yielding,
    ],
    "waits for a lock that is held": [
        lambda w: w.held.acquire(),
        lambda w: w.held.acquire(timeout=9),
        with_a_lock,
        in_a_library,
        with_an_item,
        with_what_a_function_returns,
    ],
    "waits for another thread": [
        lambda w: w.event.wait(),
        lambda w: w.taken.acquire(),
        lambda w: threading.Barrier(2).wait(),
        lambda w: w.future.result(),
        lambda w: w.poll.poll(9),
        lambda w: select.select([w.sockets[0]], [], [], 9),
        with_a_condition,
        in_backward,
    ],
    "wakes other threads": [
        lambda w: w.event.set(),
        lambda w: w.set.clear(),
        lambda w: w.held.release(),
        lambda w: w.semaphore.release(),
    ],
    "uses a socket": [
        lambda w: w.sockets[0].send(b"x"),
        lambda w: w.sockets[0].recv(1),
        lambda w: socket.create_connection(("127.0.0.1", 1)),
        lambda w: socket.socket(),
        lambda w: asyncio.run(asyncio.sleep(0)),
    ],
    "uses a database": [
        lambda w: w.base.execute("insert into t values (1)"),
        lambda w: w.base.cursor().execute("insert into t values (1)"),
        lambda w: sqlite3.connect(w.folder / "new"),
    ],
    "starts a process": [
        lambda w: subprocess.run(["true"], check=True),
        lambda w: os.system("true"),
        lambda w: os.fork(),
        lambda w: os.kill(os.getpid(), signal.SIGTERM),
        lambda w: os.waitpid(-1, os.WNOHANG),
    ],
    "starts a thread": [
        lambda w: threading.Thread(target=int).start(),
        lambda w: threading.Timer(9, int).start(),
        lambda w: w.pool.submit(int),
        lambda w: sys.modules["_thread"].start_new_thread(int, ()),
    ],
    "changes files or folders": [
        lambda w: os.mkdir(w.folder / "new"),
        lambda w: w.path.unlink(),
        lambda w: w.path.rename(w.folder / "new"),
        lambda w: os.chdir(w.folder),
        lambda w: tempfile.mkdtemp(dir=w.folder),
    ],
    "changes the environment": [
        lambda w: os.environ.update(A_NEW_ONE="1"),
        lambda w: os.environ.pop("PATH"),
    ],
    "changes settings of the process": [
        lambda w: os.umask(0),
        lambda w: os.nice(0),
        lambda w: atexit.register(int),
        lambda w: locale.setlocale(locale.LC_ALL, "C"),
        lambda w: resource.setrlimit(
            resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)
        ),
    ],
    "uses the store of the ranks": [
        lambda w: w.store.set("a", "1"),
        lambda w: w.store.add("a", 1),
    ],
    "calls a function of the C library": [
        lambda w: w.library.write(w.log.fileno(), b"x", 1),
        lambda w: w.functions["a"](1),
    ],
    "sleeps": [lambda w: time.sleep(99)],
    "sets or sends a signal": [
        lambda w: signal.alarm(99),
        lambda w: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda w: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ],
    "sets a profiler": [lambda w: sys.setprofile(None)],
    "took far longer than the step": [until_it_is_set, until_a_number_changes],
}


# As a replay does: the line of a `with` belongs to the package, and is not watched.
OF_PACKAGE = {}
RUN = "def run(rule, seconds, code, world):\n with rule.applied(seconds): code(world)"
exec(compile(RUN, overflow_fast.__file__, "exec"), OF_PACKAGE)


@pytest.mark.parametrize(
    ("words", "code"),
    [(words, code) for words, codes in EFFECTS.items() for code in codes],
)
def test_it_ends_before_an_effect(words, code, world):
    before = world.state()
    seconds = SHORT if "took far" in words else 60
    with pytest.raises(StoppedError, match=words) as stopped:
        OF_PACKAGE["run"](EffectRule([world.items]), seconds, code, world)
    assert ", test_stopping.py:" in str(stopped.value) or "was run again" in str(
        stopped.value
    )
    assert world.state() == before
    # It lives. A comprehension that is no frame of its own takes one item more.
    assert next(world.generator) < (3 if sys.version_info < (3, 12) else 4)


def test_a_loop_of_a_library_ends_without_a_call(tmp_path, monkeypatch):
    """Its code may equal that of a file of the program, and is still told from it."""
    text = "def run(self):\n    while self.flag:\n        pass\n"
    places = {}
    for folder in ("site-packages", "own"):
        path = tmp_path / folder / "spin.py"
        exec(compile(text, str(path), "exec"), places)
        waiting = types.SimpleNamespace(flag=True)
        with pytest.raises(StoppedError, match="took far longer"):
            with EffectRule().applied(SHORT):
                places["run"](waiting)


def test_equal_codes_of_two_files_are_told_apart():
    text = "def f(items):\n    for each in items:\n        return each\n"
    codes = []
    for file in ("/x/site-packages/p/a.py", "/home/me/a.py"):
        found = {}
        exec(compile(text, file, "exec"), found)
        codes.append(found["f"].__code__)
    library, own = (places_of(code).unseen for code in codes)
    assert codes[0] == codes[1] and not library and own


def loss_of_a_model(w):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.LayerNorm(4))
    loss = net(torch.ones(2, 4)).square().mean()
    loss.backward()


def with_a_free_lock(w):
    with w.free, w.recursive, w.condition, w.shared:
        pass


def tries(w):
    return w.held.acquire(blocking=False), w.held.acquire(False)


def held_by_itself(w):
    w.free.acquire()
    w.shared.acquire()


def by_its_own(w):
    items, numbers = iter([1, 2]), (each for each in range(3))
    own = collections.deque(numbers)
    made = queue.Queue()
    return next(items), list(items), own, made.empty()


def of_a_new_file(w):
    with w.path.open() as file:
        first = file.readline()
    return first, w.path.read_bytes(), os.listdir(w.folder), w.path.exists()


def in_memory(w):
    text, data = io.StringIO(), io.BytesIO()
    text.write("x")
    print("x", "y", sep=",", file=text)
    pickle.dump([1], data)
    pickle.Pickler(data).dump([2])
    data.seek(0)
    pickle.load(data), pickle.Unpickler(data).load()
    np.save(io.BytesIO(), np.ones(2))
    data = io.BytesIO()
    csv.writer(text).writerow([1])
    torch.save(torch.ones(2), data)
    data.seek(0)
    return torch.load(data)


def to_the_terminal(w):
    print("twice")
    print(*["twice"], sep="", flush=True)
    sys.stdout.write("twice\n")
    print("twice", file=sys.stderr, flush=True)
    warnings.warn("twice", stacklevel=1)
    logging.getLogger("another").warning("twice")
    w.logger.info("twice")


def through_a_checkpoint(w):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    x = torch.ones(2, 4, requires_grad=True)
    for is_reentrant in (False, True):
        checkpoint(net, x, use_reentrant=is_reentrant).sum().backward()


@pytest.mark.parametrize(
    "code",
    [
        *(loss_of_a_model, with_a_free_lock, held_by_itself, by_its_own, tries),
        *(of_a_new_file, in_memory, to_the_terminal, through_a_checkpoint),
    ],
)
def test_what_has_no_effect_is_not_ended(code, world, capfd):
    before = world.state()
    with EffectRule().applied(60):
        code(world)
    assert world.state() == before
    assert "twice" not in "".join(capfd.readouterr())


def test_warnings_are_heard_of_the_step_alone(monkeypatch):
    heard = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *a: heard.append(text))
    warnings.simplefilter("always")
    with EffectRule().applied(60):
        warnings.warn("twice", stacklevel=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("its own", stacklevel=1)
    assert not heard
    assert len(caught) == 1
    warnings.warn("once", stacklevel=1)
    assert [str(each) for each in heard] == ["once"]


def test_handlers_that_logging_has_lost_sight_of_are_told_nothing(world, monkeypatch):
    """As those are that were there before `logging.config.dictConfig()`."""
    logger, kept = logging.Logger("of a program"), logging.Logger.callHandlers
    before = world.log.tell()
    logger.addHandler(logging.StreamHandler(world.log))
    monkeypatch.setattr(logging, "_handlerList", [])
    with EffectRule().applied(60):
        logger.warning("twice")
        logger.addHandler(logging.StreamHandler(world.log))
        logger.warning("twice")
    assert world.log.tell() == before
    assert logging.Logger.callHandlers is kept
    logger.warning("once")
    assert world.log.tell() == before + 2 * len("once\n")


def test_a_lock_that_is_held_for_a_moment_is_waited_for(world):
    def let_go():
        time.sleep(0.02)
        world.held.release()

    other = threading.Thread(target=let_go)
    other.start()
    with EffectRule().applied(60):
        with_a_lock(world)
    other.join()
    world.held.acquire()


def test_other_threads_go_on(world, capfd, as_kept):
    stop, seen = threading.Event(), []

    def work():
        while not stop.is_set():
            seen.append(1)
            world.log.write("x")
            print("told")
            world.logger.info("told")
            world.simple.put(world.simple.get())
            time.sleep(0.001)

    other = threading.Thread(target=work)
    other.start()
    with pytest.raises(StoppedError) as raised:
        with EffectRule().applied(SHORT):
            begun = len(seen)
            until_a_number_changes(world)
    as_kept(raised.value)
    stop.set()
    other.join()
    assert len(seen) > begun
    assert capfd.readouterr().out.count("told") == len(seen)
    world.handler.flush()
    assert (world.folder / "log.txt").read_text().count("told") == len(seen)


def test_an_iterator_of_another_thread_is_left_alone(world):
    items, stop = iter(list(range(10**6))), threading.Event()

    def work():
        while not stop.is_set():
            next(items)

    other = threading.Thread(target=work)
    other.start()
    begun = items.__length_hint__()
    with EffectRule().applied(60):
        for _ in range(20):
            loss_of_a_model(world)
    stop.set()
    other.join()
    assert items.__length_hint__() < begun


def test_what_was_there_is_put_back(world):
    profiler, events = sys.getprofile(), []
    streams = sys.stdout, sys.stderr
    tracer = lambda *event: events.append(event)  # noqa: E731
    handlers = [list(each.filters) for each in logging.getLogger().handlers]
    sys.setprofile(tracer)
    try:
        with pytest.raises(StoppedError), EffectRule().applied(60):
            world.queue.get()
        assert sys.getprofile() is tracer
    finally:
        sys.setprofile(profiler)
    assert events
    assert (sys.stdout, sys.stderr) == streams
    assert [list(each.filters) for each in logging.getLogger().handlers] == handlers


def test_two_threads_are_watched_at_once(world, capfd):
    inner, found = threading.Barrier(2), {}

    def replay(name, code):
        rule = EffectRule()
        inner.wait()
        try:
            with rule.applied(60):
                print(name)
                code(world)
        except StoppedError as error:
            found[name] = str(error)

    codes = {"a": lambda w: w.queue.get(), "b": lambda w: w.log.write("x")}
    threads = [threading.Thread(target=replay, args=each) for each in codes.items()]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert "queue" in found["a"]
    assert "file" in found["b"]
    assert not capfd.readouterr().out
    print("told")
    assert capfd.readouterr().out == "told\n"


def test_a_loop_that_is_a_generator_may_call_another_of_its_kind(world):
    def steps(depth):
        if depth:
            with EffectRule().applied(60):
                found = list(steps(depth - 1))
            yield found
        yield 1

    assert list(steps(1)) == [[1], 1]


def test_an_exit_of_the_code_is_an_error():
    with pytest.raises(RuntimeError, match="SystemExit"), EffectRule().applied(60):
        sys.exit(3)
    with pytest.raises(ValueError, match="its own"), EffectRule().applied(60):
        raise ValueError("its own")


def test_a_user_who_interrupts_is_heard():
    with pytest.raises(KeyboardInterrupt), EffectRule().applied(60):
        raise KeyboardInterrupt


def test_a_rule_can_be_applied_again(world):
    rule = EffectRule()
    for _ in range(3):
        with pytest.raises(StoppedError, match="queue"), rule.applied(60):
            world.queue.get()
        with rule.applied(math.inf):
            loss_of_a_model(world)


def test_what_a_run_makes_is_its_own_also_after_a_collection():
    with EffectRule().applied(60):
        items, numbers = iter([1, 2]), (each for each in range(3))
        next(numbers)
        gc.collect()
        taken = [next(items), next(numbers), *numbers]
    assert taken == [1, 1, 2]


def test_what_was_young_before_a_run_is_not_its_own_after_a_collection():
    items = iter([1, 2])
    with pytest.raises(StoppedError, match="takes from an iterator"):
        with EffectRule().applied(60):
            gc.collect()
            next(items)
    assert list(items) == [1, 2]


def test_code_made_of_a_string_is_named_by_its_caller(world):
    made = {}
    exec("def take(items):\n    return next(items)", made)
    with pytest.raises(StoppedError, match=r"^test_code.*, test_stopping\.py:\d+$"):
        with EffectRule().applied(60):
            made["take"](world.items)


def run_in_a_trace(function):
    table = OpTable([], looks_back=True)
    with EffectRule().applied(60.0), OpTrace({}, table), TorchCalls():
        function()


def test_what_an_operation_runs_is_seen_within_a_trace(tmp_path):
    file = tmp_path / "written"

    @torch.library.custom_op("overflow_fast_tests::writes", mutates_args=())
    def writes(x: torch.Tensor) -> torch.Tensor:
        file.write_text("once more")
        return x.clone()

    with pytest.raises(StoppedError, match="writes to a file"):
        run_in_a_trace(lambda: writes(torch.ones(2)).add(1))
    assert not file.exists()


class Logged(torch.Tensor):
    """A tensor whose class writes a file where somebody detaches one."""

    file = None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            cls.file.write_text("once more")
        plain = (each.plain if isinstance(each, cls) else each for each in args)
        return func(*plain, **(kwargs or {}))

    @staticmethod
    def of(plain):
        made = torch.Tensor._make_subclass(Logged, plain)
        made.plain = plain
        return made


class Wraps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_relu = func is torch.ops.aten.relu.default
        return Logged.of(result) if is_relu else result


@pytest.mark.parametrize("is_returned", [False, True])
def test_what_looks_at_a_tensor_of_the_program_is_seen(tmp_path, is_returned):
    Logged.file = tmp_path / "written"
    given = Logged.of(torch.ones(2))
    with pytest.raises(StoppedError, match="writes to a file"):
        if is_returned:
            with Wraps():
                run_in_a_trace(lambda: torch.ones(2).relu())
        else:
            run_in_a_trace(lambda: given.add(1))
    assert not Logged.file.exists()
