"""DeepSpeed and Megatron-core, where they are installed, with planted faults."""

import functools
import importlib.util

import pytest
from engine_runs import DEEPSPEED, megatron, problems, run, with_bare

ENGINES = {"deepspeed": lambda world: DEEPSPEED, "megatron": megatron}
RUNS = [
    pytest.param(engine, world, case, id=f"{engine}-{world}-{case}")
    for engine, cases in ENGINES.items()
    for world in (1, 2)
    for case in cases(world)
]


@functools.cache
def seen(engine, world):
    return run(engine, world, with_bare(ENGINES[engine](world)))


@pytest.mark.slow
@pytest.mark.parametrize("engine, world, case", RUNS)
def test_a_run(engine, world, case):
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    assert problems(case, seen(engine, world)) == []
