"""DeepSpeed, also under trainers, TRL, Megatron-core, torchtitan: planted faults.

Where they are installed.
"""

import functools
import importlib.util

import pytest
from engine_runs import ENGINES, problems, run, with_bare

PACKAGES = {"trainers": "deepspeed"}
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
    package = PACKAGES.get(engine, engine)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    assert problems(case, seen(engine, world)) == []
