"""DeepSpeed, also under trainers, TRL, Megatron-core, torchtitan: planted faults.

Where they are installed. `make engines-check` runs all cases, these are pairs.
"""

import dataclasses
import functools
import importlib.util

import pytest
from engine_runs import ENGINES, problems, run, with_bare
from pairs import pairs_of

PACKAGES = {"trainers": "deepspeed"}
CASES = {
    engine: pairs_of(
        [(world, case) for world in (1, 2) for case in cases(world)],
        lambda run: (run[0], *dataclasses.astuple(run[1])),
    )
    for engine, cases in ENGINES.items()
}
RUNS = [
    pytest.param(engine, world, case, id=f"{engine}-{world}-{case}")
    for engine, cases in CASES.items()
    for world, case in cases
]


@functools.cache
def seen(engine, world):
    cases = [case for of, case in CASES[engine] if of == world]
    return run(engine, world, with_bare(cases))


@pytest.mark.slow
@pytest.mark.parametrize("engine, world, case", RUNS)
def test_a_run(engine, world, case):
    package = PACKAGES.get(engine, engine)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    assert problems(case, seen(engine, world)) == []
