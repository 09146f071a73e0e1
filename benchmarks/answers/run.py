"""Runs tools on failures, each pair in a process of its own, and judges them.

python benchmarks/answers/run.py [--only NAME] [--tools ours,detect_anomaly] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo

from answers.failure import Failure
from answers.families import FAILURES
from answers.judge import judge
from answers.tools import TOOLS, Answer

SECONDS = 120
_fork: Any = multiprocessing.get_context("fork")
_PARTS = ("phase", "cause", "op", "module", "line", "sample", "tensor")


def _answer(name: str, tool: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    failure = FAILURES[name]
    try:
        pipe.send(TOOLS[tool](failure, failure.build(False)))
    except BaseException as error:
        pipe.send(Answer(text=f"the tool raised {type(error).__name__}: {error}"[:500]))


def ask(failure: Failure, tool: str, seconds: float = SECONDS) -> Answer:
    """What a tool says of a failure, in a process of its own."""
    here, there = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_answer, args=(failure.name, tool, there))
    process.start()
    there.close()
    try:
        answer: Answer = here.recv() if here.poll(seconds) else Answer(text="timed out")
    except EOFError:
        answer = Answer(text="the process died")
    process.kill()
    process.join()
    return answer


def rows_of(names: list[str], tools: list[str], show: Any) -> list[dict[str, Any]]:
    """Judges each tool on each failure."""
    rows = []
    for name in names:
        failure = FAILURES[name]
        for tool in tools:
            judgement = judge(failure, ask(failure, tool), tool)
            rows.append({"failure": name, "tool": tool, **judgement.as_row()})
            show(rows[-1])
    return rows


def summary(rows: list[dict[str, Any]], tools: list[str]) -> list[dict[str, Any]]:
    """How many of the answers of each tool are right."""
    found = []
    for tool in tools:
        own = [row for row in rows if row["tool"] == tool]
        right = {part: sum(row[part] is True for row in own) for part in _PARTS}
        misleads = sum(row["misleads"] for row in own)
        found.append(
            {"tool": tool, "failures": len(own), **right, "misleads": misleads}
        )
    return found


def _show(row: dict[str, Any]) -> None:
    signs = {True: "+", False: "!", None: "."}
    parts = " ".join(f"{part} {signs[row[part]]}" for part in _PARTS)
    misleads = "MISLEADS" if row["misleads"] else ""
    print(f"{row['failure']:44} {row['tool']:15} {parts} {misleads}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--text", action="store_true", help="print what was said")
    options = parser.parse_args()
    tools = options.tools.split(",")
    names = [name for name in FAILURES if options.only in name]

    def show(row: dict[str, Any]) -> None:
        if not options.json:
            _show(row)
            print(row["text"]) if options.text else None

    rows = rows_of(names, tools, show)
    if options.json:
        print(json.dumps(rows, indent=1))
    for each in [] if options.json else summary(rows, tools):
        print(each)


if __name__ == "__main__":
    main()
