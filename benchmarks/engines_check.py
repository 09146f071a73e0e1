"""Runs the guard under training engines with planted faults: `make engines-check`.

Engines that are not installed are left out. A clean run is compared bit for bit with
one that has no guard, a skipped step with a run that leaves it out: see
engines/engine_runs.py.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from common import progress
from facts import commit, table, write_json, write_whole

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "engines"))
from engine_runs import ENGINES, Case, problems, run, with_bare  # noqa: E402

PACKAGES = {
    "deepspeed": "deepspeed",
    "trainers": "deepspeed",
    "trl": "trl",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
}
# Shown with the versions, where one is installed.
BESIDE = {"trainers": ["transformers", "accelerate"], "trl": ["transformers"]}
FAULTS = ["none", "search", "input", "overflow", "backward", "persistent", "generation"]
COLUMNS = ["engine", "layout", "dtype", "ranks", *FAULTS]
NOTES = """\
Runs without a problem, of those that were made. Each has six steps of two micro-
batches; the fault is in the fourth, on the last rank: a non-finite input, an overflow
within a layer, a nan in backward alone ("persistent": from that step on, under a loss
scale that can be lowered once). "none" has no fault, "search" a loss scale that is too
large at first, "generation" a nan in the forwards without autograd that GRPO samples
from. With fp16 a nan in one backward alone is the scale's to find.

Demanded of each run without a fault: losses, weights, master weights, optimizer states,
loss scale and schedule bit for bit those without a guard, no report and no line in the
log. With one: the same report on all ranks in the step of the fault, with a module of
the user's model and the rank of the fault (but for gradients that were reduced before
they were looked at), a cause or why there is none, and the state bit for bit that of a
run which leaves the step out. A nan in a generation is raised in its step, before
`torch.multinomial` raises an error of its own. Policies are "skip" and "raise", watched
are all tensors and `watch="tripwire"`.

Not run: GPUs, NCCL, more than 4 ranks, offloading, the pipelines of DeepSpeed and
torchtitan, expert parallelism. torchtitan has no fp16; with torch 2.13 it runs with
`spmd_backend="partial_dtensor"`. On four ranks the policy is "skip" and all tensors are
watched. "trainers" is DeepSpeed under transformers' Trainer and Accelerate, "trl"
TRL's trainers without it. In stage 0 DeepSpeed 0.19.8 does not scale the loss of fp16,
so there is no search; "1 fp32 sums" is its BF16_Optimizer.
"""


def cases_of(engine: str, world: int) -> list[Case]:
    """The guarded runs on some ranks; on four, those of one policy."""
    cases = ENGINES[engine](world)
    if world < 4:
        return cases
    return [c for c in cases if c.watch == "all" and c.policy == "skip"]


def rows_of(engine: str, world: int, failures: list[str]) -> list[dict[str, Any]]:
    """Runs an engine's cases; appends what is wrong to `failures`."""
    cases = cases_of(engine, world)
    results = run(engine, world, with_bare(cases))
    wrong = {case: problems(case, results) for case in cases}
    for case, said in wrong.items():
        failures += [f"{engine}, {world} ranks, {case}: {each}" for each in said]
    rows = []
    for layout, dtype in dict.fromkeys((c.layout, c.dtype) for c in cases):
        row = {"engine": engine, "layout": layout, "dtype": dtype, "ranks": world}
        for fault in FAULTS:
            made = [c for c in cases if (c.layout, c.dtype) == (layout, dtype)]
            made = [c for c in made if c.fault == fault]
            good = sum(not wrong[c] for c in made)
            row[fault] = f"{good} of {len(made)}" if made else "-"
        rows.append(row)
    return rows


def main() -> int:
    """Runs the matrix; returns 1 if a run has a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", nargs="+", default=list(PACKAGES))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    versions = [f"commit {commit()}", f"torch {importlib.metadata.version('torch')}"]
    engines = []
    for engine in arguments.engines:
        try:
            version = importlib.metadata.version(PACKAGES[engine])
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{PACKAGES[engine]} not installed: not run")
            continue
        said = [f"{PACKAGES[engine]} {version}"]
        beside = BESIDE.get(engine, [])
        said += [f"{each} {importlib.metadata.version(each)}" for each in beside]
        versions += [each for each in said if each not in versions]
        engines.append(engine)
    for world in arguments.ranks:
        for engine in engines:
            progress(f"{engine}, {world} ranks")
            rows += rows_of(engine, world, failures)
            write(rows, failures, versions)
    print("\n".join(failures) or "no problem")
    return bool(failures)


def write(rows: list[dict[str, Any]], failures: list[str], versions: list[str]) -> None:
    """Writes the table and its JSON."""
    lines = ["# The guard under training engines", "", NOTES, "; ".join(versions), ""]
    lines += table(COLUMNS, rows)
    lines += ["", *(f"- {each[:500]}" for each in failures), ""]
    write_whole(HERE / "results" / "engines-cpu.md", "\n".join(lines))
    raw = {"versions": versions, "rows": rows, "failures": failures}
    write_json(HERE / "results" / "raw" / "engines-cpu.json", raw)


if __name__ == "__main__":
    sys.exit(main())
