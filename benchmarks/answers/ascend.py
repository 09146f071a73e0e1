"""Ascend's msprobe (PyPI: mindstudio-probe), from a virtual environment of its own.

Its dump of statistics is taken of the step that fails, as its manual says, and its own
`overflow_check` reads that. MSPROBE names the folder of its environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from overflow_fast.guard.report.causes import BAD_DATA, BAD_WEIGHTS, RANGE_OVERFLOW

from .failure import Failure, Run, is_finite, train
from .tools import Answer

HOME = Path(os.environ.get("MSPROBE", "/nowhere"))
_ALIASES = {"__truediv__": "div", "__pow__": "pow", "linear": "addmm", "__mul__": "mul"}
_ALIASES |= {"softmax": "_softmax", "norm": "linalg_vector_norm", "svd": "_linalg_svd"}
_ALIASES |= {"ctc_loss": "_ctc_loss", "batch_norm": "native_batch_norm"}
_MODULE = re.compile(r"Module\.(.+)\.\w+\.(?:forward|backward)\.\d+$")


def msprobe(failure: Failure, run: Run) -> Answer:
    """The first operation of `overflow_check`, with its stack.

    Causes are concluded from the numbers that it prints.
    """
    sites = [str(path) for path in HOME.glob("lib/python*/site-packages")]
    if not sites:
        return Answer(text="not run: MSPROBE names no environment that has it")
    sys.path += sites  # last, so that torch and numpy stay what they are
    from msprobe.pytorch import PrecisionDebugger

    step = _bad_step(failure)
    folder = tempfile.mkdtemp()
    debugger = PrecisionDebugger(
        task="statistics", level="mix", dump_path=folder, step=[step]
    )

    def begin(phase: str) -> None:
        if phase == "data":
            debugger.start(model=run.model)

    for _ in train(run, mark=begin):
        debugger.stop()
        debugger.step()
    return _checked(failure, Path(folder) / f"step{step}")


def _bad_step(failure: Failure) -> int:
    """The step that fails, found by a run before."""
    torch.manual_seed(0)
    steps: list[str] = []
    is_finite(failure.build(False), steps.append)
    torch.manual_seed(0)
    return steps.count("data") - 1


def _checked(failure: Failure, dump: Path) -> Answer:
    out = dump.parent / "checked"
    command = [HOME / "bin" / "msprobe", "overflow_check", "-i", dump, "-o", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[Any] = []
    for file in out.glob("*.json"):
        ranks = json.loads(file.read_text())
        found += [entry for entries in ranks.values() for entry in entries]
    if not found:
        return Answer(text=f"nothing found: {done.stdout[-300:]}")
    return _of_entry(failure, found[0])


def _of_entry(failure: Failure, entry: dict[str, Any]) -> Answer:
    name, data = entry["op_name"], entry["data_info"]
    answer = Answer(text=json.dumps(entry)[:1500])
    answer.phase = "backward" if ".backward" in name else "forward"
    modules = [_MODULE.match(each) for each in entry["construct_info"]]
    names = [each[1] for each in modules if each]
    answer.module = names[-1] if names else ""
    if not _MODULE.match(name):
        api = name.split(".")[1]
        answer.op = f"aten.{_ALIASES.get(api, api)}"
    for key, each in data.get("parameters", {}).items():
        if _is_bad(each):
            answer.phase, answer.cause = "weights", BAD_WEIGHTS.name
            answer.tensor = f"{answer.module}.{key}"
    if answer.cause is None and _is_bad([data.get("input_args"), data.get("input")]):
        answer.cause = BAD_DATA.name
    elif answer.cause is None and "Infinity" in json.dumps(data.get("output")):
        answer.cause = RANGE_OVERFLOW.name
    stack = " ".join(map(str, entry["stack_info"]))
    place = re.search(rf"{re.escape(failure.file)}, line (\d+)", stack)
    answer.line = int(place[1]) if place else None
    return answer


def _is_bad(stats: Any) -> bool:
    return re.search(r"\b(NaN|Infinity)\b", json.dumps(stats)) is not None
