"""The cost of an explanation, and of a look at every operation of a clean step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from common import peak_of, progress, size_text, threads, write
from models import ON_CPU, small
from timing import QUICK, cpu_time
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.explainer import step_explainer as explainer
from overflow_fast.explainer.effects.rule import EffectRule
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.monitors import MaskedOps
from overflow_fast.options import Explain

COLUMNS = [
    *("dtype", "what", "step ms", "takes ms", "steps", "forwards", "effects"),
    "a step",
    *("step memory", "adds"),
]
NOTES = (
    "CPU time of one thread, so that other work on the machine counts as little as it "
    "can: the least of some rounds in one process; `steps` is the ratio. `log of all`: "
    "the logarithm of a negative number for each text, behind a GPT-2 of 6 layers of "
    "width 256, of 4 or 32 texts of 64 tokens; `log of one`: of 0, for one text. "
    "`effects` is the share that is gone where nothing ends a replay before an effect; "
    "with and without by turns. All others are of GPT-2 small, 2 texts of 128 tokens, "
    "fused AdamW: an explanation is of a step whose feed-forward overflows in the "
    "middle of the model (weights are scaled). It has replays, the table of "
    "operations, the sample, and the remedies that are tried; it comes once for an "
    "incident. `MaskedOps` looks inside every operation of one clean step in N: `a "
    "step` is its share with N = 100. `step memory`: what a process holds at most in "
    "which three steps run; it `adds` so much where the third is looked into or "
    "explained."
)
ROUNDS = 2 if QUICK else 3
BUDGETS = (8, 2)


class Training:
    """A model in training; calling it makes a step."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model, self.batch = ON_CPU["GPT-2 small"]()
        self.model = model.to(dtype).train()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def __call__(self) -> None:
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def peaks_of(dtype: torch.dtype) -> list[int]:
    """What a process holds at most: of steps alone, of MaskedOps, of explanations."""

    def run(is_bad: bool = False, **options: Any) -> None:
        step = Training(dtype)
        with contextlib.ExitStack() as stack:
            step()
            step()
            if is_bad:
                plant(step.model)
            if options:
                guard = OverflowGuard(step.model, step.optimizer, "skip", **options)
                stack.enter_context(guard)
            step()

    ways: list[dict[str, Any]] = [
        {},
        {"monitors": [MaskedOps(every=1)]},
        *({"is_bad": True, "explain": Explain("always", budget=n)} for n in BUDGETS),
    ]
    return [peak_of(lambda way=way: run(**way)) for way in ways]


def rows_of(dtype: torch.dtype, bare: int, *peaks: int) -> list[dict[str, Any]]:
    step = Training(dtype)
    model, optimizer = step.model, step.optimizer
    step()
    looks, plain = [], []
    with OverflowGuard(model, optimizer, monitors=[MaskedOps(every=2)]) as guard:
        for _ in range(ROUNDS + 1):
            looks.append(cpu_time(step))
            plain.append(cpu_time(step))
        assert guard.last_report is None
    base = min(plain[1:])
    look = min(looks[1:]) - base
    shared = {"dtype": str(dtype)[6:], "step ms": f"{base * 1e3:.0f}"}
    audit = {
        "what": "MaskedOps",
        "takes ms": f"{look * 1e3:.0f}",
        "steps": f"{look / base:.2f}",
        "forwards": 1,
        "a step": f"{look / base / 100:.2%}",
        "seconds": looks,
    }
    plant(model)
    found = [explained(model, optimizer, step, base, budget) for budget in BUDGETS]
    for row, peak in zip((audit, *found), peaks, strict=True):
        row |= {"step memory": size_text(bare), "adds": size_text(max(0, peak - bare))}
    return [{**shared, **row} for row in (audit, *found)]


