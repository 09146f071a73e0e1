"""Examines the ranks stage by stage; one rank judges, and says who goes on."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .arithmetic import ARITHMETIC
from .collectives import BARRIER, COLLECTIVES
from .diagnosis import Diagnosis
from .lost_ranks import lost_ranks
from .rendezvous import Address, Rendezvous
from .roll_call import ROLL_CALL, RankFacts, missing
from .stage import (
    BROKEN,
    FINE,
    STATES,
    ExaminationSettings,
    Finding,
    Hosts,
    Stage,
    StageOutcome,
    StageResult,
)
from .stage_process import StageProcess

STAGES = (ROLL_CALL, BARRIER, COLLECTIVES, ARITHMETIC)


@dataclass(frozen=True)
class Decision:
    """The news that all ranks get after a stage; small, for it goes to each of them.

    Attributes:
        members: The ranks that go on.
        has_group: Collectives can still be tried.
        result: The stage's result, without the data of the ranks.
        findings: Its findings.
        hosts: The names of the ranks' hosts.
    """

    members: list[int]
    has_group: bool
    result: StageResult
    findings: list[Finding]
    hosts: Hosts


class Examination:
    """Runs the stages on this rank, together with the other ranks.

    Args:
        address: Where this rank and the store are.
        settings: The settings.
        stages: The stages, the roll call first.

    Attributes:
        is_leader: True if this rank tells the user; all do where the store is gone.
    """

    def __init__(
        self,
        address: Address,
        settings: ExaminationSettings,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        self._address = address
        self._settings = settings
        self._stages = stages
        self._patience = settings.limit + 2 * settings.grace
        self._findings: list[Finding] = []
        self._results: list[StageResult] = []
        self._doing = "roll call"
        self._hosts: Hosts = {}
        self._facts: dict[int, RankFacts] = {}
        self._generation = 0
        self._rendezvous: Rendezvous | None = None
        self.is_leader = True

    def run(self) -> Diagnosis:
        """Examines; never raises for what it finds. Ends nothing of the user's."""
        try:
            return self._run()
        except RuntimeError as error:
            self._rendezvous = None
            return self._diagnosis(f"Rank {self._address.rank}: {error}.")

    def _run(self) -> Diagnosis:
        self._rendezvous = rendezvous = Rendezvous(self._address)
        self._address = rendezvous.address
        members = self._arrive(rendezvous)
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
                    outcome = self._outcome(process, stage, members)
                    rendezvous.post(f"stage{number}", outcome)
                decision = rendezvous.decide(
                    f"decision{number}",
                    functools.partial(self._decide, rendezvous, number, stage, members),
                    2 * self._patience,
                )
                self._hosts = decision.hosts
                self._results.append(decision.result)
                self._findings += decision.findings
                if decision.members != members or not decision.has_group:
                    # A process of a rank hangs: all ranks go on with new ones.
                    self._generation += 1
                    if process is not None:
                        process.end()
                    process = None
                members = decision.members
                has_group = has_group and decision.has_group
        finally:
            if process is not None:
                process.end()
        self.is_leader = rendezvous.is_leader
        return self._diagnosis()

    def part(self) -> None:
        """Ends the rendezvous, once the rank that leads has told the user."""
        if self._rendezvous is not None:
            self._rendezvous.part(self._settings.grace)

    def _arrive(self, rendezvous: Rendezvous) -> list[int]:
        """Waits for all ranks; returns those that came."""
        world, limit = self._address.world, self._settings.limit
        rendezvous.post("here", None)
        members = rendezvous.decide(
            "members",
            lambda: sorted(rendezvous.gather("here", range(world), limit)),
            self._patience,
        )
        absent = [rank for rank in range(world) if rank not in set(members)]
        self._findings += missing(absent, world, limit)
        return members

    def _outcome(
        self, process: StageProcess, stage: Stage, members: Sequence[int]
    ) -> StageOutcome:
        begin = time.monotonic()
        outcome = process.run(stage, members, self._settings.limit)
        if outcome.state != "done":
            process.end()  # ranks that wait for it in a collective get an error
        return dataclasses.replace(outcome, seconds=time.monotonic() - begin)

    def _decide(
        self, rendezvous: Rendezvous, number: int, stage: Stage, members: list[int]
    ) -> Decision:
        """Judges a stage, on the rank that leads."""
        given = rendezvous.gather(f"stage{number}", members, self._patience)
        outcomes: dict[int, StageOutcome] = {
            rank: given.get(rank, StageOutcome("silent")) for rank in members
        }
        data = {r: each.data for r, each in outcomes.items() if each.state == "done"}
        hosts = self._hosts
        if stage.name == ROLL_CALL.name:
            self._facts = data
            hosts = {rank: facts.host for rank, facts in data.items()}
        findings, lost = lost_ranks(stage.name, outcomes, hosts)
        if data and (not lost or not stage.needs_group):
            findings += stage.judge(data, hosts)
        result = StageResult(
            stage.name,
            STATES[max((each.severity for each in findings), default=FINE)],
            max((each.seconds for each in outcomes.values()), default=0.0),
            len(members),
        )
        going_on = [rank for rank in members if rank not in set(lost)]
        return Decision(going_on or members, bool(going_on), result, findings, hosts)

    def _diagnosis(self, unfinished: str = "") -> Diagnosis:
        findings = list(self._findings)
        if unfinished:
            findings.append(Finding(self._doing, BROKEN, (), unfinished))
        findings.sort(key=lambda each: -each.severity)
        return Diagnosis(self._address.world, findings, self._results, self._facts)
