"""Examines the ranks stage by stage; each stage ends, whatever hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .arithmetic import ARITHMETIC
from .collectives import COLLECTIVES
from .diagnosis import Diagnosis
from .first_barrier import BARRIER
from .hanging import lost_ranks
from .links import LINKS
from .meeting import Address, Meeting
from .planted_nan import AGREEMENT
from .roll_call import ROLL_CALL, missing
from .stage import BROKEN, STATES, Finding, Outcome, Settings, Stage, StageResult
from .stage_process import StageProcess
from .storage import STORAGE

STAGES = (ROLL_CALL, BARRIER, COLLECTIVES, LINKS, ARITHMETIC, STORAGE, AGREEMENT)


class Ended(BaseException):
    """The launcher ends this process."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The news that all ranks get after a stage; small, for it goes to each of them.

    Attributes:
        lost: The ranks that do not go on.
        has_group: Collectives can still be tried.
        must_restart: A process of a rank hangs: all ranks begin with new ones.
        result: The stage's result, without the data of the ranks.
        findings: Its findings.
        hosts: The names of the ranks' hosts, after the roll call.
    """

    lost: list[int]
    has_group: bool
    must_restart: bool
    result: StageResult
    findings: list[Finding]
    hosts: dict[int, str]


class Examination:
    """Runs the stages on this rank, together with the other ranks.

    Args:
        address: Where this rank and the store are.
        settings: The settings.
        stages: The stages, the roll call first.

    Attributes:
        leads: True if this rank tells the user; all do where the store is gone.
    """

    def __init__(
        self, address: Address, settings: Settings, stages: Sequence[Stage] = STAGES
    ) -> None:
        self._address = address
        self._settings = settings
        self._stages = stages
        self._patience = settings.limit + 2 * settings.grace
        self._findings: list[Finding] = []
        self._results: list[StageResult] = []
        self._doing = "roll call"
        self._hosts: dict[int, str] = {}
        self._data: dict[str, dict[int, Any]] = {}
        self._generation = 0
        self._meeting: Meeting | None = None
        self.leads = True

    def run(self) -> Diagnosis:
        """Examines; never raises for what it finds. Ends nothing of the user's."""
        try:
            with _ended_by_launcher():
                return self._run()
        except Ended:
            self.leads = self._meeting is None or self._meeting.leads
            self._meeting = None  # a wait at the store goes on
            where = f"The launcher ended rank {self._address.rank} in this stage."
            return self._diagnosis(where)
        except RuntimeError as error:
            self._meeting = None
            return self._diagnosis(f"Rank {self._address.rank}: {error}.")

    def _run(self) -> Diagnosis:
        self._meeting = meeting = Meeting(self._address)
        self._address = meeting.address
        members, waited = self._arrive(meeting)
        has_group, process = True, None
        try:
            for number, stage in enumerate(self._stages):
                self._doing = stage.name
                if stage.needs_group and not has_group:
                    self._results.append(StageResult(stage.name, "left out"))
                    continue
                if self._address.rank in members:
                    process = process or StageProcess(
                        self._address, self._settings, self._generation
                    )
                    self._run_stage(meeting, process, number, stage, members, waited)
                decision = meeting.decide(
                    f"decision{number}",
                    functools.partial(self._decide, meeting, number, stage, members),
                    2 * self._patience,
                )
                members = [rank for rank in members if rank not in set(decision.lost)]
                has_group = has_group and decision.has_group
                self._hosts = self._hosts or decision.hosts
                self._results.append(decision.result)
                self._findings += decision.findings
                if decision.must_restart:
                    self._generation += 1
                    if process is not None:
                        process.end()
                    process = None
        finally:
            if process is not None:
                process.end()
        self.leads = meeting.leads
        return self._diagnosis()

    def part(self) -> None:
        """Ends the meeting, once the rank that leads has told the user."""
        if self._meeting is not None:
            self._meeting.part(self._settings.grace)

    def _arrive(self, meeting: Meeting) -> tuple[list[int], float]:
        """Waits for all ranks; returns those that came, and the seconds."""
        begin, world, limit = (
            time.monotonic(),
            self._address.world,
            self._settings.limit,
        )
        meeting.post("here", None)
        members = meeting.decide(
            "members",
            lambda: sorted(meeting.gather("here", range(world), limit)),
            self._patience,
        )
        absent = [rank for rank in range(world) if rank not in set(members)]
        self._findings += missing(absent, world, limit)
        return members, time.monotonic() - begin

    def _run_stage(
        self,
        meeting: Meeting,
        process: StageProcess,
        number: int,
        stage: Stage,
        members: Sequence[int],
        waited: float,
    ) -> None:
        hosts = self._hosts or dict.fromkeys(members, "")
        begin = time.monotonic()
        outcome = process.run(stage, members, hosts, self._settings.limit)
        if outcome.state != "done":
            process.end()  # ranks that wait for it in a collective get an error
        outcome = dataclasses.replace(outcome, seconds=time.monotonic() - begin)
        if stage is self._stages[0] and outcome.state == "done":
            facts = dataclasses.replace(outcome.data, waited=waited)
            outcome = dataclasses.replace(outcome, data=facts)
        meeting.post(f"stage{number}", outcome)

    def _decide(
        self, meeting: Meeting, number: int, stage: Stage, members: list[int]
    ) -> Decision:
        """Judges a stage, on the rank that leads."""
        given = meeting.gather(f"stage{number}", members, self._patience)
        outcomes: dict[int, Outcome] = {
            rank: given.get(rank, Outcome("silent")) for rank in members
        }
        findings, lost = lost_ranks(stage.name, outcomes, self._hosts)
        data = {r: each.data for r, each in outcomes.items() if each.state == "done"}
        if data and (not lost or not stage.needs_group):
            findings += stage.judge(data, self._settings)
        self._data[stage.name] = data
        state = STATES[max((each.severity for each in findings), default=0)]
        seconds = max((each.seconds for each in outcomes.values()), default=0.0)
        result = StageResult(stage.name, state, seconds, len(members))
        must_restart, has_group = bool(lost), len(lost) < len(members)
        hosts = {}
        if stage is self._stages[0]:
            hosts = {rank: each.host for rank, each in data.items()}
        lost = lost if has_group else []
        return Decision(lost, has_group, must_restart, result, findings, hosts)

    def _diagnosis(self, unfinished: str = "") -> Diagnosis:
        findings = list(self._findings)
        if unfinished:
            findings.append(Finding(self._doing, BROKEN, (), unfinished))
        findings.sort(key=lambda each: -each.severity)
        facts = self._data.get(self._stages[0].name, {})
        links = self._data.get(LINKS.name, {})
        return Diagnosis(self._address.world, findings, self._results, facts, links)


@contextlib.contextmanager
def _ended_by_launcher() -> Iterator[None]:
    """Turns SIGTERM into `Ended`, so that what was found until then is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
