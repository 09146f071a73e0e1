"""How a bad value spread: a tree of the modules where it was, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .grid import NONFINITE, NOT_SEEN, Grid, Sheet, name_of
from .incidents import Incident

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
