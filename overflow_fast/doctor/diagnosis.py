"""The result of an examination: as text, as JSON, and as an exit status."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..files.json_text import SCHEMA, to_plain
from ..text import as_lines
from .facts import Facts
from .links import Measured, passes_of
from .stage import STATES, Finding, Pair, StageResult


@dataclass(frozen=True)
class Diagnosis:
    """The findings of the doctor, and its measurements; `str()` of it is a table.

    Attributes:
        world: The number of ranks that there should be.
        findings: The findings, the worst first.
        stages: The stages.
        facts: What each rank has said of itself.
        measured: What each rank has measured of its links.
    """

    world: int
    findings: Sequence[Finding] = ()
    stages: Sequence[StageResult] = ()
    facts: Mapping[int, Facts] = field(default_factory=dict)
    measured: Mapping[int, Measured] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status: 0 fine, 1 a warning, 2 broken."""
        return max((each.severity for each in self.findings), default=0)

    def links(self, name: str) -> dict[Pair, float]:
        """Returns the seconds of the links: the shorter ones of both passes.

        Args:
            name: "latency" or "transfer", of a message there and back.
        """
        passes = passes_of(self.measured, name)
        return {pair: min(each[pair] for each in passes) for pair in passes[0]}

    def __str__(self) -> str:
        """Writes the table."""
        hosts = {each.host for each in self.facts.values()}
        backends = {each.backend for each in self.facts.values()}
        where = f" on {_count(len(hosts), 'host')}" if hosts else ""
        by = f", {' and '.join(sorted(backends))}" if backends else ""
        lines = [f"{_count(self.world, 'rank')}{where}{by}", "", *self._table()]
        lines += self._measured()
        for each in self.findings:
            word = STATES[each.severity] if each.severity else "note"
            sentence = f"{word}: {each.stage}: {each.text}"
            lines += ["", as_lines([sentence])]
        return "\n".join([*lines, "", f"Result: {STATES[self.status]}."])

    def _table(self) -> list[str]:
        rows = [["stage", "ranks", "seconds", "result"]]
        for each in self.stages:
            seconds = f"{each.seconds:.1f}" if each.ranks else ""
            rows.append([each.name, str(each.ranks or ""), seconds, each.state])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return [
            "  ".join(
                [
                    row[0].ljust(first),
                    *(c.rjust(w) for c, w in zip(row[1:3], others[:2], strict=True)),
                    row[3],
                ]
            )
            for row in rows
        ]

    def _measured(self) -> list[str]:
        latency, transfer = self.links("latency"), self.links("transfer")
        if not latency:
            return []
        num_bytes = 2 * next(iter(self.measured.values())).num_bytes
        rate = num_bytes / statistics.median(transfer.values()) / 1e9
        slowest = num_bytes / max(transfer.values()) / 1e9
        micros = statistics.median(latency.values()) * 1e6
        return [
            "",
            f"{_count(len(latency), 'link')}: there and back {micros:.0f} us (median), "
            f"{max(latency.values()) * 1e6:.0f} us (slowest); "
            f"{rate:.2f} GB/s (median), {slowest:.2f} GB/s (slowest).",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as a dict of strings, finite numbers, lists, dicts."""
        links = [
            {"ranks": list(pair), "latency": seconds, "transfer": transfer}
            for (pair, seconds), transfer in zip(
                self.links("latency").items(),
                self.links("transfer").values(),
                strict=True,
            )
        ]
        stages = [
            {"name": s.name, "state": s.state, "seconds": s.seconds, "ranks": s.ranks}
            for s in self.stages
        ]
        plain: dict[str, Any] = to_plain(
            {
                "schema": SCHEMA,
                "kind": "diagnosis",
                "status": self.status,
                "world_size": self.world,
                "findings": [dataclasses.asdict(each) for each in self.findings],
                "stages": stages,
                "ranks": {
                    r: dataclasses.asdict(each) for r, each in self.facts.items()
                },
                "links": links,
            }
        )
        return plain


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
