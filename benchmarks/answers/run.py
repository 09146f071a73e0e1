"""Runs tools on failures, each pair in a process of its own, and judges them.

python benchmarks/answers/run.py [--only NAME,NAME] [--tools ours,transformers] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo.backends.debugging  # what forks for compiled failures would import
import torch._inductor.compile_fx
import torch.distributed as dist
from facts import origin, table, write_json, write_whole

from answers.ascend import msprobe
from answers.failure import Failure
from answers.families import FAILURES
from answers.judge import OURS, PARTS, judge_ranks
from answers.tools import TOOLS, Answer
from answers.verify import ends_finite, of_place

SECONDS = 60.0
RESULTS = Path(__file__).parent.parent / "results"
RESULT = RESULTS / "raw" / "answers-cpu.json"
_TITLE = "Who names the cause"
_NOTES = (
    "Failures of public reports, made again small, and what each tool names of them. "
    "How it is judged is written at the top of benchmarks/answers/judge.py."
)
_COLUMNS = ("phase", "module", "op", "cause", "sample", "first", "misleads")
_NAMES = {
    "ours": "OverflowGuard alone",
    "ours-run": "OverflowGuard, `guard.run`",
    "transformers": "DebugUnderflowOverflow",
    "detect_anomaly": "`detect_anomaly`",
    "debugmode": "`DebugMode`, norms of all tensors",
    "msprobe": "msprobe, a second run",
}
_fork: Any = multiprocessing.get_context("fork")


def _answer(name: str, tool: str, rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    failure = FAILURES[name]
    try:
        if failure.ranks > 1:
            address = f"file://{store}"
            size = {"rank": rank, "world_size": failure.ranks}
            dist.init_process_group("gloo", init_method=address, **size)
        pipe.send(WAYS[tool](failure))
    except BaseException as error:
        pipe.send(Answer(text=f"raised {type(error).__name__}: {error}"[:500]))
    os._exit(0)  # others may wait in a collective, and threads of the compiler run


def _run_tool(tool: str) -> Callable[[Failure], Answer]:
    return lambda failure: TOOLS[tool](failure, failure.build(False))


def _plain(is_cured: bool) -> Callable[[Failure], Answer]:
    return lambda failure: Answer(text=str(ends_finite(failure, is_cured)))


TOOLS["msprobe"] = msprobe
WAYS = {tool: _run_tool(tool) for tool in TOOLS}
WAYS |= {"as it is": _plain(False), "cured": _plain(True)}


def ask(failure: Failure, tool: str, seconds: float = SECONDS) -> list[Answer]:
    """What a tool says of a failure on each rank, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(failure.ranks):
            here, there = _fork.Pipe(duplex=False)
            store = f"{folder}/store"
            given = failure.name, tool, rank, store, there
            processes.append(_fork.Process(target=_answer, args=given))
            processes[-1].start()
            there.close()
            pipes.append(here)
        end = time.monotonic() + seconds
        answers = [_received(pipe, end - time.monotonic()) for pipe in pipes]
        for process in processes:
            process.kill()
            process.join()
    return answers


def _received(pipe: Any, seconds: float) -> Answer:
    try:
        answer: Answer = (
            pipe.recv() if pipe.poll(max(1.0, seconds)) else Answer(text="timed out")
        )
    except EOFError:
        answer = Answer(text="the process died")
    return answer


def verified(failure: Failure) -> list[str]:
    """What an experiment finds wrong with the truth of a failure of several ranks."""
    found = []
    if all(answer.text == "True" for answer in ask(failure, "as it is")):
        found.append("it is finite")
    if not all(answer.text == "True" for answer in ask(failure, "cured")):
        found.append("cured, it is not finite")
    return found + of_place(failure)


def rows_of(names: list[str], tools: list[str], show: Any) -> list[dict[str, Any]]:
    """Judges each tool on each failure."""
    rows = []
    for name in names:
        failure = FAILURES[name]
        for tool in tools:
            judgement = judge_ranks(failure, ask(failure, tool), tool)
            rows.append({"failure": name, "tool": tool, **judgement.as_row()})
            show(rows[-1])
    return rows


def summary(rows: list[dict[str, Any]], tools: list[str]) -> list[dict[str, Any]]:
    """How many of the answers of each tool are right."""
    found = []
    for tool in tools:
        own = [row for row in rows if row["tool"] == tool]
        right = {part: sum(row.get(part) is True for row in own) for part in PARTS}
        misleads = sum(row["misleads"] for row in own)
        found.append(
            {"tool": tool, "failures": len(own), **right, "misleads": misleads}
        )
    return found


def table_of(rows: list[dict[str, Any]]) -> str:
    """The summary in Markdown: a tool a row.

    Of a tool that was asked about some failures alone, each cell says of how many.
    """
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    most = _counts(FAILURES)
    heads = {column: f"{column} (of {most[column]})" for column in _COLUMNS}
    heads["first"] = f"cause and place in the first line (of {most['first']})"
    lines = []
    for each in summary(rows, tools):
        asked = _counts(r["failure"] for r in rows if r["tool"] == each["tool"])
        lines.append({"named rightly": _NAMES[each["tool"]]})
        for column, head in heads.items():
            of = f" of {asked[column]}" * (asked != most)
            has_none = column == "first" and each["tool"] not in OURS
            lines[-1][head] = "" if has_none else f"{each[column]}{of}"
    return "\n".join(table(["named rightly", *heads.values()], lines))


def _counts(names: Iterable[str]) -> dict[str, int]:
    """How many failures have what a column counts."""
    own = [FAILURES[name] for name in names]
    has = {
        "op": [bool(failure.op) for failure in own],
        "sample": [failure.sample is not None for failure in own],
        "module": [failure.has_module for failure in own],
    }
    return {column: sum(has.get(column, [True] * len(own))) for column in _COLUMNS}


def write_result(name: str, title: str, notes: str, rows: Any, text: str) -> None:
    """Writes rows and their table among the results."""
    machine = {"torch": torch.__version__, "threads": 1, **origin()}
    result = {"machine": machine, "title": title, "notes": notes, "rows": rows}
    write_json(RESULTS / "raw" / f"{name}.json", result)
    write_whole(RESULTS / f"{name}.md", f"# {title}\n\n{notes}\n\n{text}\n")


def keep(rows: list[dict[str, Any]]) -> None:
    """Writes rows in place of those that the result has of the same tools."""
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    tools = {row["tool"] for row in rows}
    plain = [{k: v for k, v in row.items() if k != "text"} for row in rows]
    plain += [row for row in before if row["tool"] not in tools]
    plain.sort(key=lambda row: list(TOOLS).index(row["tool"]))
    write_result("answers-cpu", _TITLE, _NOTES, plain, table_of(plain))


def _show(row: dict[str, Any]) -> None:
    signs = {True: "+", False: "!", None: "."}
    parts = " ".join(f"{part} {signs[row[part]]}" for part in PARTS)
    misleads = "MISLEADS" if row["misleads"] else ""
    print(f"{row['failure']:44} {row['tool']:15} {parts} {misleads}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of the names of failures")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--text", action="store_true", help="print what was said")
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    tools = options.tools.split(",")
    parts = options.only.split(",")
    names = [name for name in FAILURES if any(part in name for part in parts)]

    def show(row: dict[str, Any]) -> None:
        if not options.json:
            _show(row)
            print(row["text"]) if options.text else None

    rows = rows_of(names, tools, show)
    if options.write:
        keep(rows)
    if options.json:
        print(json.dumps(rows, indent=1))
    for each in [] if options.json else summary(rows, tools):
        print(each)


if __name__ == "__main__":
    main()
