"""Incidents: what the evidence of a bad step says, for the page's cards."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.source_files import is_cell, short_name
from ...guard.files.json_text import SCHEMA, to_plain
from ...guard.files.reading import FileError, read_bytes, why_unreadable
from ...guard.files.schema import decode_document, plain
from ...guard.report.causes import UNKNOWN, Cause
from ...guard.report.report import Report
from .evidence_schema import Marker, SavedExplanation, SavedReport

_MARKER = "overflow_fast.json"
_CONTEXT = 3  # lines around one, as of `diff -u`
_GUIDE = 'The guide "My run is nan" (docs/my-run-is-nan.md) has a section on it: {}.'
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_MAX_SOURCE = 2**24  # bytes of a file that may have the line; chosen


class EvidenceError(FileError):
    """A path without evidence that can be read; says why."""


@dataclass(frozen=True)
class Incident:
    """A bad step, as its report and its explanation tell of it.

    Attributes:
        step: The step's number.
        report: `Report.to_dict()`.
        explanation: `Explanation.to_dict()`; empty where the step was not explained.
        folder: The folder of its evidence, or None.
    """

    step: int
    report: Mapping[str, Any] = field(default_factory=dict)
    explanation: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, report: Report) -> Incident:
        """Makes one of a report in memory."""
        folder = None if report.evidence is None else Path(report.evidence)
        explanation = report.explanation
        found = {} if explanation is None else to_plain(explanation.to_dict())
        return cls(report.step, report.to_dict(), found, folder)

    @property
    def sentences(self) -> list[str]:
        """The report's sentences, the headline first, without the explanation.

        A page names the folder of the evidence itself, and not where it is itself.
        """
        paths = [f"`{self.report.get(name)}`" for name in ("evidence", "page")]
        return [
            str(each)
            for each in self.report.get("sentences", ())
            if not any(path in each for path in paths)
        ]

    @property
    def op(self) -> Mapping[str, Any]:
        """The operation that failed; empty if it is not known."""
        return self.explanation.get("op") or {}

    @property
    def cure(self) -> Mapping[str, Any]:
        """The first remedy that made the step finite; empty if there is none.

        In files that say so, one that breaks nothing.
        """
        found = self.explanation.get("remedies") or []
        helped = (e for e in found if e.get("tried") and e.get("is_finite"))
        return next((e for e in helped if e.get("is_recommended", True)), {})

    @property
    def first(self) -> Mapping[str, Any]:
        """The first bad entry of the report's verdict; empty if it is not known."""
        return (self.report.get("verdict") or {}).get("first") or {}

    @property
    def kind(self) -> str:
        """The kind of the first bad entry; see `BadEntry.kind`."""
        return str(self.first.get("kind") or "unknown")

    @property
    def next_steps(self) -> list[str]:
        """The things to do where no remedy was tried that helps."""
        if self.cure:
            return []
        found = self.explanation.get("remedies") or []
        waiting = [each for each in found if not each.get("tried")]
        steps = [
            f"{each['text']} (not tried: {each['why']})"
            if each.get("why")
            # A report of an older version may not have the reason.
            else str(each["text"])
            for each in waiting
        ]
        cause = Cause.of(self.explanation.get("cause", UNKNOWN.name))
        steps += [" ".join(_LINK.sub(r"\1", cause.help).split())] * bool(cause.help)
        sections = ", ".join(f'"{each}"' for each in cause.sections)
        return [*steps, *([_GUIDE.format(sections)] if sections else [])]

    @property
    def headline(self) -> str:
        """Cause and cure in one sentence; the event where the cause is not known."""
        cause, op = Cause.of(self.explanation.get("cause", UNKNOWN.name)), self.op
        if not cause.names_maker:
            event = f"Step {self.step} was not finite."
            return self.sentences[0] if self.sentences else event
        place = f"{short_name(op['file'])}:{op['line']}" if op.get("file") else ""
        name = self.explanation.get("tensor") or self.explanation.get("module")
        where = f" at {place}" if place else f" of {name}" if name else ""
        text = f"Cause: {cause.name}{where}"
        cure = self.cure.get("text")
        return f"{text}. The step is finite with this change: {cure}." if cure else text

    def code(self) -> Code | None:
        """The line that failed; None if it is not known."""
        return Code.of(self.op) if self.op.get("code") else None


