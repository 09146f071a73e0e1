"""What the guard adds to a token: outputs alone, and everything."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import KEEPS_MEMORY, progress, restart_with, write
from timing import QUICK
from transformers import GPT2Config, GPT2LMHeadModel

from overflow_fast import OverflowGuard

COLUMNS = ["model", "batch", "guard", "bare ms", "adds ms", "adds", "says itself"]
NOTES = (
    "A token of GPT-2 (random weights, float32, 64 tokens in front of it) with its "
    "cache, on one thread; tiny is 4 layers of width 128. Eight bare and eight guarded "
    "tokens of one text take turns, each a request of its own; the first of eight is "
    "left out. `adds` is the median difference of a pair in CPU time, over the median "
    "bare token. `says itself` is the median of what the guard measures of its tokens "
    "by the clock, over the median bare one by the clock: without what torch takes to "
    "call hooks, and what the model takes longer behind them. `outputs` is "
    "watch='tripwire': the logits alone are scanned, and the arguments held. Goal: "
    "0.15 ms with outputs."
)
GUARDS: dict[str, dict[str, Any]] = {
    "outputs": {"watch": "tripwire"},
    "everything": {},
}
PROMPT, TOKENS = 64, 8
TINY = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000}
MODELS = {"GPT-2 tiny": TINY, "GPT-2 small": {}}


class Text:
    """A text that grows by a token a call.

    Args:
        model: The model.
        batch: How many texts there are.
    """

    def __init__(self, model: GPT2LMHeadModel, batch: int) -> None:
        self._model = model
        ids = torch.randint(0, 1000, (batch, PROMPT))
        self._output = model(ids, use_cache=True)

    def token(self) -> tuple[float, float]:
        """Adds a token; returns the CPU time and the seconds that it took."""
        token = self._output.logits[:, -1:].argmax(-1)
        cache = self._output.past_key_values
        begin, cpu = time.perf_counter(), time.process_time()
        self._output = self._model(token, past_key_values=cache, use_cache=True)
        return time.process_time() - cpu, time.perf_counter() - begin


@torch.no_grad()
def measure(name: str, batch: int, blocks: int) -> list[dict[str, Any]]:
    rows, model = [], GPT2LMHeadModel(GPT2Config(**MODELS[name])).eval()
    for kind, arguments in GUARDS.items():
        text = Text(model, batch)
        guard = OverflowGuard(model, **arguments)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        own = []
        for block in range(2 * blocks + 2):
            is_on = bool(block % 2)
            guard.enable() if is_on else guard.disable()
            for i in range(TOKENS):
                taken = text.token()
                if i and block > 1:  # the first ones warm up
                    times[is_on].append(taken)
                    own += [guard.cost.guard_seconds] * is_on
        guard.remove()
        bare, clock = (
            statistics.median(each) for each in zip(*times[False], strict=True)
        )
        both = zip(times[True], times[False], strict=True)
        added = statistics.median(one[0] - other[0] for one, other in both)
        row = {"model": name, "batch": batch, "guard": kind}
        row |= {"bare ms": round(1e3 * bare, 1), "adds ms": round(1e3 * added, 2)}
        row["adds"] = f"{added / bare:.1%}"
        row["says itself"] = f"{statistics.median(own) / clock:.2%}"
        rows.append(row)
        progress(str(row))
    return rows


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = 2 if QUICK else 12
    kinds = [(name, batch) for name in MODELS for batch in (1, 8)]
    rows = [row for kind in kinds for row in measure(*kind, blocks)]
    write("tokens", "Tokens", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    restart_with(KEEPS_MEMORY)
    main()
