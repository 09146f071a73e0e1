"""Incidents: what the evidence of a bad step says, for the page's cards."""

from __future__ import annotations

import itertools
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...guard.files.json_text import SCHEMA, to_plain
from ...guard.files.reading import FileError, read_bytes, why_unreadable
from ...guard.files.schema import decode_document, plain
from ...guard.files.tensor_files import open_tensors
from ...guard.report.causes import UNKNOWN, Cause
from ...guard.report.report import Report
from ...scanner.text import dtype_name, is_cell, short_name
from .grid import NONFINITE, NOT_SEEN, Grid, Sheet, name_of

_MARKER = "overflow_fast.json"
_CONTEXT = 3  # lines around one, as of `diff -u`
_GUIDE = 'The guide "My run is nan" (docs/my-run-is-nan.md) has a section on it: {}.'
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_MAX_SOURCE = 2**24  # bytes of a file that may have the line; chosen
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
        """The report's sentences, the headline first, without the explanation.

        A page names the folder of the evidence itself, and not where it is itself.
        """
        if "sentences" in self.report:
            paths = [f"`{self.report.get(name)}`" for name in ("evidence", "page")]
            return [
                str(each)
                for each in self.report["sentences"]
                if not any(path in each for path in paths)
            ]
        lines = str(self.report.get("summary", "")).splitlines()
        if self.explanation:  # it was last before there were sentences
            lines = list(itertools.takewhile(lambda x: not x.startswith(_CAUSE), lines))
        return lines

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
    try:
        return plain(decode_document(read_bytes(path), kind, SCHEMA))
    except FileNotFoundError:
        return None
    except (OSError, FileError) as error:
        why = why_unreadable(error)
        raise EvidenceError(f"{path} cannot be read: {why}.") from error


# The histogram of an offending tensor by exponent, and where it is not finite.


