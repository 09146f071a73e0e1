"""Reads dumps of Ascend's msprobe: dump.json, and a .pt file for each tensor."""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from ...guard.files.reading import FileError, open_regular, read_bytes, why_unreadable
from ...guard.files.schema import convert, decode
from .recording_schema import MOST, Shape
from .recordings import (
    RankStep,
    RecordedRun,
    RecordedTensor,
    RecordingError,
    Source,
)
from .summary import fetch, summarize, values_of
from .tensor_hooks import BACKWARD, FORWARD, STATE, StepPath

_CALL = re.compile(r"Module\.(.*)\.(\w+)\.(forward|backward)\.(\d{1,9})")
_GRADIENTS = re.compile(r"Module\.(.*)\.parameters_grad(?:\.\d+)?")
_MAX_DUMP = 2**30  # bytes; a file beyond is no dump that memory should take; chosen
_MAX_NAME = 2000  # characters; chosen, far beyond names of modules
_MAX_DEPTH = 64  # of nested values; a file may nest without end
_ONLY_STATISTICS = (
    "the dump has statistics of it alone; dump with task=tensor to compare values"
)


class _Dump(Struct):
    """`dump.json`, as far as it is read."""

    data: dict[str, dict[str, Any]] = {}  # calls by their names; these nest in any way


class DumpedTensor(Struct):
    """A tensor, as a call's description has it."""

    dtype: str
    shape: Shape
    data_name: str | None = None  # its file

    def __post_init__(self) -> None:
        """Checks that a tensor may have this shape."""
        if math.prod(self.shape) > MOST:
            raise ValueError(f"no tensor has the shape {self.shape}")


@dataclass
class TensorFile(Source):
    """A row of a dump, whose tensor lies in a file of its own."""

    path: Path | None = None

    def load(self) -> torch.Tensor | None:
        """Reads the tensor; None if it cannot be read, which the row says."""
        if self.path is None or self.row.why:
            return None
        try:
            values = values_of(_read_tensor(self.path))
        except (OSError, FileError) as error:
            self.row.why = f"{self.path} cannot be read: {why_unreadable(error)}"
            return None
        return None if isinstance(values, str) else values


def _read_tensor(path: Path) -> torch.Tensor:
    """Reads a file of `torch.save` with one tensor, which is no larger than the file.

    Raises:
        OSError: If it cannot be read.
        FileError: If it has none.
    """
    with open_regular(path) as file:
        size = path.stat().st_size
        try:
            # Older formats than zip allocate what they claim, before they read it.
            held = sum(each.file_size for each in zipfile.ZipFile(file).infolist())
            if held > size:
                raise FileError("it is compressed")
            file.seek(0)
            found = torch.load(file, map_location="cpu", weights_only=True)
        except (FileError, OSError):
            raise
        except Exception as error:  # of zipfile, pickle and torch
            text = str(error).partition("\n")[0]
            raise FileError(f"{type(error).__name__}: {text:.200}") from error
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        raise FileError("it holds no plain tensor")
    if found.numel() * found.element_size() > size:
        raise FileError("its tensor claims more than the file has")
    return found


def find_dumps(folder: Path) -> list[Path]:
    """The dump.json of each rank and step in a folder; empty for another folder."""
    for pattern in ("dump.json", "rank*/dump.json", "step*/rank*/dump.json"):
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return []


def read_dumps(folder: Path, files: list[Path]) -> RecordedRun:
    """Reads dumps of modules (level L0, or mix); of APIs there are no layers.

    Args:
        folder: What the run is called by.
        files: What `find_dumps()` returned.

    Raises:
        RecordingError: If none holds calls of modules; of several, one that cannot be
            read is left out.
    """
    run = RecordedRun(str(folder), [], {})
    for file in files:
        rank, step = _number(file.parent.name), _number(file.parent.parent.name)
        try:
            sources = _sources(file, rank)
        except (OSError, FileError) as error:
            run.damaged.append(f"{file} cannot be read: {why_unreadable(error)}.")
            continue
        if sources:
            run.steps.setdefault(step, []).append(RankStep(rank, {}, sources))
        else:
            run.damaged.append(
                f"{file} has no calls of modules: dump with level L0 or mix."
            )
    if not run.steps:
        raise RecordingError(run.damaged[0].removesuffix("."))
    ranks = sorted({each.rank for step in run.steps.values() for each in step})
    head = {"world_size": len(ranks)}
    run.heads = [{**head, "rank": rank, "versions": {}} for rank in ranks]
    return run


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    is_number = 0 < len(digits) < 10 and name.startswith(("rank", "step"))
    return int(digits) if is_number else 0


