"""DeepSpeed's engine, where it is installed: two micro-batches a step."""

import functools
import importlib.util

import pytest
from engine_runs import DEEPSPEED, problems, run, with_bare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
    ),
]


@functools.cache
def seen(world):
    return run("deepspeed", world, with_bare(DEEPSPEED))


@pytest.mark.parametrize("case", DEEPSPEED, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_a_run(world, case):
    assert problems(case, seen(world)) == []
