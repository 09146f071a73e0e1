"""Compiled code runs eagerly for as long as any thread asks for it, and no longer."""

import threading

import torch

from overflow_fast.core.eagerly import run_eagerly


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
