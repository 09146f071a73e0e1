"""A list of small tensors in one call, as frames and gradients are scanned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_scan import filled, new_slots
from common import Results, progress, require_kernels
from timing import QUICK, host_time, race, summary

COUNTS = (1, 4, 5, 80, 89, 1000)
BYTES = 4096  # of a tensor
COLUMNS = ["tensors", "scan us", "scan us of the host", "foreach_norm / scan"]
NOTES = (
    "float32, 4 KiB each. The first time is the device's (on the CPU there is only "
    "one). Lists of up to 4, of up to 88 and of up to 984 tensors are one launch "
    "each, with parameters of another size."
)


def main() -> None:
    require_kernels()
    op = torch.ops.overflow_fast.scan.default
    results = Results("lists", "Scan of a list of tensors", NOTES, COLUMNS)
    for count in COUNTS[: 3 if QUICK else None]:
        progress(f"{count} tensors")
        tensors = [filled(torch.float32, BYTES) for _ in range(count)]
        slots = new_slots(count)
        competitors: dict[str, Callable[[], object]] = {
            "scan": lambda t=tensors, s=slots: op(s, 0, t),
            "foreach_norm": lambda t=tensors: torch._foreach_norm(t, torch.inf),
        }
        times = race(competitors, max_calls=50)
        middle = {name: summary(seconds)["median"] for name, seconds in times.items()}
        only_host = race({"scan": competitors["scan"]}, timer=host_time, max_calls=50)
        results.add(
            {
                "tensors": count,
                "scan us": f"{middle['scan'] * 1e6:.2f}",
                COLUMNS[2]: f"{summary(only_host['scan'])['median'] * 1e6:.2f}",
                COLUMNS[3]: f"{middle['foreach_norm'] / middle['scan']:.3g}",
                "seconds": {name: summary(seconds) for name, seconds in times.items()},
            }
        )
    last = results.rows[-1]
    results.headline(f"{last['tensors']} tensors of 4 KiB: {last['scan us']} us")
    results.finish()


if __name__ == "__main__":
    main()
