"""Ten differences between two runs: who names them, in how many lines, at what cost.

MSPROBE names a virtual environment that has Ascend's msprobe (PyPI: mindstudio-probe).
"""

from __future__ import annotations

import csv
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, in_fork, progress, silence, size_text, threads, write
from compared import (
    batch_of,
    element,
    eps,
    float8,
    gradient,
    make,
    softmax_axis,
    swapped,
    weight,
)
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils._pytree import tree_leaves

import overflow_fast

MODEL, HOME = "GPT-2", Path(os.environ.get("MSPROBE", "/nonexistent"))
NOTES = (
    "A training step of a small GPT-2 from its config and the same with one thing "
    "changed, float32, one thread. `named`: the first thing that the tool shows as "
    "different is the module that was changed or one within it; where that is no "
    "module, that it is the loss, or what is between backward and step. `misleads`: "
    "the first thing shown is another module; `no module`: nothing, or an operation "
    "outside of modules. `lines`: what a user has to write, "
    "without imports, to record both steps and find the first difference. `seconds`: "
    "of both steps, the recording and the comparison, the median of all rows; `bytes`: "
    "of both recordings, on disk or (*) in memory. `torch.ao.ns` is its eager numeric "
    "suite; `assert_close`: weights, outputs by forward hooks, and gradients; msprobe: "
    "level `mix`, `msprobe compare`, in whose table the first row that differs was "
    "taken. torchtitan compares the losses of two runs of its own trainer and "
    "names no layer; it was not run."
)


@dataclass
class Run:
    """A step of a model, as a program runs it."""

    model: nn.Module
    scale: float = 1.0
    factor: float = 1.0
    batch: dict[str, torch.Tensor] = field(
        default_factory=lambda: batch_of(MODEL, 0, torch.float32)
    )

    def __call__(self) -> None:
        torch.manual_seed(0)
        self.model.zero_grad()
        (self.model(**self.batch).loss * self.scale).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= self.factor
        torch.optim.SGD(self.model.parameters(), 0.0).step()


# What is planted: returns the name that is to be named.


def dropout(run: Run) -> str:
    run.model.get_submodule("transformer.h.1.mlp.dropout").train()
    return "transformer.h.1.mlp.dropout"


def loss(run: Run) -> str:
    run.scale = 1.5
    return "(loss)"


def clipped(run: Run) -> str:
    run.factor = 0.3
    return "(gradients)"


def on_model(change: Callable[[nn.Module, str], str]) -> Callable[[Run], str]:
    def apply(run: Run) -> str:
        return change(run.model, MODEL)

    apply.__name__ = change.__name__
    return apply


PLANTED = (
    *map(on_model, (weight, element, swapped, eps, softmax_axis, gradient, float8)),
    *(dropout, loss, clipped),
)


# The tools. Each returns the first thing that it shows as different, and bytes.


def ours(run: Run, reference: Run, top: Path) -> tuple[str, int]:
    with overflow_fast.recording(top / "a", run.model):
        run()
    with overflow_fast.recording(top / "b", reference.model):
        reference()
    first = overflow_fast.compare(top / "a", top / "b").first
    return named(first), bytes_of(top.rglob("*"))


def assert_close(run: Run, reference: Run, top: Path) -> tuple[str, int]:
    found = []
    for each in (run, reference):
        held = {k: v.clone() for k, v in each.model.state_dict().items()}

        def keep(name: str, output: Any, held: dict[str, Any] = held) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor):
                held[f"{name}: output"] = first.detach().clone()

        hooks = [
            module.register_forward_hook(lambda m, a, o, n=name, k=keep: k(n, o))
            for name, module in each.model.named_modules()
        ]
        each()
        for hook in hooks:
            hook.remove()
        for name, parameter in each.model.named_parameters():
            held[f"{name}: gradient"] = parameter.grad
        found.append(held)
    for name, value in found[0].items():
        try:
            torch.testing.assert_close(value, found[1][name])
        except AssertionError:
            return name, held_bytes(found)
    return "", held_bytes(found)


def ao_ns(run: Run, reference: Run, top: Path) -> tuple[str, int]:
    from torch.ao.ns import _numeric_suite as suite

    kinds = {type(m) for m in run.model.modules() if not list(m.children())}
    weights = suite.compare_weights(
        reference.model.state_dict(), run.model.state_dict()
    )
    ids = run.batch["input_ids"]
    outputs = suite.compare_model_outputs(
        reference.model, run.model, ids, allow_list=kinds
    )
    size = held_bytes([weights, outputs])
    for name, pair in {**weights, **outputs}.items():
        a, b = pair["float"], pair["quantized"]
        a, b = (a[0], b[0]) if isinstance(a, list) else (a, b)
        if not torch.equal(a, b):
            return name.removesuffix(".stats"), size
    return "", size


def debug_mode(run: Run, reference: Run, top: Path) -> tuple[str, int]:
    texts = []
    for each in (run, reference):
        with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
            each()
        texts.append(mode.debug_string())
    size, modules = sum(map(len, texts)), dict[int, str]()
    for mine, its in zip(*(text.splitlines() for text in texts), strict=False):
        depth = len(mine) - len(mine.lstrip())
        modules = {at: name for at, name in modules.items() if at < depth}
        if mine != its:
            inner = [*modules.values()][-1:]
            return inner[0].partition(".")[2] if inner else f"({mine.strip()})", size
        if "[nn.Mod]" in mine:
            modules[depth] = mine.split()[-1]
    return "", size


