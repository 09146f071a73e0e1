"""The way of a bad value: a tree of the modules where it was, in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .grid import NONFINITE, NOT_SEEN, Grid, Sheet
from .incident_card import Incident
from .row_names import name_of

_MOST_STATIONS = 100
_MOST_LEVELS = 40


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
class Way:
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


def way_of(incident: Incident, sheet: Sheet, grid: Grid) -> Way:
    """Finds where the bad value of an incident was, of its report and of a record.

    Args:
        incident: The incident.
        sheet: The entries of the records.
        grid: Their steps.
    """
    way = Way(Node("the model"))
    bad: dict[str, list[str]] = {}
    codes = _codes_at(incident.step, grid, way)
    finite, unseen = set[str](), set[str]()
    for entry, code in zip(sheet.entries, codes, strict=False):
        if code == NONFINITE:
            is_gradient = entry.kind == "gradient"
            text = f"gradient of {entry.label}" if is_gradient else entry.label
            bad.setdefault(entry.module, []).append(text)
            way.stations.append(name_of(replace(entry, label=text)))
        else:
            (unseen if code == NOT_SEEN else finite).add(entry.module)
    marks = {name: [f"non-finite: {', '.join(texts)}"] for name, texts in bad.items()}
    for name, text in _reported(incident):
        marks.setdefault(name, []).insert(0, text)
    _grow(way.tree, marks, finite - set(marks), unseen - finite - set(marks))
    way.num_more = max(0, len(way.stations) - _MOST_STATIONS)
    del way.stations[_MOST_STATIONS:]
    return way


def _codes_at(step: int, grid: Grid, way: Way) -> list[int]:
    for i, column in enumerate(grid.columns):
        if column.first <= step <= column.last:
            way.is_recorded, way.is_of_several = True, column.first != column.last
            return [int(code) for code in grid.headroom[:, i].tolist()]
    return []


def _reported(incident: Incident) -> list[tuple[str, str]]:
    """The marks of modules by the report and the explanation, the last in front."""
    verdict = incident.report.get("verdict") or {}
    first, found = verdict.get("first") or {}, list[tuple[str, str]]()
    if first.get("class_name"):
        found.append((first["fqn"], f"seen here first: {first['label']}"))
    if verdict.get("source") == "module" and verdict.get("maker"):
        maker = "" if verdict["maker"] == "the model" else verdict["maker"]
        found.append((maker, "made here, by the frames"))
    module = incident.explanation.get("module")
    if module:
        found.append((module, "made here, by the replay"))
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
