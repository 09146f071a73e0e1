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
    "weights as without",
    "skipped by the scaler",
    "rules given",
    "faults planted",
    "caught",
    "attributed",
    "layers not tried",
]
NOTES = (
    "Clean steps under a guard that raises, with everything watched and explained, "
    "the bits of the weights compared with those of a run without a guard; and "
    "`guard.self_test()` of every layer (a nan and an inf, in its output and in the "
    "gradient of that) before and after them. No time is measured here."
)


def self_test(guard: OverflowGuard, workload: Any) -> Any:
    with silence():
        return guard.self_test(
            workload.make_batch(), loss=workload.loss, max_layers=LAYERS
        )


def trained_without(name: str) -> Any:
    """The same run without a guard."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    torch.manual_seed(1)
    for _ in range(STEPS):
        workload.step()
    return workload


def weights(workload: Any) -> list[bytes]:
    state = workload.model.state_dict().values()
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in state]


def row(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    alarms = skipped = 0
    with OverflowGuard(
        workload.model, workload.optimizer, allow=workload.allow
    ) as guard:
        tests = [self_test(guard, workload)]
        torch.manual_seed(1)
        for _ in range(STEPS):
            try:
                workload.step()
            except NonFiniteError:
                alarms += 1
            skipped += guard.last_step_skipped
        tests.append(self_test(guard, workload))
    is_same = weights(workload) == weights(trained_without(name))
    faults = [fault for test in tests for fault in test.faults if fault.is_planted]
    return {
        "training run": name,
        "steps": STEPS,
        "false alarms": alarms + sum(bool(test.clean) for test in tests),
        "weights as without": "bit for bit" if is_same else "DIFFERENT",
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
