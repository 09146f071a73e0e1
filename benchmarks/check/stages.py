"""The stages: what each runs, for how long, and what it needs."""

from __future__ import annotations

from typing import NamedTuple

SKIPPED = 77  # exit status of a command that cannot do its work here, and says why


class Stage(NamedTuple):
    """One part of the check.

    Attributes:
        name: As `--only` calls it.
        question: What it answers.
        seconds: Its own limit.
        least: It is not begun with fewer seconds left.
        commands: Arguments for Python, one command after the other; one that fails does
            not stop the next.
        needs: Stages that must not have failed.
    """

    name: str
    question: str
    seconds: float
    least: float
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()


def _scripts(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"benchmarks/{name}.py",) for name in names)


STAGES = (
    Stage(
        "kernel",
        "do the kernels agree with the reference, without torch",
        120,
        15,
        (("-m", "check.kernel"),),
    ),
    Stage("build", "does the extension build", 240, 30, (("-m", "check.build"),)),
    Stage(
        "gpu-tests",
        "the tests that need a GPU",
        150,
        15,
        (("-m", "check.testing", "gpu"),),
        ("build",),
    ),
    Stage(
        "scan",
        "bandwidth beside a plain read and the alternatives",
        100,
        15,
        _scripts("bench_scan", "bench_layouts", "bench_lists"),
        ("build",),
    ),
    Stage(
        "hooks",
        "the host's time for a module, waits, memory",
        60,
        10,
        _scripts("bench_hooks"),
        ("build",),
    ),
    Stage(
        "models",
        "training steps of whole models",
        120,
        20,
        _scripts("bench_models"),
        ("build",),
    ),
    Stage(
        "compile",
        "compiled training steps",
        120,
        30,
        _scripts("bench_compile"),
        ("build",),
    ),
    Stage(
        "tests",
        "all other tests",
        300,
        30,
        (("-m", "check.testing", "others"),),
        ("build",),
    ),
    Stage(
        "sanitizer",
        "bad memory accesses, races, reads of memory that nobody wrote",
        150,
        20,
        (("-m", "check.sanitizer"),),
        ("kernel",),
    ),
    Stage(
        "variants",
        "which variant and which constants win",
        180,
        30,
        _scripts("bench_variants", "bench_constants"),
        ("build",),
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
