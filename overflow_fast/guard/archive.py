"""What a guard writes to disk: evidence of bad steps, and a line for each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .evidence import EvidenceFolder, JsonLog, of_rank
from .options import GuardOptions
from .report import Cost, Report, least_headroom
from .step_tensors import StepTensors
from .verdict import BadFrame, Verdict, leading_frame
from .watch import ModelWatch

_MIB = 2**20


class Archive:
    """Keeps the evidence and the log that a guard was asked for. Never raises.

    Args:
        options: The guard's.
        watches: The watched models.
        cost: Says what the guard costs.
    """

    def __init__(
        self,
        options: GuardOptions,
        watches: Sequence[ModelWatch],
        cost: Callable[[], Cost],
    ) -> None:
        self._watches = watches
        self._cost = cost
        self._evidence: EvidenceFolder | None = None
        self._json: JsonLog | None = None
        if options.evidence is not None:
            most = int(options.evidence_mib * _MIB)
            self._evidence = EvidenceFolder(
                of_rank(options.evidence), most, options.evidence_keep
            )
        if options.log is not None:
            most = int(options.log_mib * _MIB)
            self._json = JsonLog(of_rank(options.log), most, options.log_keep)

    def folder_of(self, step: int) -> str | None:
        """Where a step's evidence lies, or None if none is kept."""
        return None if self._evidence is None else str(self._evidence.folder_of(step))

    def keep(
        self, report: Report, frames: Sequence[BadFrame], tensors: StepTensors | None
    ) -> None:
        """Keeps a step's report, its offending tensors and its batch.

        Args:
            report: The report.
            frames: The step's bad frames, at least one.
            tensors: What was scanned besides the calls.
        """
        if self._evidence is not None:
            leading = leading_frame(frames)
            batch = leading.watch.batches.get(leading.frame.batch)
            self._evidence.write(report, _offending(leading, frames, tensors), batch)

    def log(
        self, step: int, verdict: Verdict, action: str | None, num_skipped: int
    ) -> None:
        """Writes the line of a step."""
        if self._json is None:
            return
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "step": step,
            "is_clean": verdict.is_clean,
            "action": action,
            "num_skipped": num_skipped,
            "guard_share": round(self._cost().share, 5),
        }
        headroom = least_headroom(self._watches)
        if headroom is not None:
            line["headroom_bits"] = round(headroom.bits, 2)
            line["headroom_at"] = headroom.where
        if verdict.first is not None:
            line["headroom_bits"], line["headroom_at"] = 0.0, verdict.first.fqn
            line["first"] = f"{verdict.first.fqn}: {verdict.first.label}"
            line["origin"] = verdict.origin
            line["maker"] = verdict.maker
        self._json.write(line)

    def close(self) -> None:
        """Closes the log."""
        if self._json is not None:
            self._json.close()


def _offending(
    leading: BadFrame, frames: Sequence[BadFrame], tensors: StepTensors | None
) -> dict[str, object]:
    """The tensors to keep: what the first bad call was given and returned, and more."""
    found: dict[str, object] = {}
    if leading.watch.held is not None:
        found["call"] = leading.watch.held
    for bad in frames:
        if bad.is_of_call or tensors is None:
            continue
        for _, entry in bad.bad_entries():
            label = str(entry[0][0][1])
            tensor = tensors.find(bad.frame.phase, label)
            if tensor is not None:
                found[f"{bad.kind} of {label}"] = tensor
    return found