@dataclass(frozen=True)
class Code:
    """The line of code that failed, and its neighbours.

    Attributes:
        place: The file and the number of the line; "" if that is not known.
        lines: The numbers and texts of the lines.
        number: The number of the line that failed.
        remark: Why there are no neighbours, or "".
        expression: The part of the line that failed, or "".
    """

    place: str
    lines: list[tuple[int, str]]
    number: int
    remark: str = ""
    expression: str = ""

    @property
    def failed(self) -> tuple[str, str, str]:
        """The line that failed: what is before the expression, it, and behind it."""
        text = dict(self.lines)[self.number]
        if not self.expression or text.count(self.expression) != 1:
            return text, "", ""
        return text.partition(self.expression)

    @classmethod
    def of(cls, op: Mapping[str, Any]) -> Code:
        """Reads the lines around an operation, if its file is as it was."""
        file, number, code = (
            str(op.get("file") or ""),
            int(op.get("line") or 0),
            op["code"],
        )
        alone = [(number, str(code))]
        begin, end = op.get("columns") or (0, 0)
        expression = str(code)[begin:end]
        if not file or number < 1:
            return cls("", alone, number, "", expression)
        place = f"{file}:{number}"
        if is_cell(file):
            why = "A line of a notebook's cell."
            return cls(place, alone, number, why, expression)
        try:
            text = read_bytes(file, _MAX_SOURCE).decode("utf-8", "replace")
        except OSError:
            why = "The file is not on this machine."
            return cls(place, alone, number, why, expression)
        lines = text.splitlines()
        # Nothing is shown of a file that does not have the very line.
        line = lines[number - 1].strip() if number <= len(lines) else ""
        if not line or line not in str(code):
            return cls(place, alone, number, "The file has changed since.", expression)
        first = max(0, number - 1 - _CONTEXT)
        around = list(enumerate(lines[first : number + _CONTEXT], first + 1))
        return cls(place, _dedented(around), number, "", expression)


def _dedented(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Lines without the indentation that all have, and without blank ones around."""
    full = [i for i, (_, text) in enumerate(lines) if text.strip()]
    lines = lines[full[0] : full[-1] + 1]
    texts = textwrap.dedent("\n".join(text for _, text in lines)).split("\n")
    return [(number, text) for (number, _), text in zip(lines, texts, strict=True)]


def read_incidents(path: str | os.PathLike[str]) -> tuple[list[Incident], list[str]]:
    """Reads the evidence of a step, or of all steps of a folder, the oldest first.

    Args:
        path: A folder such as `evidence/overflow_fast/RUN/step-00000012`, or one
            above it, such as the one that `OverflowGuard(evidence=...)` was given.

    Returns:
        The incidents, and sentences on what of the evidence cannot be read.

    Raises:
        EvidenceError: If there is no evidence that can be read.
    """
    where = Path(path)
    own = where / _MARKER
    markers = [own] if own.is_file() else sorted(_markers_below(where))
    if not markers:
        raise EvidenceError(f"{path} is no folder of evidence: no {_MARKER} in it.")
    found, damaged = list[Incident](), list[str]()
    for marker in markers:
        try:
            found.append(_read(marker, damaged))
        except EvidenceError as error:
            damaged.append(str(error))
    if not found:
        raise EvidenceError(damaged[0])
    return sorted(found, key=lambda incident: incident.step), damaged


def _markers_below(where: Path) -> Iterator[Path]:
    for depth in ("*", "*/*", "overflow_fast/*/*"):
        yield from where.glob(f"{depth}/{_MARKER}")


def _read(marker: Path, damaged: list[str]) -> Incident:
    folder = marker.parent
    step = (_decoded(marker, Marker) or {})["step"]
    report = _decoded(folder / "report.json", SavedReport) or {}
    explanation = report.get("explanation")
    try:
        explanation = (
            _decoded(folder / "explanation.json", SavedExplanation) or explanation
        )
    except EvidenceError as error:
        damaged.append(str(error))
    return Incident(step, report, explanation or {}, folder)


def _decoded(path: Path, kind: type[Any]) -> dict[str, Any] | None:
    """Decodes a file of JSON; None where there is no file."""
    try:
        return plain(decode_document(read_bytes(path), kind, SCHEMA))
    except FileNotFoundError:
        return None
    except (OSError, FileError) as error:
        why = why_unreadable(error)
        raise EvidenceError(f"{path} cannot be read: {why}.") from error
