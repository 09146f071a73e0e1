"""Compiled code runs eagerly for as long as any thread asks for it, and no longer."""

import contextlib
import os
import threading
import time

import pytest
import torch
from interruptions import interrupted

from overflow_fast.explainer import force_eager
from overflow_fast.explainer.force_eager import run_eagerly


def num_compiled():
    """How often a function is compiled that is called now."""
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(2))
    return len(calls)


def test_the_thread_that_leaves_last_puts_the_stance_back():
    assert torch._dynamo.list_backends()  # imports it: else nothing is put back

    entered, left = threading.Event(), threading.Event()

    def first():
        with run_eagerly():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with run_eagerly():
        left.set()
        thread.join()
        assert num_compiled() == 0  # this thread is still within
    assert num_compiled() == 1


def test_within_itself():
    with run_eagerly(), run_eagerly():
        pass
    assert num_compiled() == 1


@pytest.mark.parametrize("is_long", [False, True])
def test_a_whole_graph_of_another_thread_that_runs_eagerly_ends_first(
    is_long, monkeypatch
):
    """Torch raises an error if the call compiled nothing and nothing forbids it now."""
    assert torch._dynamo.list_backends()
    monkeypatch.setattr(force_eager, "_WAIT", 0.05 if is_long else 60)
    inside, end, errors = threading.Event(), threading.Event(), []

    def slow(x):
        inside.set()
        end.wait(60)
        return x.sin()

    def work():
        try:
            torch.compile(slow, backend="eager", fullgraph=True)(torch.ones(2))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    with force_eager.run_eagerly():
        thread.start()
        assert inside.wait(60)
        if not is_long:
            threading.Timer(0.1, end.set).start()
    if is_long:
        assert num_compiled() == 0
        with force_eager.run_eagerly():  # once more, before the first is over
            pass
        end.set()
    thread.join()
    assert not errors
    wait_for(lambda: num_compiled() == 1)


def wait_for(is_true):
    for _ in range(1000):
        if is_true():
            return
        time.sleep(0.01)
    pytest.fail("not within ten seconds")


def test_compiled_code_does_not_stay_eager_for_ever(monkeypatch):
    assert torch._dynamo.list_backends()
    monkeypatch.setattr(force_eager, "_WAIT", 0.01)
    monkeypatch.setattr(force_eager, "_LONG_WAIT", 0.05)
    inside, end = threading.Event(), threading.Event()

    def endless(x):
        inside.set()
        end.wait(60)
        return x.sin()

    def work():
        with contextlib.suppress(RuntimeError):
            torch.compile(endless, backend="eager", fullgraph=True)(torch.ones(2))

    thread = threading.Thread(target=work)
    with force_eager.run_eagerly():
        thread.start()
        assert inside.wait(60)
    wait_for(lambda: num_compiled() == 1)
    end.set()
    thread.join()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interruption_at_any_moment_leaves_compiled_code_compiled():
    assert torch._dynamo.list_backends()

    def enter_and_leave():
        for _ in range(1000):
            with run_eagerly():
                pass

    assert any(
        list(interrupted(enter_and_leave, (1e-5 + i * 7e-6 for i in range(200))))
    )
    assert num_compiled() == 1
