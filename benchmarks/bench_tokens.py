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
    "A token of GPT-2 small (random weights, float32, 64 tokens in front of it) with "
    "its cache, on one thread: bare and guarded tokens of one text take turns. `adds` "
    "is the median difference of a pair in CPU time, over the median bare token. `says "
    "itself` is the median of what the guard measures of its tokens by the clock, over "
    "the median bare one by the clock. `outputs` is watch='tripwire': the logits alone "
    "are scanned, and the arguments held. Goal: 1 % with outputs."
)
GUARDS: dict[str, dict[str, Any]] = {
    "outputs": {"watch": "tripwire"},
    "everything": {},
}
PROMPT = 64


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
def measure(model: GPT2LMHeadModel, batch: int, pairs: int) -> list[dict[str, Any]]:
    rows = []
    for kind, arguments in GUARDS.items():
        text = Text(model, batch)
        guard = OverflowGuard(model, **arguments)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        own = []
        for i in range(2 * pairs + 4):
            is_on = bool(i % 2)
            guard.enable() if is_on else guard.disable()
            taken = text.token()
            if i >= 4:  # the first ones warm up
                times[is_on].append(taken)
                own += [guard.cost.guard_seconds] * is_on
        guard.remove()
        bare, clock = (
            statistics.median(each) for each in zip(*times[False], strict=True)
        )
        both = zip(times[True], times[False], strict=True)
        added = statistics.median(one[0] - other[0] for one, other in both)
        row = {"model": "GPT-2 small", "batch": batch, "guard": kind}
        row |= {"bare ms": round(1e3 * bare, 1), "adds ms": round(1e3 * added, 2)}
        row["adds"] = f"{added / bare:.1%}"
        row["says itself"] = f"{statistics.median(own) / clock:.2%}"
        rows.append(row)
        progress(str(row))
    return rows


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    pairs = 5 if QUICK else 40
    rows = [row for batch in (1, 8) for row in measure(model, batch, pairs)]
    write("tokens", "Tokens", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    restart_with(KEEPS_MEMORY)
    main()
