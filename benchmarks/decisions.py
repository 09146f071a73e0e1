"""What only a GPU can decide, with the rule that decides it.

Each value is measured in a process of its own that sets the variable. Another value
than the default wins if its metric is smaller by more than the margin; else the default
stays. What lost is removed.
"""

from __future__ import annotations

from typing import NamedTuple


class Decision(NamedTuple):
    """One choice: see csrc/scan/variants.h for what the values mean.

    Attributes:
        name: The choice in words.
        variable: The environment variable that makes it.
        values: Its values, the default first.
        metric: What `bench_variants.py` measures to decide it; smaller is better.
        margin: The share by which another value must beat the default.
        reason: The advantage expected of another value, and what it costs.
    """

    name: str
    variable: str
    values: tuple[str, ...]
    metric: str
    margin: float
    reason: str


DECISIONS = (
    Decision(
        "blocks on each multiprocessor",
        "OVERFLOW_FAST_CUDA_BLOCKS",
        ("0", "2", "3", "8"),
        "scan_us_large",
        0.03,
        "Fewer blocks leave room for other streams; more hide the end of the slowest.",
    ),
    Decision(
        "chunks that a block reads in a row",
        "OVERFLOW_FAST_CUDA_TURN",
        ("0", "4", "16", "64"),
        "scan_us_large",
        0.03,
        "Blocks that take turns end together; a block that reads its share at once "
        "folds into each slot once.",
    ),
    Decision(
        "two launches for a list of runs and rows",
        "OVERFLOW_FAST_CUDA_SPLIT",
        ("1", "0"),
        "scan_us_mixed",
        0.02,
        "One launch saves some microseconds; its kernel has fewer blocks in flight.",
    ),
    Decision(
        "a list of its own for up to 4 tensors",
        "OVERFLOW_FAST_CUDA_SMALL_LISTS",
        ("1", "0"),
        "frame_host_us",
        0.02,
        "Without it one kernel fewer is loaded, and each launch hands over 4 KiB.",
    ),
    Decision(
        "a list of its own for more than 88 tensors",
        "OVERFLOW_FAST_CUDA_LARGE_LISTS",
        ("1", "0"),
        "scan_us_small",
        0.02,
        "Without it no launch hands over 32 KiB; 1,000 tensors take 12 launches.",
    ),
    Decision(
        "how slots leave the device at the end of a step",
        "OVERFLOW_FAST_STEP_END",
        ("torch", "kernel", "mapped"),
        "step_end_us",
        0.1,
        "One launch in place of up to 14 operations; mapped memory also saves the copy "
        "and the question to the driver whether it is over.",
    ),
)
