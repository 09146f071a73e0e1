"""Megatron-core, where it is installed: its wrapper, optimizer and schedules."""

import functools
import importlib.util

import pytest
from engine_runs import megatron, problems, run, with_bare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
    ),
]


@functools.cache
def seen(world):
    return run("megatron", world, with_bare(megatron(world)))


@pytest.mark.parametrize(
    "world, case", [(world, case) for world in (1, 2) for case in megatron(world)]
)
def test_a_run(world, case):
    assert problems(case, seen(world)) == []
