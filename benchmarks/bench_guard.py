"""What the guard adds to a training step: everything, and what protects the weights."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from common import KEEPS_MEMORY, progress, restart_with, write
from floor import plain_read
from models import ON_CPU, adam, made, step_of
from timing import QUICK, race, ratio, summary
from torch import nn

from overflow_fast import OverflowGuard

PROTECTION = ("gradients", "loss", "weights")
COLUMNS = [
    "model",
    "dtype",
    "guard",
    "bare ms",
    "guarded",
    "adds ms",
    "adds",
    "floor ms",
    "MiB scanned",
    "says itself",
]
NOTES = (
    "A training step with fused AdamW, guarded over bare: medians of paired rounds, "
    "all threads, with memory that the C library does not give back in between "
    "(page faults cost this machine up to a second a step, and vary by as much). "
    "`adds` is the median difference over the bare step. `floor` is a plain read of "
    "as many bytes as the guard scans in a step, in the same rounds. `says itself` is "
    "the median of what the guard measures of its own steps, over the bare one. All "
    "keep calls for explanations, but where explain=False stands. `clipping` is "
    "beside a bare step that clips, too. Goals for GPT-2 small: under 5 % with "
    "everything, under 1 % with the tripwire, under 0.2 % with clipping."
)
CLIPPED = "tripwire, clipping"
BARE_CLIPPED = "bare, clipping"
GUARDS: dict[str, dict[str, Any]] = {
    "everything": {},
    "everything, skip": {"on_overflow": "skip"},  # buffers are copied
    "gradients, loss, weights": {"watch": PROTECTION},
    "gradients": {"watch": ("gradients",)},
    "tripwire": {"watch": "tripwire"},
    CLIPPED: {"watch": "tripwire"},
    "explain=False": {"explain": False},
    "off": {},
}


def measure(name: str, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    model, batch = made(ON_CPU[name], dtype)
    optimizer = adam(model)
    step = step_of(model, batch, optimizer)
    guards: dict[str, OverflowGuard] = {}
    for kind, arguments in GUARDS.items():
        guards[kind] = OverflowGuard(model, optimizer, **arguments)
        guards[kind].disable()
    competitors: dict[str, Callable[[], object]] = dict.fromkeys(
        ["bare", *GUARDS], step
    )
    clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    for kind in (CLIPPED, BARE_CLIPPED):
        competitors[kind] = step_of(model, batch, optimizer, before_step=clip)
    scanned = {kind: bytes_of(guards[kind], competitors[kind]) for kind in guards}
    read = plain_read()
    own: dict[str, list[float]] = {kind: [] for kind in guards}

    @contextlib.contextmanager
    def on(kind: str) -> Any:
        guards[kind].enable()
        yield
        own[kind].append(guards[kind].cost.guard_seconds)
        guards[kind].disable()

    around: dict[str, Callable[[], AbstractContextManager[object]]] = {
        kind: functools.partial(on, kind) for kind in guards if kind != "off"
    }
    buffer = torch.ones(max(scanned.values()), dtype=torch.uint8)
    for kind, count in scanned.items():
        competitors[f"floor {kind}"] = lambda count=count: read(buffer[:count])
    times = race(competitors, rounds, around=around)
    return [
        {"model": name, "dtype": str(dtype)[6:], **row_of(times, kind, own, scanned)}
        for kind in GUARDS
    ]


def bytes_of(guard: OverflowGuard, step: Callable[[], object]) -> int:
    """How many bytes the guard scans in a step; its first one also reads weights."""
    guard.enable()
    step()
    before = guard.coverage().bytes_scanned
    step()
    scanned = guard.coverage().bytes_scanned - before
    guard.disable()
    return scanned


def row_of(
    times: dict[str, list[float]],
    kind: str,
    own: dict[str, list[float]],
    scanned: dict[str, int],
) -> dict[str, Any]:
    if not own[kind]:
        return {**comparison(times, kind, {}), "says itself": ""}
    share = statistics.median(own[kind]) / statistics.median(times[bare_of(kind)])
    return {**comparison(times, kind, scanned), "says itself": f"{share:.2%}"}


def bare_of(kind: str) -> str:
    """The step without a guard that one is compared with."""
    return BARE_CLIPPED if kind == CLIPPED else "bare"


def comparison(
    times: dict[str, list[float]], kind: str, scanned: dict[str, int]
) -> dict[str, Any]:
    """What a guarded step takes beside a bare one and its floor, if it scans."""
    without = bare_of(kind)
    bare = statistics.median(times[without])
    added = statistics.median(
        a - b for a, b in zip(times[kind], times[without], strict=True)
    )
    is_guarded = kind in scanned
    floor = statistics.median(times[f"floor {kind}"]) if is_guarded else 0.0
    return {
        "guard": kind,
        "bare ms": f"{bare * 1e3:.0f}",
        "guarded": f"{ratio(times, kind, without):.3f}x",
        "adds ms": f"{added * 1e3:.1f}",
        "adds": f"{added / bare:.1%}",
        "floor ms": f"{floor * 1e3:.1f}" if is_guarded else "",
        "MiB scanned": f"{scanned[kind] / 2**20:.0f}" if is_guarded else "",
        "seconds": {name: summary(seconds) for name, seconds in times.items()},
    }


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        progress(f"GPT-2 small, {dtype}")
        rows += measure("GPT-2 small", dtype, rounds=15)
        if QUICK:
            break
    write("guard", "The guard", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    restart_with(KEEPS_MEMORY)
    main()
