"""The result of an examination: as text, as JSON, and as an exit status."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.text import aligned, as_lines, counted
from ...guard.files.json_text import SCHEMA, to_plain
from ..page.render import GENERATOR, html_templates, page_style, save_page
from .links import Measured, passes_of
from .roll_call import RankFacts
from .stage import NOTE, STATES, UNJUDGED, Finding, Pair, StageResult


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
    facts: Mapping[int, RankFacts] = field(default_factory=dict)
    measured: Mapping[int, Measured] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status: 0 fine, 1 a warning, 2 broken."""
        return max((each.severity for each in self.findings), default=0)

    @property
    def result(self) -> str:
        """The result in words, with the stages that were not judged in full."""
        noted = {each.stage for each in self.findings if each.severity == NOTE}
        unjudged = [each.name for each in self.stages if each.name in noted]
        if not unjudged:
            return STATES[self.status]
        word = STATES[self.status] if self.status else "no fault found"
        return f"{word}; {UNJUDGED}: {', '.join(unjudged)}"

    @property
    def title(self) -> str:
        """The ranks, and the result."""
        return f"{counted(self.world, 'rank')}: {self.result}"

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
        where = f" on {counted(len(hosts), 'host')}" if hosts else ""
        by = f", {' and '.join(sorted(backends))}" if backends else ""
        lines = [f"{counted(self.world, 'rank')}{where}{by}", "", *self._table()]
        lines += self._measured()
        for each in self.findings:
            word = STATES[each.severity] if each.severity else "note"
            sentence = f"{word}: {each.stage}: {each.text}"
            lines += ["", as_lines([sentence])]
        return "\n".join([*lines, "", f"Result: {self.result}."])

    def _table(self) -> list[str]:
        rows = [["stage", "ranks", "seconds", "result"]]
        for each in self.stages:
            seconds = f"{each.seconds:.1f}" if each.ranks else ""
            rows.append([each.name, str(each.ranks or ""), seconds, each.state])
        return aligned(rows, right=(1, 2))

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
            f"{counted(len(latency), 'link')}: there and back {micros:.0f} us "
            f"(median), {max(latency.values()) * 1e6:.0f} us (slowest); "
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
                "links": links,
                "times": {
                    r: dataclasses.asdict(each) for r, each in self.measured.items()
                },
            }
        )
        return plain


# The page of an examination, with a heatmap of the links.


_MOST_RANKS = 256  # in a matrix; a browser shows no more at once
_MOST_NUMBERS = 16  # ranks; more are colours alone. Chosen
_FAST_HUE, _SLOW_HUE = 210, 0  # blue, red at four times the median


@dataclass(frozen=True)
class Cell:
    """A link in the heatmap."""

    hue: int
    text: str
    number: str


@dataclass(frozen=True)
class Matrix:
    """A heatmap of the links between ranks."""

    title: str
    note: str
    ranks: list[int]
    rows: list[tuple[int, list[Cell | None]]]

    @property
    def has_numbers(self) -> bool:
        """True if there is room for a number in each cell."""
        return len(self.ranks) <= _MOST_NUMBERS


def save_diagnosis(path: str | os.PathLike[str], diagnosis: Diagnosis) -> Path:
    """Writes the page of a diagnosis.

    Args:
        path: The file; an older page of overflow_fast is written over, nothing else.
        diagnosis: The diagnosis.

    Raises:
        OSError: If it cannot be written, or is no page of overflow_fast.
        ImportError: If jinja2 is not installed.
    """
    from markupsafe import Markup

    pages = html_templates(Path(__file__).parent)
    return save_page(
        path,
        lambda: pages.get_template("diagnosis.html").render(
            generator=Markup(GENERATOR),
            style=Markup(page_style()),
            diagnosis=diagnosis,
            words=STATES,
            matrices=matrices_of(diagnosis),
        ),
    )


def matrices_of(diagnosis: Diagnosis) -> list[Matrix]:
    """Makes the heatmaps of latency and transfers, where links were measured."""
    found = []
    for name, title in (
        ("latency", "Latency of a small message there and back"),
        ("transfer", "Time of a large message there and back"),
    ):
        links = diagnosis.links(name)
        if links:
            found.append(_matrix(title, links))
    return found


def _matrix(title: str, links: Mapping[Pair, float]) -> Matrix:
    median = statistics.median(links.values())
    ranks = sorted({rank for pair in links for rank in pair})
    shown = ranks[:_MOST_RANKS]
    rows = [
        (a, [_cell(links.get((min(a, b), max(a, b))), median, a, b) for b in shown])
        for a in shown
    ]
    note = f"In us; the median is {median * 1e6:.0f} us, and red is four times that."
    if len(shown) < len(ranks):
        note += f" The first {len(shown)} of {len(ranks)} ranks."
    return Matrix(title, note, shown, rows)


def _cell(seconds: float | None, median: float, a: int, b: int) -> Cell | None:
    if seconds is None:
        return None
    share = min(1.0, max(0.0, math.log2(seconds / median) / 2)) if seconds else 0.0
    hue = round(_FAST_HUE + share * (_SLOW_HUE - _FAST_HUE))
    times = seconds / median if median else 1.0
    number = f"{seconds * 1e6:.0f}"
    return Cell(hue, f"ranks {a} and {b}: {number} us, {times:.1f} x", number)
