"""How much memory a watched forward needs beyond a bare one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from common import QUICK, progress, size_text, write
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow

COLUMNS = ["watched by", "allocated by torch", "largest of it", "resident, added"]
NOTES = (
    "A forward of GPT-2 small at 2 x 128 in float32. First what torch's allocator gave "
    "out in the forward beyond the bare one, and the largest block in that; then the "
    "growth of the process's peak resident memory from before the detector is made to "
    "after 20 forwards. Goal: 1 MiB plus 32 bytes a slot, no temporary of a tensor's "
    "size."
)


def allocations(model: nn.Module, ids: torch.Tensor) -> list[int]:
    """The sizes of all blocks that torch's CPU allocator gives out in a forward."""
    with (
        torch.no_grad(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        model(ids)
    events = seen.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    return sorted(sizes)


def peak_resident() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def resident_growth(
    model: nn.Module, ids: torch.Tensor, watch: Callable[..., Any] | None
) -> tuple[int, Any]:
    """How the peak grows from before the detector is made, and the detector."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM starts again from what is resident now
    before = peak_resident()
    detector = None if watch is None else watch(model)
    for _ in range(2 if QUICK else 20):
        with torch.no_grad():
            model(ids)
    return peak_resident() - before, detector


def main() -> None:
    hf.logging.set_verbosity_error()
    model = hf.GPT2LMHeadModel(hf.GPT2Config()).eval()
    ids = torch.randint(0, 50257, (2, 128))
    rows: list[dict[str, Any]] = []
    bare: list[int] = []
    bare_growth = 0
    model(ids)
    for name, watch in {
        "nothing": None,
        "ours": DebugUnderflowOverflow,
        "the original": Original,
    }.items():
        progress(name)
        growth, detector = resident_growth(model, ids, watch)
        sizes = allocations(model, ids)
        if watch is None:
            bare, bare_growth = sizes, growth
        rest = list(sizes)
        for size in bare:
            if size in rest:
                rest.remove(size)
        rows.append(
            {
                "watched by": name,
                "allocated by torch": size_text(sum(sizes) - sum(bare)),
                "largest of it": size_text(max(rest, default=0)),
                "resident, added": size_text(max(0, growth - bare_growth)),
            }
        )
        if watch is DebugUnderflowOverflow:
            rows[-1]["slots"] = detector._recorder.tensors_scanned
            detector.remove()
    write("memory", "Memory", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