@dataclass(frozen=True)
class Histogram:
    """The magnitudes of one tensor, counted by their exponents of 2.

    Attributes:
        name: The tensor's name, as reports have it.
        dtype: Its dtype, such as "float16".
        shape: Its shape.
        bins: Exponents and counts: `2**exponent <= |x| < 2**(exponent + 1)`.
        lowest: The exponent of the dtype's smallest normal number.
        highest: That of its largest number.
        num_nan: How many elements are nan.
        num_inf: How many are inf or -inf.
        num_zero: How many are 0.
        places: The places of the first non-finite elements.
        rows: How many non-finite elements each index of the first dimension has.
        is_first: Whether it is the one that the report names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bins: list[tuple[int, int]]
    lowest: int
    highest: int
    num_nan: int
    num_inf: int
    num_zero: int
    places: list[tuple[int, ...]]
    rows: list[tuple[int, int]]
    is_first: bool = True

    @property
    def most(self) -> int:
        """The largest count of a bin; at least 1."""
        return max((count for _, count in self.bins), default=1)


_FEW = 8  # places and rows that a page lists; chosen
_CALL = "['call']"
_PARTS = {f"{_CALL}[0]": "input", f"{_CALL}[1]": "input", f"{_CALL}[2]": "output"}


def histogram_of(incident: Incident) -> Histogram | None:
    """Counts a non-finite tensor of an incident's evidence.

    It is the one that the report names, if it can be, then one of the call that was
    bad; then the one with most finite values, which show where its magnitudes were.

    Returns:
        The histogram; None if no tensor is kept or can be read, safetensors is not
        installed, or no tensor is bad.
    """
    path = incident.tensors
    try:
        label = str(incident.first.get("label") or "")
        found = None if path is None else _worst(path, label)
    except (ImportError, OSError, FileError):
        return None
    if found is None:
        return None
    counted = _counted(*found)
    return replace(counted, is_first=counted.name == label)


def _worst(path: Path, label: str) -> tuple[str, torch.Tensor] | None:
    worst, most = None, (False, False, -1)
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            tensor = file.get_tensor(name)
            if not tensor.dtype.is_floating_point:
                continue
            num_finite = int(tensor.double().isfinite().sum())
            rank = _plain(name) == label, name.startswith(_CALL), num_finite
            if num_finite < tensor.numel() and rank > most:
                worst, most = (name, tensor), rank
    return worst


def _plain(name: str) -> str:
    """A tensor's name as reports have it: `['call'][2]` is the call's output."""
    for begin, word in _PARTS.items():
        if name.startswith(begin):
            return word + name.removeprefix(begin)
    return name[2:-2] if name.startswith("['") and name.count("[") == 1 else name


def _counted(name: str, tensor: torch.Tensor) -> Histogram:
    values, info = tensor.double(), torch.finfo(tensor.dtype)
    is_bad = ~values.isfinite()
    own = values[~is_bad & (values != 0)].abs()
    bad = is_bad.nonzero()
    rows = bad[:, 0].bincount().tolist() if values.dim() else []
    return Histogram(
        _plain(name),
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        _bins(own),
        math.frexp(info.smallest_normal)[1] - 1,
        math.frexp(info.max)[1] - 1,
        int(values.isnan().sum()),
        int(values.isinf().sum()),
        int((values == 0).sum()),
        [tuple(place) for place in bad[:_FEW].tolist()],
        [(i, count) for i, count in enumerate(rows) if count][:_FEW],
    )


def _bins(magnitudes: torch.Tensor) -> list[tuple[int, int]]:
    """Counts finite magnitudes other than 0 by their exponents."""
    if not len(magnitudes):
        return []
    exponents = torch.frexp(magnitudes).exponent - 1
    lowest = int(exponents.min())
    counts = (exponents - lowest).bincount().tolist()
    return list(enumerate(counts, lowest))


# How a bad value spread: a tree of the modules where it was, in a step.


_MOST_STATIONS = 100  # of the tree; chosen
_MOST_LEVELS = 40  # of it; chosen, far beyond real models


@dataclass
class Node:
    """A module in the tree.

    Attributes:
        name: The last part of its name.
        marks: What is known of it in this step.
        children: The modules within that have marks, or such modules within.
        num_finite: How many modules within it were looked at, and finite.
        num_unseen: How many were not looked at.
    """

    name: str
    marks: list[str] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)
    num_finite: int = 0
    num_unseen: int = 0


@dataclass
class FailurePath:
    """Where a bad value was, in one step.

    Attributes:
        tree: The model's modules, as far as they were bad, and those around them.
        stations: The entries that were not finite, in the order of execution.
        num_more: How many more there are.
        is_of_several: True if the record keeps the step together with others.
        is_recorded: True if the record has the step.
    """

    tree: Node
    stations: list[str] = field(default_factory=list)
    num_more: int = 0
    is_of_several: bool = False
    is_recorded: bool = False


def failure_path(incident: Incident, sheet: Sheet, grid: Grid) -> FailurePath:
    """Finds where the bad value of an incident was, of its report and of a record.

    Args:
        incident: The incident.
        sheet: The entries of the records.
        grid: Their steps.
    """
    path = FailurePath(Node("the model"))
    bad: dict[str, list[str]] = {}
    codes = _codes_at(incident.step, grid, path)
    finite, unseen = set[str](), set[str]()
    for entry, code in zip(sheet.entries, codes, strict=False):
        if code == NONFINITE:
            bad.setdefault(entry.module, []).append(entry.path.in_module)
            path.stations.append(name_of(entry))
        else:
            (unseen if code == NOT_SEEN else finite).add(entry.module)
    marks = {name: [f"non-finite: {', '.join(texts)}"] for name, texts in bad.items()}
    for name, text in _reported(incident):
        marks.setdefault(name, []).insert(0, text)
    _grow(path.tree, marks, finite - set(marks), unseen - finite - set(marks))
    path.num_more = max(0, len(path.stations) - _MOST_STATIONS)
    del path.stations[_MOST_STATIONS:]
    return path


def _codes_at(step: int, grid: Grid, path: FailurePath) -> list[int]:
    for i, column in enumerate(grid.columns):
        if column.first <= step <= column.last:
            path.is_recorded, path.is_of_several = True, column.first != column.last
            return [int(code) for code in grid.headroom[:, i].tolist()]
    return []


def _reported(incident: Incident) -> list[tuple[str, str]]:
    """The marks of modules by the report and the explanation, the last in front."""
    verdict = incident.report.get("verdict") or {}
    first, found = incident.first, list[tuple[str, str]]()
    if first.get("class_name"):
        found.append((first["fqn"], f"seen here first: {first['label']}"))
    module = incident.explanation.get("module")
    if module:
        found.append((module, "made here (found by replay)"))
    elif verdict.get("source") == "module" and verdict.get("maker"):
        maker = "" if verdict["maker"] == "the model" else verdict["maker"]
        found.append((maker, "made here (by the inputs and outputs of modules)"))
    return found


def _grow(
    root: Node, marks: dict[str, list[str]], finite: set[str], unseen: set[str]
) -> None:
    for name, texts in marks.items():
        node = root
        for part in filter(None, _parts(name)):
            node = node.children.setdefault(part, Node(part))
        node.marks += texts
    for names, count in ((finite, "num_finite"), (unseen, "num_unseen")):
        for name in names:
            node = _nearest(root, _parts(name))
            setattr(node, count, getattr(node, count) + 1)


def _parts(name: str) -> list[str]:
    """The parts of a module's name; what is deeper than a page shows is the last."""
    return name.split(".", _MOST_LEVELS)


def _nearest(node: Node, parts: Sequence[str]) -> Node:
    for part in parts:
        if part not in node.children:
            break
        node = node.children[part]
    return node
