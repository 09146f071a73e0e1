"""The result of an examination: as text, as JSON, and as an exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.text import aligned, as_lines, counted
from ...guard.files.json_text import SCHEMA, to_plain
from .roll_call import RankFacts
from .stage import FINE, STATES, Finding, StageResult


@dataclass(frozen=True)
class Diagnosis:
    """The findings of the doctor; `str()` of it is a table.

    Attributes:
        world: The number of ranks that there should be.
        findings: The findings, the worst first.
        stages: The stages.
        facts: What each rank has said of itself.
    """

    world: int
    findings: Sequence[Finding] = ()
    stages: Sequence[StageResult] = ()
    facts: Mapping[int, RankFacts] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status: 0 fine, 1 a warning, 2 broken."""
        return max((each.severity for each in self.findings), default=FINE)

    @property
    def result(self) -> str:
        """The result in words."""
        return STATES[self.status]

    def __str__(self) -> str:
        """Writes the table."""
        hosts = {each.host for each in self.facts.values()}
        backends = {each.backend for each in self.facts.values()}
        where = f" on {counted(len(hosts), 'host')}" if hosts else ""
        by = f", {' and '.join(sorted(backends))}" if backends else ""
        lines = [f"{counted(self.world, 'rank')}{where}{by}", "", *self._table()]
        for each in self.findings:
            sentence = f"{STATES[each.severity]}: {each.stage}: {each.text}"
            lines += ["", as_lines([sentence])]
        return "\n".join([*lines, "", f"Result: {self.result}."])

    def _table(self) -> list[str]:
        rows = [["stage", "ranks", "seconds", "result"]]
        for each in self.stages:
            seconds = f"{each.seconds:.1f}" if each.ranks else ""
            rows.append([each.name, str(each.ranks or ""), seconds, each.state])
        return aligned(rows, right=(1, 2))

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as a dict of strings, finite numbers, lists, dicts."""
        plain: dict[str, Any] = to_plain(
            {
                "schema": SCHEMA,
                "kind": "diagnosis",
                "status": self.status,
                "world_size": self.world,
                "findings": [dataclasses.asdict(each) for each in self.findings],
                "stages": [dataclasses.asdict(each) for each in self.stages],
                "ranks": {
                    r: dataclasses.asdict(each) for r, each in self.facts.items()
                },
            }
        )
        return plain
