"""Reads dumps of Ascend's msprobe: dump.json, and a .pt file for each tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .places_of import BACKWARD, FORWARD, STATE, Place
from .run_reader import RankStep, RecordingError, Run, Source
from .run_rows import Row
from .summary import fetch, summarize, values_of

_CALL = re.compile(r"Module\.(.*)\.(\w+)\.(forward|backward)\.(\d+)")
_GRADIENTS = re.compile(r"Module\.(.*?)\.?(\w*)\.parameters_grad(?:\.\d+)?")
_ONLY_STATISTICS = (
    "the dump has statistics of it alone; dump with task=tensor to compare values"
)


@dataclass
class TensorFile(Source):
    """A row of a dump, whose tensor lies in a file of its own."""

    path: Path | None = None

    def load(self) -> torch.Tensor | None:
        """Reads the tensor."""
        if self.path is None or not self.path.exists():
            return None
        found = torch.load(self.path, map_location="cpu", weights_only=True)
        values = values_of(found)
        return None if isinstance(values, str) else values


def find_dumps(folder: Path) -> list[Path]:
    """The dump.json of each rank and step in a folder; empty for another folder."""
    for pattern in ("dump.json", "rank*/dump.json", "step*/rank*/dump.json"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return []


def read_dumps(folder: Path, files: list[Path]) -> Run:
    """Reads dumps of modules (level L0, or mix); of APIs there are no layers.

    Args:
        folder: What the run is called by.
        files: What `find_dumps()` returned.

    Raises:
        RecordingError: If they hold no calls of modules.
    """
    run = Run(str(folder), [], {})
    for file in files:
        rank, step = _number(file.parent.name), _number(file.parent.parent.name)
        sources = list(_sources(file, rank))
        if not sources:
            raise RecordingError(
                f"{file} has no calls of modules: dump with level L0 or mix"
            )
        run.steps.setdefault(step, []).append(RankStep(rank, {}, sources))
    ranks = sorted({each.rank for step in run.steps.values() for each in step})
    head = {"world_size": len(ranks)}
    run.heads = [{**head, "rank": rank, "versions": {}} for rank in ranks]
    return run


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits and name.startswith(("rank", "step")) else 0


def _sources(file: Path, rank: int) -> Iterator[Source]:
    data = json.loads(file.read_text(encoding="utf-8")).get("data", {})
    folder = file.parent / "dump_tensor_data"
    tensors = list(_tensors(data))
    found = [
        _source(place, facts, folder, rank, order)
        for order, (place, facts) in enumerate(_ordered(tensors))
    ]
    read = [(s, s.load()) for s in found]
    numbers = [summarize(values) for _, values in read if values is not None]
    summaries = iter(fetch(numbers))
    for source, values in read:
        if values is not None:
            source.row.summary = next(summaries)
        yield source


def _source(
    place: Place, facts: dict[str, Any], folder: Path, rank: int, order: int
) -> TensorFile:
    name = facts.get("data_name")
    dtype = str(facts.get("dtype", "")).removeprefix("torch.")
    row = Row(place, order, dtype, tuple(facts.get("shape", ())))
    if name is None:
        row.why = _ONLY_STATISTICS
    elif not (folder / name).exists():
        row.why = f"{folder / name} is missing"
    return TensorFile(rank, row, path=None if name is None else folder / name)


def _tensors(data: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields the tensors of a dump that are those of recordings."""
    seen = set[tuple[str, str]]()
    for name, call in data.items():
        match, gradients = _CALL.fullmatch(name), _GRADIENTS.fullmatch(name)
        if match is not None:
            module, kind, phase, number = match.groups()
            for role, path, facts in _of_call(call, phase):
                if role == "parameter":
                    if (module, path) in seen:
                        continue
                    seen.add((module, path))
                where = STATE if role == "parameter" else phase
                at = 0 if role == "parameter" else int(number)
                yield _place(where, module, kind, at, role, path), facts
        elif gradients is not None:
            module, kind = gradients.groups()
            for path, found in call.items():
                for facts in found if isinstance(found, list) else [found]:
                    role = "parameter_gradient"
                    yield _place(BACKWARD, module, kind, 0, role, path), facts


def _place(
    phase: str, module: str, kind: str, call: int, role: str, path: str
) -> Place:
    where = {"forward": FORWARD, "backward": BACKWARD}.get(phase, phase)
    return Place(where, module, kind, call, role, path, module.rpartition(".")[0])


def _of_call(
    call: dict[str, Any], phase: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields role, path and facts. In backward `input` is what the module is given.

    What it returns there is its own part of a gradient, which recordings do not have.
    """
    if phase == "backward":
        for path, facts in _leaves(call.get("input"), ""):
            yield "output_gradient", path, facts
        return
    for name, role in (
        ("parameters", "parameter"),
        ("input_args", "input"),
        ("input_kwargs", "input"),
        ("output", "output"),
    ):
        for path, facts in _leaves(call.get(name), ""):
            plain = path.strip("[]'") if role == "parameter" else path
            yield role, plain, facts


def _leaves(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        yield path, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{path}['{name}']")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]")


def _ordered(
    tensors: list[tuple[Place, dict[str, Any]]],
) -> list[tuple[Place, dict[str, Any]]]:
    """Orders tensors by execution: a call is dumped when it returns."""
    first: dict[tuple[str, int], int] = {}
    for i, (place, _) in enumerate(tensors):
        parts = place.module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            first.setdefault((name, place.call), i)

    def when(i: int) -> tuple[bool, float, int, int]:
        place = tensors[i][0]
        if place.role != "input":
            return place.phase != STATE, i, 1, 0
        begin = first[place.module, place.call]
        return True, begin, 0, place.module.count(".")

    return [tensors[i] for i in sorted(range(len(tensors)), key=when)]
