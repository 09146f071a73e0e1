"""The golden files: the whole texts that users read, one file for each run.

python tests/support/golden.py [PART OF A NAME ...]

renews them and prints the differences. Numbers that differ between processors are
compared without their digits, and a file is written anew where its words differ, or its
numbers.
"""

import difflib
import multiprocessing
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    HERE = Path(__file__).parent
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import torch
from answers.failure import train
from answers.families import FAILURES
from answers.run import ask
from golden_cases import CASES, ON_RANKS
from golden_text import FOLDER, kept, path_of, tidied, told
from ranks import on_ranks

from overflow_fast import OverflowGuard
from overflow_fast.explainer import budget, replayer

# As in tests: what is run again and tried does not depend on how busy a machine is.
budget.LEAST_SECONDS = replayer.LEAST_SECONDS = 600.0

# Of the collection of failures; those of several processes and compilers take longer.
ALONE = [n for n, f in FAILURES.items() if f.ranks == 1 and f.kind != "compiled"]
NAMES = [*CASES, *ON_RANKS, *FAILURES]


def fail(name):
    """Trains a failure of the collection, with its loss in `guard.run`."""
    run = FAILURES[name].build(False)
    with OverflowGuard(run.model, run.optimizer, explain="auto") as guard:
        for _ in train(run, guard.run):
            pass


def _said_on_rank(name):
    return told(ON_RANKS[name])


def said(name):
    """The text of a case as it is today."""
    torch.manual_seed(0)
    if name in ON_RANKS:
        texts = on_ranks(2, _said_on_rank, name, over="gloo")
        return "".join(f"=== rank {i}\n{text}" for i, text in enumerate(texts))
    if name in CASES:
        return told(CASES[name])
    if name in ALONE:
        return told(lambda: fail(name), has_frames=False)
    text = ask(FAILURES[name], "ours-run", seconds=300.0)[-1].text
    return f"--- NonFiniteError\n{tidied(text)}"


def _renewed(name):
    text = said(name)
    before = kept(name)
    path_of(name).write_text(text)
    lines = before.splitlines(), text.splitlines()
    return "\n".join(difflib.unified_diff(*lines, name, name, lineterm="", n=1))


def main(parts):
    FOLDER.mkdir(exist_ok=True)
    names = [n for n in NAMES if not parts or any(each in n for each in parts)]
    # A process for each: a run sees nothing of the one before.
    context = multiprocessing.get_context(
        "spawn" if not hasattr(os, "fork") else "fork"
    )
    with context.Pool(2, maxtasksperchild=1) as pool:
        alone = [name for name in names if name in CASES or name in ALONE]
        for difference in pool.imap(_renewed, alone):
            print(difference, end="\n" * bool(difference), flush=True)
    for name in [each for each in names if each not in alone]:
        difference = _renewed(name)
        print(difference, end="\n" * bool(difference), flush=True)
    if not parts:
        for path in set(FOLDER.glob("*.txt")) - set(map(path_of, NAMES)):
            path.unlink()
            print(f"removed {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
