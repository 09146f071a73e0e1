"""How much memory a watched forward needs beyond a bare one."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from common import allocations, progress, restart_with, size_text, write
from timing import QUICK
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

COLUMNS = ["watched by", "allocated by torch", "largest of it", "stays in memory"]
NOTES = (
    "GPT-2 small at 2 x 128 in float32. First what torch's allocator gave out in a "
    "forward beyond the bare one, and the largest block in that; then how what malloc "
    "has given out grows from before the detector is made to after 20 forwards, hooks "
    "included. Goal: 1 MiB plus 32 bytes a slot, no temporary of a tensor's size. "
    "The last row is what 10,000 steps leave after 5,000; goal: nothing."
)


def blocks_of(model: nn.Module, ids: torch.Tensor) -> list[int]:
    """The sizes of all blocks that torch's CPU allocator gives out in a forward."""
    with torch.no_grad():
        return sorted(size for size in allocations(lambda: model(ids)) if size > 0)


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2(3) returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use() -> int:
    """The bytes that malloc has given out, Python's objects included."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def growth(
    model: nn.Module, ids: torch.Tensor, watch: Callable[..., Any] | None
) -> tuple[int, Any]:
    """What stays in memory of making a detector and of 20 forwards; the detector."""
    gc.collect()
    before = in_use()
    detector = None if watch is None else watch(model)
    for _ in range(2 if QUICK else 20):
        with torch.no_grad():
            model(ids)
    gc.collect()
    return in_use() - before, detector


def growth_of_guard(steps: int) -> dict[str, Any]:
    """What stays in memory of `steps` guarded steps of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8)

    def train(count: int) -> int:
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return in_use()

    with OverflowGuard(model, optimizer, "skip"):
        first = train(steps // 2)
        added = train(steps) - first
    name = f"the guard, {steps} steps of a small model"
    return {"watched by": name, "stays in memory": size_text(max(0, added))}


def main() -> None:
    hf.logging.set_verbosity_error()
    model = hf.GPT2LMHeadModel(hf.GPT2Config()).eval()
    ids = torch.randint(0, 50257, (2, 128))
    rows: list[dict[str, Any]] = []
    bare: list[int] = []
    with torch.no_grad():
        for _ in range(5):
            model(ids)
    for name, watch in {
        "nothing": None,
        "ours": DebugUnderflowOverflow,
        "the original": Original,
    }.items():
        progress(name)
        added, detector = growth(model, ids, watch)
        sizes = blocks_of(model, ids)
        if watch is None:
            bare = sizes
        rest = list(sizes)
        for size in bare:
            if size in rest:
                rest.remove(size)
        rows.append(
            {
                "watched by": name,
                "allocated by torch": size_text(sum(sizes) - sum(bare)),
                "largest of it": size_text(max(rest, default=0)),
                "stays in memory": size_text(max(0, added)),
            }
        )
        if watch is DebugUnderflowOverflow:
            rows[-1]["slots"] = detector.coverage.tensors_scanned
            detector.remove()
    progress("the guard")
    rows.append(growth_of_guard(200 if QUICK else 10_000))
    write("memory", "Memory", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    restart_with({"PYTHONMALLOC": "malloc"})  # Python's own arenas hide its objects
    main()
