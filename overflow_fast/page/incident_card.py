"""Incidents: what the evidence of a bad step says, for the page's cards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files.json_text import SCHEMA, to_plain
from ..files.reading import FileError, read_bytes
from ..report.report import Report

_MARKER = "overflow_fast.json"
_CONTEXT = 3
_MAX_SOURCE = 2**24
_CAUSE = f"{'cause':<9} "  # how the text of an explanation begins
_TENSORS = "tensors.safetensors"


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
        """The report's sentences, the headline first, without the explanation."""
        if "sentences" in self.report:
            return [str(each) for each in self.report["sentences"]]
        lines = str(self.report.get("summary", "")).splitlines()
        if self.explanation:  # it was last before there were sentences
            lines = list(itertools.takewhile(lambda x: not x.startswith(_CAUSE), lines))
        return lines

    @property
    def op(self) -> Mapping[str, Any]:
        """The operation that failed; empty if it is not known."""
        return self.explanation.get("op") or {}

    @property
    def tensors(self) -> Path | None:
        """The file of its tensors, or None."""
        path = None if self.folder is None else self.folder / _TENSORS
        return path if path is not None and path.is_file() else None

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
    """

    place: str
    lines: list[tuple[int, str]]
    number: int
    remark: str = ""

    @classmethod
    def of(cls, op: Mapping[str, Any]) -> Code:
        """Reads the lines around an operation, if its file is as it was."""
        file, number, code = (
            str(op.get("file") or ""),
            int(op.get("line") or 0),
            op["code"],
        )
        alone = [(number, str(code))]
        if not file or number < 1:
            return cls("", alone, number)
        place = f"{file}:{number}"
        try:
            text = read_bytes(file, _MAX_SOURCE).decode("utf-8", "replace")
        except OSError:
            return cls(place, alone, number, "The file is not on this machine.")
        lines = text.splitlines()
        # Nothing is shown of a file that does not have the very line.
        line = lines[number - 1].strip() if number <= len(lines) else ""
        if not line or line not in str(code):
            return cls(place, alone, number, "The file has changed since.")
        begin = max(0, number - 1 - _CONTEXT)
        around = list(enumerate(lines[begin : number + _CONTEXT], begin + 1))
        return cls(place, around, number)


def read_incidents(path: str | os.PathLike[str]) -> tuple[list[Incident], list[str]]:
    """Reads the evidence of a step, or of all steps of a folder, the oldest first.

    Args:
        path: A folder such as `evidence/overflow_fast/RUN/step-00000012`, or one
            above it, such as the one that `OverflowGuard(evidence=...)` was given.

    Returns:
        The incidents, and sentences on what of the evidence cannot be read.

    Raises:
        EvidenceError: If there is no evidence that can be read.
        ImportError: If msgspec is not installed.
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
    from .evidence_schema import Marker, SavedExplanation, SavedReport

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
    from ..files.schema import Head, decode, plain

    try:
        data = read_bytes(path)
        schema = decode(data, Head).schema or 0
        if isinstance(schema, int) and schema > SCHEMA:
            raise EvidenceError(f"{path} was written by a newer overflow_fast.")
        return plain(decode(data, kind))
    except FileNotFoundError:
        return None
    except EvidenceError:
        raise
    except (OSError, FileError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise EvidenceError(f"{path} cannot be read: {why}.") from error