def explained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    base: float,
    budget: int,
) -> dict[str, Any]:
    """Explains the same bad step again and again; it is skipped each time."""
    asked, seconds = Explain("always", budget=budget), []
    with OverflowGuard(model, optimizer, on_overflow="skip", explain=asked):
        for _ in range(ROUNDS):
            found, taken = explanation_of(step)
            seconds.append(taken)
            assert found.op is not None
            assert found.module.startswith("transformer.h.6.mlp"), found
    return row_of(f"explanation, budget={budget}", base, seconds, found)


def explanation_of(step: Callable[[], object]) -> tuple[Explanation, float]:
    """The explanation of a bad step, and the CPU seconds that it took."""
    found: list[tuple[Explanation, float]] = []
    plain = explainer.investigate

    def investigate(*args: Any, **kwargs: Any) -> Explanation:
        begin = time.process_time()
        explanation = plain(*args, **kwargs)
        found.append((explanation, time.process_time() - begin))
        return explanation

    with mock.patch.object(explainer, "investigate", investigate):
        step()
    return found[0]


def row_of(
    what: str, base: float, seconds: list[float], found: Explanation
) -> dict[str, Any]:
    return {
        "what": what,
        "takes ms": f"{min(seconds) * 1e3:.0f}",
        "steps": f"{min(seconds) / base:.2f}",
        "forwards": found.replays,
        "a step": "",
        "seconds": seconds,
    }


def logarithm_row(num_texts: int, of_all: bool) -> dict[str, Any]:
    """Explains an undefined logarithm of what a small GPT-2 has returned."""
    torch.manual_seed(0)
    model, _ = small()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids, kept = torch.randint(0, 8192, (num_texts, 64)), torch.ones(num_texts, 1)
    less = 0.0

    def loss() -> torch.Tensor:
        p = model(input_ids=ids).logits.softmax(-1)
        p = p.gather(-1, ids[..., None]).squeeze(-1) * kept - less
        return -p.log().mean()

    def step() -> None:
        guard.run(loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    asked, plain = Explain("always"), []
    taken: dict[bool, list[float]] = {True: [], False: []}
    with OverflowGuard(model, optimizer, on_overflow="skip", explain=asked) as guard:
        step()
        for has_rule in (True, False) * (3 * ROUNDS):
            less, kept[1] = 0.0, 1.0
            plain.append(cpu_time(step))
            less, kept[1] = (1.0, 1.0) if of_all else (0.0, 0.0)
            with contextlib.nullcontext() if has_rule else without_rule():
                found, seconds = explanation_of(step)
            taken[has_rule].append(seconds)
            assert found.op is not None and found.op.name == "aten.log"
            assert found.sample == (None if of_all else 1), found
            assert of_all or found.remedies[0].is_finite, found
    what = f"log of {'all' if of_all else 'one'}, {num_texts} texts"
    row = row_of(what, min(plain), taken[True], found)
    row["effects"] = f"{1 - min(taken[False]) / min(taken[True]):.0%}"
    return {"dtype": "float32", "step ms": f"{min(plain) * 1e3:.0f}", **row}


def without_rule() -> contextlib.AbstractContextManager[object]:
    """Lets replays run to their ends, whatever they do."""
    return mock.patch.object(EffectRule, "applied", lambda *_: contextlib.nullcontext())


def plant(model: nn.Module) -> None:
    """Scales a feed-forward so that its product is beyond float32 and bfloat16."""
    mlp = model.get_submodule("transformer.h.6.mlp")
    with torch.no_grad():
        for each in (mlp.c_fc, mlp.c_proj):
            each.weight.mul_(1e22)


def main() -> None:
    logging.disable(logging.WARNING)  # the reports themselves
    dtypes = (torch.float32, torch.bfloat16)
    with threads(1):
        peaks = {each: peaks_of(each) for each in dtypes}
        progress("logarithms")
        rows = [logarithm_row(n, of_all) for n in (4, 32) for of_all in (True, False)]
        for dtype in dtypes:
            progress(str(dtype))
            rows += rows_of(dtype, *peaks[dtype])
    write("explain", "The cost of an explanation", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
