"""A pytest plugin that writes how each test ended, at once: `-p check.pytest_record`.

Of a run that is killed the file then tells which tests had ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    is_end = report.when == "call" or (report.when == "setup" and not report.passed)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # its parent writes
    if "CHECK_OUT" not in os.environ or is_worker or not (is_end or report.failed):
        return
    row = {"test": report.nodeid, "outcome": report.outcome}
    row["commit"] = os.environ.get("COMMIT", "unknown")
    row["seconds"] = round(report.duration, 3)
    if report.failed:
        row["error"] = str(report.longrepr)[-1500:]
    with (Path(os.environ["CHECK_OUT"]) / "tests.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
