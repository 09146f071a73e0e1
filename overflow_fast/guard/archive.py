"""The files of a guard: evidence of bad steps, and a log line for each step."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from .core import GuardCore
from .monitors.monitor import Notice
from .outer import outer
from .ranks.rank_info import RankInfo
from .report.evidence import EvidenceFolder
from .report.json_log import JsonLog
from .report.report import Report
from .report.run_identity import RunIdentity
from .verdict.bad_frames import BadFrame, leading_frame
from .verdict.entry_headroom import least_headroom
from .verdict.roles import kind_of
from .verdict.verdict import Verdict
from .watching.judged_tensors import JudgedTensors

_MIB = 2**20  # bytes
_now = time.perf_counter  # a test that patches time has its patch to itself
# Of the run's time: beyond it a bad step gets no page until the run ends, or pages have
# taken less again. With more of it a run with many bad steps is slower.
_PAGE_SHARE = 0.01
_PAGE_LINES = 500  # of the flight record, a quarter of a second


class Archive:
    """Keeps the evidence and the log that the configuration asks for. Never raises.

    Args:
        guard: The guard's core.
    """

    def __init__(self, guard: GuardCore) -> None:
        self._config, self._watches = guard.config, guard.watches
        self._measurements = guard.measurements
        self._begun = _now()
        self._page_seconds = 0.0

    # Made when first needed: the rank is known by then.

    @property
    def _run(self) -> RunIdentity:
        return self._measurements.run

    @functools.cached_property
    def _evidence(self) -> EvidenceFolder | None:
        evidence = self._config.evidence
        if evidence is None:
            return None
        most = int(evidence.mib * _MIB)
        return EvidenceFolder(evidence.path, self._run, most, evidence.keep)

    @functools.cached_property
    def _log(self) -> JsonLog | None:
        config, log = self._config, self._config.log
        if log is None or not self._run.collects(log.ranks):
            return None
        return JsonLog(
            self._run.path_of_rank(log.path),
            self._run.id,
            lambda: self._run.header(self._watches, config.on_overflow),
            int(log.mib * _MIB),
            log.keep,
        )

    def begin_report(
        self, report: Report, frames: Sequence[BadFrame], tensors: JudgedTensors | None
    ) -> None:
        """Keeps a step's offending tensors and its batch.

        Args:
            report: The step's, which names the folder then.
            frames: The step's bad frames; none where a replay alone has found it.
            tensors: Has the scanned tensors that stand in no module's call.
        """
        if self._evidence is None:
            return
        offending, batch = {}, None
        if frames:
            leading = leading_frame(frames)
            batch = leading.watch.inputs.batches.get(leading.frame.batch)
            offending = _offending(leading, frames, tensors)
        report.evidence = self._evidence.keep(report.step, offending, batch)

    def end_report(
        self, report: Report, step: int, num_left_out: int, is_own: bool
    ) -> None:
        """Adds the report to the evidence, where it is this rank's, and to the log."""
        if is_own:
            self.add_report(report)
        self.log(
            *(step, report.verdict, report.action, report.num_skipped, num_left_out),
            report,
        )

    def add_report(self, report: Report) -> None:
        """Adds the report to the evidence, and a page where that has not cost much.

        The page has the flight record's last lines. That of a run that ends is made
        always, others while pages have taken less than a hundredth of the time.
        """
        if self._evidence is None:
            return
        begin = _now()
        is_cheap = self._page_seconds <= _PAGE_SHARE * (begin - self._begun)
        if is_cheap or report.action == "raise":
            self._evidence.add_page(report, lambda: self._page_of(report))
            seconds = _now() - begin
            self._page_seconds += seconds
            self._measurements.timer.leave_out(seconds)
        self._evidence.add_report(report)

    def _page_of(self, report: Report) -> str:
        page: str = outer("evidence_page")(
            report, self._measurements.record, _PAGE_LINES
        )
        return page

    def log(
        self,
        step: int,
        verdict: Verdict,
        action: str | None,
        num_skipped: int,
        num_left_out: int,
        report: Report | None,
    ) -> None:
        """Writes the line of a judgement, with its report if it is bad."""
        if self._log is None:
            return
        line: dict[str, Any] = {
            **self._line("step", step),
            "is_clean": verdict.is_clean,
            "action": action,
            "num_skipped": num_skipped,
            "num_left_out": num_left_out,
            "guard_share": round(self._measurements.timer.cost.share, 5),
        }
        headroom = least_headroom(self._watches)
        if headroom is not None:
            line["headroom_bits"] = round(headroom.bits, 2)
            line["headroom_at"] = headroom.where
        first = verdict.first
        if first is not None:
            where = first.place
            line["headroom_bits"], line["headroom_at"] = 0.0, where
            line["first"] = f"{where}: {first.label}"
            line["origin"] = verdict.origin.how
            line["source"] = verdict.origin.source
            line["maker"] = verdict.origin.maker
        if report is not None:
            line.update(self._blame(report))
        self._log.write(line)

    def _line(self, kind: str, step: int) -> dict[str, Any]:
        """Begins a line; what it may hold is declared in `report/log_lines.py`."""
        now = round(time.time(), 3)
        return {"kind": kind, "run": self._run.id, "time": now, "step": step}

    def log_notices(
        self, step: int, notices: Sequence[Notice], is_skipped: bool
    ) -> None:
        """Writes a line for each notice of a step."""
        if self._log is None:
            return
        action = "skip" if is_skipped else None
        for each in notices:
            said = each.fields or {"monitor": each.monitor, "text": each.text}
            line = self._line(each.kind, step)
            self._log.write({**line, "action": action, **said})

    def _blame(self, report: Report) -> dict[str, Any]:
        """Where it was found, and what its replay says."""
        place = RankInfo.of(report.where)
        if place is None:
            device = self._watches[0].device or torch.device("cpu")
            run = self._run
            place = RankInfo(run.rank, run.world_size, run.host, str(device))
        explanation = report.explanation
        cause = {} if explanation is None else {"cause": explanation.cause}
        return {"rank": place.rank, "host": place.host, "device": place.device, **cause}

    def close(self) -> None:
        """Closes the log."""
        if "_log" in vars(self) and self._log is not None:
            self._log.close()


def _offending(
    leading: BadFrame, frames: Sequence[BadFrame], tensors: JudgedTensors | None
) -> dict[str, object]:
    """The tensors to keep: those of the first bad call, and others that are bad."""
    found: dict[str, object] = {}
    if leading.watch.frames.captured_tensors is not None:
        found["call"] = leading.watch.frames.captured_tensors
    for bad in frames:
        if bad.is_of_call or tensors is None:
            continue
        for entry in bad.bad_entries:
            name = entry.label.name
            tensor = tensors.find(bad.frame.kind, name)
            if tensor is not None:
                found[f"{kind_of(entry.role)} of {name}"] = tensor
    return found
