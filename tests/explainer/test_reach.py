"""A bad step runs nothing that was not offered: what the program did, it did once."""

import contextlib
import itertools
import logging
import queue
import threading

import pytest
import torch
from failed_runs import failed
from ranks import on_ranks
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard
from overflow_fast.explainer import replayer
from overflow_fast.monitors import MaskedOps

BAD = -1.0  # of whose mean a logarithm is nan


class Net(nn.Module):
    """Calls what it was given once in each forward."""

    def __init__(self, touch=lambda: None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.touch = touch

    def forward(self, x):
        with self.touch() or contextlib.nullcontext():
            return self.linear(x) + torch.log(x.mean(1, keepdim=True))


class Fine(nn.Module):
    """Is finite whatever it gets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).tanh()


class Waits:
    """Lets one thread go on once a step, in one of several ways."""

    def __init__(self, how):
        self.how = how
        self.queue, self.event = queue.Queue(), threading.Event()
        self.semaphore, self.condition = threading.Semaphore(0), threading.Condition()
        self.lock, self.number = threading.Lock(), 0

    def give(self):
        self.queue.put(1)
        self.event.set()
        self.semaphore.release()
        self.number += 1

    def take(self):
        if self.how == "queue":
            self.queue.get()
        elif self.how == "event":
            self.event.wait()
            self.event.clear()
        elif self.how == "semaphore":
            self.semaphore.acquire()
        elif self.how == "condition":
            with self.condition:
                self.condition.wait_for(lambda: self.number > 0)
                self.number -= 1
        elif self.how == "busy":
            while not self.number:
                pass
            self.number -= 1
        elif self.how == "with lock":
            return self.lock
        elif self.how == "acquire":
            self.lock.acquire()
            self.lock.release()
        return None


HOWS = {
    "queue": "takes from a queue",
    "event": "waits for another thread",
    "semaphore": "waits for another thread",
    "condition": "waits for another thread",
    "busy": "took far longer than the step",
    "with lock": "waits for a lock that is held",
    "acquire": "waits for a lock that is held",
}


@pytest.mark.parametrize("is_run", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_forward_that_waits_once_a_step_does_not_hang(how, is_run, monkeypatch):
    monkeypatch.setattr(replayer, "LEAST_SECONDS", 1.0)
    waits = Waits(how)
    model = Net(waits.take)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for value in (1.0, BAD, 1.0):
            waits.give()
            x = torch.full((4, 6), value)
            forward = lambda x=x: model(x).mean()  # noqa: E731
            (guard.run(forward) if is_run else forward()).backward()
            with waits.lock:  # as threads that read the weights meanwhile
                optimizer.step()
            optimizer.zero_grad()
        notes = guard.last_report.explanation.notes
    assert guard.num_skipped == 1
    assert any(
        note.startswith("Not replayed: ") and HOWS[how] in note for note in notes
    )
    place = next(note for note in notes if HOWS[how] in note)
    assert "test_reach.py:" in place


# The line of a loss that takes or writes, without guard.run().


def criterion(y, target):
    return torch.sqrt(y.mean() * 0.001 + target)


class Targets:
    def __init__(self, values):
        self.values = iter(values)

    def next(self):
        return next(self.values)


def from_an_iterator(values, folder):
    items = iter(values)
    return lambda: next(items), lambda: items.__length_hint__()


def from_a_bound_method(values, folder):
    items = iter(values)
    return items.__next__, lambda: items.__length_hint__()


def from_an_object(values, folder):
    targets = Targets(values)
    return targets.next, lambda: targets.values.__length_hint__()


def from_a_generator(values, folder):
    items = (each for each in values)
    return lambda: next(items), lambda: len(list(items))


def from_two_of_them(values, folder):
    items = (inner for inner in (each for each in values))
    return lambda: min(itertools.islice(items, 1)), lambda: len(list(items))


def from_a_loader(values, folder):
    items = iter(torch.utils.data.DataLoader(torch.tensor(values), 1))
    return lambda: next(items).mean(), lambda: 6 - items._num_yielded


def from_a_queue(values, folder):
    items = queue.SimpleQueue()
    for each in values:
        items.put(each)
    return items.get, items.qsize


def from_a_file(values, folder):
    path = folder / "targets"
    path.write_text("\n".join(map(str, values)))
    items = path.open()
    return lambda: float(items.readline()), lambda: len(items.readlines())


def with_a_log(values, folder):
    items = list(values)
    path = folder / "log"

    def take():
        with path.open("a") as log:
            log.write("taken\n")
        return items[len(path.read_text().splitlines()) - 1]

    return take, lambda: 6 - len(path.read_text().splitlines())


SOURCES = [
    *(from_an_iterator, from_a_bound_method, from_an_object, from_a_generator),
    *(from_two_of_them, from_a_loader, from_a_queue, from_a_file, with_a_log),
]


@pytest.mark.parametrize("is_run", [False, True])
@pytest.mark.parametrize("make", SOURCES)
def test_the_line_of_a_loss_loses_nothing_to_a_replay(make, is_run, tmp_path):
    take, left = make((1.0, BAD, 1.0, 1.0, 1.0, 1.0), tmp_path)
    model, x = Fine(), torch.ones(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for _ in range(2):
            if is_run:
                loss = guard.run(lambda: criterion(model(x), take()))
            else:
                loss = criterion(model(x), take())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert guard.num_skipped == 1
        found = guard.last_report.explanation
    assert left() == 4
    assert any("Not replayed: " in note for note in found.notes), found


# Of a function that was stopped, the models' forwards are replayed alone.


def test_the_forward_within_a_function_that_is_stopped_is_explained(tmp_path, as_kept):
    model = Net()
    log = (tmp_path / "log").open("w")

    def loss(x):
        y = model(x)
        log.write("x")
        return y.mean()

    found = failed(model, lambda: loss(torch.full((4, 6), BAD)), "skip").explanation
    assert found.cause == "undefined"
    assert "torch.log(x.mean(1, keepdim=True))" in found.op.code
    as_kept(found.notes[0])
    assert log.tell() == 1
    log.close()


def test_a_forward_that_is_stopped_within_a_function_is_said_once(tmp_path):
    model = Net(write_of(tmp_path)[0])
    report = failed(model, lambda: model(torch.full((4, 6), BAD)).mean(), "skip")
    assert report.explanation.notes == [f"Not replayed: {STOP}"]


# Other replays.


def write_of(folder):
    path = folder / "log"

    def write():
        with path.open("a") as log:
            log.write("x")

    return write, path


def test_the_tripwire_looks_again_under_the_same_rule(tmp_path, as_kept):
    write, path = write_of(tmp_path)
    model, options = Net(write), {"watch": "tripwire"}
    loss = lambda: model(torch.full((4, 6), BAD)).mean()  # noqa: E731
    as_kept(failed(model, loss, "skip", **options).sentences())
    assert path.read_text() == "x"


def test_masked_ops_says_once_that_steps_are_not_replayed(tmp_path, caplog, as_kept):
    write, path = write_of(tmp_path)
    model = Net(write)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitors = [MaskedOps(every=1)]
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        with OverflowGuard(model, optimizer, monitors=monitors):
            for _ in range(3):
                model(torch.ones(4, 6)).mean().backward()
                optimizer.step()
    assert path.read_text() == "xxx"
    as_kept(caplog.messages)


def test_explain_names_it(tmp_path):
    write, path = write_of(tmp_path)
    model = Net(write)
    found = overflow_fast.explain(model, torch.full((4, 6), BAD))
    assert found.notes == [f"Not replayed: {STOP}"]
    assert not path.exists()


STOP = f"write writes to a file, test_reach.py:{write_of.__code__.co_firstlineno + 4}."


def test_a_self_test_says_it(tmp_path, as_kept):
    write, path = write_of(tmp_path)
    model = Net(write)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        as_kept.error(RuntimeError, guard.self_test, torch.ones(4, 6))
    assert not path.exists()


def test_advice_on_precision_says_it(tmp_path, as_kept):
    write, path = write_of(tmp_path)
    model = Net(write)
    as_kept.error(ValueError, overflow_fast.advise_precision, model, [torch.ones(4, 6)])
    assert path.read_text() == "x"  # the first run is the one that was asked for


# What goes to the terminal ends nothing, and is not told twice.


@pytest.mark.parametrize("is_run", [False, True])
def test_what_a_step_prints_is_printed_once(is_run, capfd, caplog):
    def tell():
        print("a step")
        logging.getLogger("a program's").warning("a step is logged")

    model = Net(tell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        forward = lambda: model(torch.full((4, 6), BAD)).mean()  # noqa: E731
        (guard.run(forward) if is_run else forward()).backward()
        optimizer.step()
        assert guard.last_report.explanation.cause == "undefined"
    assert capfd.readouterr().out.count("a step\n") == 1
    assert caplog.messages.count("a step is logged") == 1


# On several ranks.


def one_rank_waits():
    rank = torch.distributed.get_rank()
    waits = Waits("queue" if rank == 1 else "nothing")
    model = nn.parallel.DistributedDataParallel(Net(waits.take))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(
        model, optimizer, "skip", process_group=torch.distributed.group.WORLD
    ) as guard:
        waits.give()
        model(torch.full((4, 6), BAD if rank == 0 else 1.0)).mean().backward()
        optimizer.step()
        return guard.last_report.explanation.notes


def test_all_ranks_are_told_by_the_one_that_stopped(as_kept):
    notes = on_ranks(2, one_rank_waits)
    assert notes[0] == notes[1]
    (note,) = notes[0]
    as_kept(note)
    assert note.endswith("(rank 1).")


def test_a_gradient_that_a_loss_of_effects_made_is_not_explained(tmp_path):
    write, path = write_of(tmp_path)
    model = Fine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute(out):
        write()
        return (out - out.detach()).sqrt().mean()

    with OverflowGuard(model, optimizer, "skip") as guard:
        loss = compute(model(torch.ones(4, 6)))
        loss.backward()
        optimizer.step()
        found = guard.last_report.explanation
    assert found.cause == "unknown"
    assert f"Not replayed: {STOP}" in found.notes
    assert path.read_text() == "x"