def _sources(file: Path, rank: int) -> list[Source]:
    """The tensors of one dump.

    Raises:
        OSError: If it cannot be read.
        FileError: If it is none.
    """
    dump = decode(read_bytes(file, _MAX_DUMP), _Dump)
    folder = file.parent / "dump_tensor_data"
    tensors = list(_tensors(dump.data))
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
    return [source for source, _ in read]


def _source(
    place: StepPath, facts: DumpedTensor, folder: Path, rank: int, order: int
) -> TensorFile:
    name = facts.data_name
    row = RecordedTensor(place, order, facts.dtype.removeprefix("torch."), facts.shape)
    path = None if name is None else folder / name
    if path is None:
        row.why = _ONLY_STATISTICS
    elif path.parent != folder:
        row.why = f"{path} lies outside of the dump"
    elif not os.path.lexists(path):
        row.why = f"{path} is missing"
    return TensorFile(rank, row, path=path)


def _tensors(data: dict[str, Any]) -> Iterator[tuple[StepPath, DumpedTensor]]:
    """Yields the tensors of a dump that are those of recordings."""
    seen = set[tuple[str, str]]()
    for name, call in data.items():
        if len(name) > _MAX_NAME:
            raise FileError(f"a call has a name of {len(name)} characters")
        match, gradients = _CALL.fullmatch(name), _GRADIENTS.fullmatch(name)
        if match is not None:
            module, kind, phase, number = match.groups()
            for role, path, facts in _list_call(call, phase):
                if role == "parameter":
                    if (module, path) in seen:
                        continue
                    seen.add((module, path))
                where = STATE if role == "parameter" else phase
                at = 0 if role == "parameter" else int(number)
                yield _place(where, module, kind, at, role, path), facts
        elif gradients is not None:
            module, _, kind = gradients[1].rpartition(".")
            for path, found in call.items():
                for _, facts in _leaves(found, ""):
                    role = "parameter_gradient"
                    yield _place(BACKWARD, module, kind, 0, role, path), facts


def _place(
    phase: str, module: str, kind: str, call: int, role: str, path: str
) -> StepPath:
    where = {"forward": FORWARD, "backward": BACKWARD}.get(phase, phase)
    caller = module.rpartition(".")[0]
    return StepPath(module, role, path, where, kind, call, caller)


def _list_call(
    call: dict[str, Any], phase: str
) -> Iterator[tuple[str, str, DumpedTensor]]:
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


def _leaves(
    value: Any, path: str, depth: int = 0
) -> Iterator[tuple[str, DumpedTensor]]:
    if depth > _MAX_DEPTH:
        raise FileError("it is nested too deeply")
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        yield path, convert(value, DumpedTensor)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, f"{path}['{name}']", depth + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}[{index}]", depth + 1)


def _ordered(
    tensors: list[tuple[StepPath, DumpedTensor]],
) -> list[tuple[StepPath, DumpedTensor]]:
    """Orders tensors by execution: a call is dumped when it returns."""
    first: dict[tuple[str, int], int] = {}
    wanted = {(p.module, p.call) for p, _ in tensors if p.role == "input"}
    seen = set[tuple[str, int]]()
    for i, (place, _) in enumerate(tensors):
        if (place.module, place.call) in seen:
            continue
        seen.add((place.module, place.call))
        name = place.module
        while name:  # a call begins with the first one in it
            if (name, place.call) in wanted:
                first.setdefault((name, place.call), i)
            name = name.rpartition(".")[0]

    def when(i: int) -> tuple[bool, float, int, int]:
        place = tensors[i][0]
        if place.role != "input":
            return place.phase != STATE, i, 1, 0
        begin = first.get((place.module, place.call), i)
        return True, begin, 0, place.module.count(".")

    return [tensors[i] for i in sorted(range(len(tensors)), key=when)]
