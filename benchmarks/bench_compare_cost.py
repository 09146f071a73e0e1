"""The cost of a recording and of a comparison of two models.

MSPROBE names a virtual environment that has Ascend's msprobe (PyPI: mindstudio-probe),
whose dumps are then taken of the same steps.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, in_fork, peak_of, progress, size_text, threads, write
from timing import QUICK, cpu_time
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import overflow_fast

ROUNDS = 2 if QUICK else 3
HOME = os.environ.get("MSPROBE", "")
COLUMNS = [
    *("model", "batch", "rows", "step s", "fingerprints", "bytes"),
    *("compare_live", "memory"),
    *("msprobe statistics", "its bytes", "msprobe tensors", "bytes of these"),
]
NOTES = (
    "A training step (forward, backward) of models from their configs, float32, one "
    "thread. `fingerprints`: CPU time of a recorded step over that of a bare one, "
    "medians of alternating rounds (goal: below 1.3). "
    "`compare_live`: CPU time of the comparison of two equal models, gradients "
    "included, over that of their two steps (goal: below 1.2). `memory`: how much more "
    "a process holds at most while `compare_live` runs than while the two steps run in "
    "turn. "
    "`msprobe`: its dump of the same step at its level `mix`, as above. A row is about "
    "1.4 KB: a step of Llama 2 7B has 2,500 of them at most, 3.5 MB a rank (by "
    "arithmetic, not run)."
)


def gpt2(width: int, layers: int) -> torch.nn.Module:
    heads = width // 64
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=5000)
    return GPT2LMHeadModel(config).eval()


def llama() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=5000,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=8,
        )
    ).eval()


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, int]]] = {
    "GPT-2, 4 layers of 128": (lambda: gpt2(128, 4), (2, 64)),
    "GPT-2, 4 layers of 512": (lambda: gpt2(512, 4), (4, 256)),
    "Llama, 4 layers of 512": (llama, (4, 256)),
}


def msprobe_dump(
    model: torch.nn.Module, step: Callable[[], Any], task: str
) -> tuple[str, str]:
    """The cost and the size of msprobe's dump of a step; "" where it is missing."""
    sites = [str(path) for path in Path(HOME).glob("lib/python*/site-packages")]
    if not HOME or not sites:
        return "", ""

    def run() -> tuple[float, int]:
        step()
        bare = statistics.median(cpu_time(step) for _ in range(ROUNDS))
        sys.path.extend(sites)  # last, so that torch and numpy stay what they are
        from msprobe.pytorch import PrecisionDebugger

        with tempfile.TemporaryDirectory() as top:
            options = {"task": task, "level": "mix", "dump_path": top, "step": [0]}
            debugger = PrecisionDebugger(**options)

            def dump() -> None:
                debugger.start(model=model)
                step()
                debugger.stop()
                debugger.step()

            return cpu_time(dump) / bare, bytes_of(Path(top).rglob("*"))

    ratio, size = in_fork(run)
    return f"{ratio:.2f}x", size_text(size)


def measure(name: str) -> dict[str, Any]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    ids = torch.randint(0, 5000, shape)
    batch = {"input_ids": ids, "labels": ids}
    other = copy.deepcopy(model)

    def step(each: torch.nn.Module = model) -> None:
        each.zero_grad()
        each(**batch).loss.backward()

    sizes: list[int] = []

    def record() -> None:
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top) / "run"
            with overflow_fast.recording(folder, model):
                step()
            sizes.append(bytes_of(folder.rglob("*")))

    functions: dict[str, Callable[[], Any]] = {
        "bare": step,
        "fingerprints": record,
        "live": lambda: overflow_fast.compare_live(model, other, batch, backward=True),
    }
    times: dict[str, list[float]] = {key: [] for key in functions}
    for number in range(ROUNDS + 1):
        for key, function in functions.items():
            spent = cpu_time(function)
            if number:  # the first warms up
                times[key].append(spent)
    median = {key: statistics.median(found) for key, found in times.items()}
    bare = median["bare"]
    more = peak_of(functions["live"]) - peak_of(lambda: (step(), step(other)))
    dumps = [msprobe_dump(model, step, task) for task in ("statistics", "tensor")]
    rows = overflow_fast.compare_live(model, other, batch, backward=True).rows
    return {
        "model": name,
        "batch": " x ".join(map(str, shape)),
        "rows": len(rows),
        "step s": f"{bare:.3f}",
        "fingerprints": f"{median['fingerprints'] / bare:.2f}x",
        "bytes": size_text(sizes[-1]),
        "compare_live": f"{median['live'] / (2 * bare):.2f}x",
        "memory": size_text(max(0, more)),
        "msprobe statistics": dumps[0][0],
        "its bytes": dumps[0][1],
        "msprobe tensors": dumps[1][0],
        "bytes of these": dumps[1][1],
    }


def main() -> None:
    rows = []
    with threads(1):
        for name in MODELS:
            progress(name)
            rows.append(measure(name))
    write("compare-cost", "The cost of comparisons", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
