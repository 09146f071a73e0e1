"""The check of a Mac in one call: tests, a guarded run, times; `make mps-check`.

`--device cpu` takes the same way on any machine, with the CPU's kernel.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from facts import ROOT, origin
from torch import nn

from overflow_fast import OverflowGuard, scan

SIZES = [1 << 12, 1 << 20, 1 << 26]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]
TESTS = ["tests/scanner/test_scan.py", "tests/scanner/test_scan_properties.py"]


class Kept(logging.Handler):
    """Keeps what overflow_fast logs: why its kernel is not used, say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().splitlines()[0])


def tests() -> dict[str, Any]:
    """Runs the scan's tests with the marker `mps`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "mps", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    return {"rc": done.returncode, "last line": lines[-1:], "failed": failed[:200]}


def guarded(device: str) -> dict[str, Any]:
    """Trains a small model that turns bad, under the guard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device=device)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for step in range(20):
            batch = x * float("inf") if step == 10 else x
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        skipped, report = guard.num_skipped, str(guard.last_report).splitlines()[0]
        coverage = str(guard.coverage()).splitlines()
    is_finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {
        "skipped": skipped,
        "weights finite": is_finite,
        "report": report,
        "coverage": coverage,
    }


def seconds(function: Callable[[], object], wait: Callable[[], None]) -> float:
    """The median time of a call, of 9 rounds of several calls."""
    function()
    wait()
    rounds = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(10):
            function()
        wait()
        rounds.append((time.perf_counter() - begin) / 10)
    return statistics.median(rounds)


def timed(dtype: torch.dtype, size: int, device: str) -> dict[str, Any]:
    """One tensor by our operator, torch operations and the shortest line of torch."""
    wait = torch.mps.synchronize if device == "mps" else lambda: None
    tensor = torch.randint(0, 60, (size // dtype.itemsize,), device=device).to(dtype)
    slots = torch.tensor([[-1, 0, 0, 0]], device=device)
    ops = torch.ops.overflow_fast
    by_kernel = seconds(lambda: ops.scan(slots, 0, [tensor]), wait)
    by_torch = seconds(lambda: ops.scan_composite(slots, 0, [tensor]), wait)
    plain = seconds(lambda: tensor.abs().max(), wait)
    return {
        "tensor": f"{str(dtype)[6:]}, {size >> 10} KiB",
        "scan us": round(by_kernel * 1e6, 1),
        "GB/s": round(size / by_kernel / 1e9, 1),
        "torch operations / scan": round(by_torch / by_kernel, 2),
        "abs().max() / scan": round(plain / by_kernel, 2),
    }


def tried(stage: Callable[..., Any], *args: Any) -> Any:
    """What a stage finds, or its error: the next ones run whatever happens."""
    try:
        return stage(*args)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def environment() -> dict[str, Any]:
    return {
        **origin(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": platform.processor(),
    }


def summary(result: dict[str, Any]) -> list[str]:
    lines = [f"{key}: {value}" for key, value in result["environment"].items()]
    lines += [f"scan: {result['scan']}", f"guard: {result['guard']}"]
    lines.append(f"tests: {result['tests'].get('last line', result['tests'])}")
    lines += [f"  {line}" for line in result["tests"].get("failed", [])[:5]]
    lines += [f"time: {row}" for row in result["times"]]
    lines += [f"logged: {line}" for line in result["logged"][:5]]
    return [line[:160] for line in lines][:39]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="mps")
    parser.add_argument("--output", default="build/mps-check.json")
    parser.add_argument("--quick", action="store_true", help="no tests, small tensors")
    args = parser.parse_args()
    if args.device == "mps" and not torch.backends.mps.is_available():
        print("mps-check: torch finds no MPS on this machine")
        return 1
    kept = Kept()
    logging.getLogger("overflow_fast").addHandler(kept)
    bad = torch.tensor([1.0, -torch.inf, torch.nan], device=args.device)
    sizes = SIZES[:1] if args.quick else SIZES
    result = {
        "environment": environment(),
        "scan": tried(lambda: str(scan([bad])[0])),
        "guard": tried(guarded, args.device),
        "times": [tried(timed, d, size, args.device) for d in DTYPES for size in sizes],
        "tests": {} if args.quick else tried(tests),
        "logged": kept.lines,
    }
    Path(args.output).parent.mkdir(exist_ok=True)
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([*summary(result), f"Please send the file {args.output}."]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
