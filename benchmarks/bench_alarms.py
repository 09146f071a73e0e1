"""Whether a guard is quiet while nothing is wrong, and finds what is planted."""

from __future__ import annotations

from typing import Any

import torch
from common import progress, silence, write
from timing import QUICK
from workloads import WORKLOADS

from overflow_fast import NonFiniteError, OverflowGuard

STEPS = 20 if QUICK else 1000
LAYERS = 4 if QUICK else 1000
COLUMNS = [
    "training run",
    "steps",
    "false alarms",
    "skipped by the scaler",
    "rules given",
    "faults planted",
    "caught",
    "attributed",
    "layers not tried",
]
NOTES = (
    "Clean steps under a guard that raises, with everything watched, and "
    "`guard.self_test()` of every layer (a nan and an inf, in its output and in the "
    "gradient of that) before and after them. No time is measured here."
)


def self_test(guard: OverflowGuard, workload: Any) -> Any:
    with silence():
        return guard.self_test(
            workload.make_batch(), loss=workload.loss, max_layers=LAYERS
        )


def row(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    alarms = skipped = 0
    with OverflowGuard(
        workload.model, workload.optimizer, allow=workload.allow
    ) as guard:
        tests = [self_test(guard, workload)]
        for _ in range(STEPS):
            try:
                workload.step()
            except NonFiniteError:
                alarms += 1
            skipped += guard.last_step_skipped
        tests.append(self_test(guard, workload))
    faults = [fault for test in tests for fault in test.faults if fault.is_planted]
    return {
        "training run": name,
        "steps": STEPS,
        "false alarms": alarms + sum(bool(test.clean) for test in tests),
        "skipped by the scaler": skipped,
        "rules given": len(workload.allow),
        "faults planted": len(faults),
        "caught": sum(fault.is_caught for fault in faults),
        "attributed": sum(fault.is_attributed for fault in faults),
        "layers not tried": sum(test.not_chosen for test in tests),
    }


def main() -> None:
    rows = []
    for name in WORKLOADS:
        progress(name)
        rows.append(row(name))
    write("alarms", "Quiet runs, planted faults", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