def msprobe(run: Run, reference: Run, top: Path) -> tuple[str, int]:
    from msprobe.pytorch import PrecisionDebugger

    def dump(each: Run, path: str) -> None:
        debugger = PrecisionDebugger(
            task="tensor", level="mix", dump_path=path, step=[0]
        )
        debugger.start(model=each.model)
        each()
        debugger.stop()
        debugger.step()

    in_fork(lambda: dump(run, str(top / "a")))  # a process has one debugger
    in_fork(lambda: dump(reference, str(top / "b")))
    size, command = bytes_of(top.rglob("*")), [str(HOME / "bin" / "msprobe"), "compare"]
    for option, name in (("--target_path", "a"), ("--golden_path", "b")):
        command += [option, str(top / name / "step0")]
    command += ["--output_path", str(top / "out")]
    subprocess.run(command, check=True, capture_output=True)
    parents = json.loads(next(top.glob("a/*/*/construct.json")).read_text())
    with open(next((top / "out").glob("compare_result*.csv"))) as file:
        for row in csv.DictReader(file):
            if row["Result"] != "pass" or row["MaxAbsErr"] not in _SAME:
                return module_of(row["NPU Name"], parents), size
    return "", size


_SAME = ("0.0", "unsupported", "N/A", "")


def module_of(name: str, parents: dict[str, Any]) -> str:
    """The module of a row of msprobe's; the row itself if it is of none."""
    while match := re.match(r"(\w+)\.(.+)\.(forward|backward|parameters_grad)", name):
        if match[1] == "Module":
            return match[2].rpartition(".")[0]
        parent = parents.get(match[0])
        if not isinstance(parent, str):
            break
        name = parent
    return f"({name})"


# What the tools have in common.


def named(first: Any) -> str:
    """The module of a first difference, or its kind where it is of no module."""
    if first is None:
        return ""
    return first.module or f"({first.kind})"


def held_bytes(value: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(value) if hasattr(each, "nbytes"))


if HOME.exists():
    sys.path += map(str, HOME.glob("lib/python*/site-packages"))  # last: own torch
TOOLS: dict[str, Callable[[Run, Run, Path], tuple[str, int]]] = {
    "overflow_fast.compare": ours,
    "torch.testing.assert_close": assert_close,
    "torch.ao.ns": ao_ns,
    "DebugMode, hashes": debug_mode,
    **({"msprobe": msprobe} if HOME.exists() else {}),
}


def lines_in(function: Callable[..., Any]) -> int:
    """The lines of a function's body, without imports."""
    lines = [line.strip() for line in inspect.getsource(function).splitlines()[1:]]
    return sum(bool(line) and not line.startswith("from ") for line in lines)


def is_right(found: str, truth: str) -> bool:
    """True if an answer is what was changed: a module, or code outside of it.

    Of such code DebugMode and msprobe show the operation: the loss times its scale, and
    a gradient that is multiplied in place.
    """
    of_code = {
        "(loss)": ("(aten::mul(", "(aten::mul.", "(Tensor.__mul__", "(Tensor.mul."),
        "(gradients)": ("(aten::mul_(", "(aten::mul_.", "(Tensor.__imul__"),
    }
    return found.startswith((truth, *of_code.get(truth, ())))


def answer_of(tool: str, planted: Callable[[Run], str]) -> dict[str, Any]:
    run, reference = Run(make(MODEL, 0)), Run(make(MODEL, 0))
    truth = planted(run)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as top, silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, size = TOOLS[tool](run, reference, Path(top))
        except Exception as error:
            found, size = f"raised {type(error).__name__}: {error}"[:200], 0
    spent = time.perf_counter() - begin
    facts = {"planted": planted.__name__, "answer": found, "truth": truth}
    return {**facts, "seconds": spent, "bytes": size, "named": is_right(found, truth)}


COLUMNS = ["tool", "named", "misleads", "no module", "lines", "seconds", "bytes"]


def row_of(tool: str) -> dict[str, Any]:
    answers = []
    for planted in PLANTED:
        answers.append(answer_of(tool, planted))
        progress(f"{tool}: {answers[-1]}")
    wrong = [each for each in answers if not each["named"]]
    misled = [
        w["planted"] for w in wrong if w["answer"].strip() and w["answer"][0] != "("
    ]
    silent = [each["planted"] for each in wrong if each["planted"] not in misled]
    in_memory = " *" * (tool not in ("overflow_fast.compare", "msprobe"))
    return {
        "tool": tool,
        "named": f"{len(answers) - len(wrong)} of {len(answers)}",
        "misleads": ", ".join(misled),
        "no module": ", ".join(silent),
        "lines": lines_in(TOOLS[tool]),
        "seconds": f"{statistics.median(each['seconds'] for each in answers):.2g}",
        "bytes": size_text(max(each["bytes"] for each in answers)) + in_memory,
        "answers": answers,
    }


def main() -> None:
    with threads(1):
        rows = [row_of(tool) for tool in TOOLS]
    write("compare-tools", "Tools that compare two runs", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
