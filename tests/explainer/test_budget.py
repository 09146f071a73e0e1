"""Limits count what a thread computes, and a part of what it waits."""

import time

import pytest

from overflow_fast.explainer import budget
from overflow_fast.explainer.budget import CLOCK_TIMES, SpentTime


def test_what_others_compute_is_hardly_counted():
    spent = SpentTime()
    time.sleep(0.3)
    assert spent.seconds < 0.2


def test_what_the_thread_computes_is_counted():
    spent, end = SpentTime(), time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    assert spent.seconds >= 0.1


def test_a_wait_ends(monkeypatch):
    spent, begin = SpentTime(), time.perf_counter()
    monkeypatch.setattr(budget.time, "perf_counter", lambda: begin + 60)
    assert spent.seconds == pytest.approx(60 / CLOCK_TIMES, rel=0.01)
