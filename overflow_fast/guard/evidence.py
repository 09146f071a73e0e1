"""What is left of a bad step on disk: its tensors, its batch, its report, and a log."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .report import Report

_log = logging.getLogger("overflow_fast")
_PREFIX = "step-"


class EvidenceFolder:
    """A folder with one folder for each of the last bad steps.

    `step-00000012/` holds `report.txt`, `report.json`, `tensors.safetensors`,
    `batch.safetensors`, and `left_out.txt` for what was too large or not a plain
    tensor. Nothing here raises: what cannot be written is logged.

    Args:
        path: The folder; it is made when it is first needed.
        max_bytes: How many bytes of tensors a step may leave.
        keep: How many steps are kept; older ones are removed.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, keep: int) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._keep = keep

    def folder_of(self, step: int) -> Path:
        """Where a step's evidence lies."""
        return self._path / f"{_PREFIX}{step:08d}"

    def write(self, report: Report, tensors: object, batch: object) -> None:
        """Writes what a step left, and removes what is older than `keep` steps.

        Incurs a CPU-GPU sync for each tensor on a device.

        Args:
            report: The step's report.
            tensors: The offending tensors, in any nesting.
            batch: The inputs of the forward that was bad, in any nesting.
        """
        try:
            folder = self.folder_of(report.step)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.txt").write_text(f"{report}\n")
            (folder / "report.json").write_text(f"{report.to_json()}\n")
            room, left_out = self._max_bytes, list[str]()
            for name, values in (("batch", batch), ("tensors", tensors)):
                room = _save(folder / f"{name}.safetensors", values, room, left_out)
            if left_out:
                (folder / "left_out.txt").write_text("\n".join(left_out) + "\n")
            self._rotate()
        except Exception as error:
            _log.warning("the evidence of step %d was not kept: %s", report.step, error)

    def _rotate(self) -> None:
        folders = sorted(self._path.glob(f"{_PREFIX}*"), key=os.path.getmtime)
        for folder in folders[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)


def _save(path: Path, values: object, room: int, left_out: list[str]) -> int:
    """Saves the tensors of any nesting; returns how many bytes are left."""
    from safetensors.torch import save_file

    chosen: dict[str, torch.Tensor] = {}
    for name, value in _flat(values):
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{path.stem}{name}: {value!r:.200}")
        elif type(value) not in (torch.Tensor, torch.nn.Parameter):
            left_out.append(f"{path.stem}{name}: a {type(value).__name__}")
        elif value.layout is not torch.strided or value.is_meta:
            left_out.append(f"{path.stem}{name}: its layout is {value.layout}")
        elif value.nbytes > room:
            left_out.append(f"{path.stem}{name}: {value.nbytes} bytes are too many")
        else:
            room -= value.nbytes
            # A copy: safetensors refuses tensors that share memory.
            copied = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            chosen[name.lstrip(".") or "value"] = copied
    if chosen:
        save_file(chosen, path)
    return room


def _flat(values: object) -> Iterator[tuple[str, Any]]:
    for path, value in pytree.tree_flatten_with_path(values)[0]:
        if value is not None:
            yield pytree.keystr(path), value


class JsonLog:
    """A log of one JSON object a line, rotated by size. Never raises.

    Args:
        path: The file; the ones before it get `.1`, `.2` at their end.
        max_bytes: When a new file is begun.
        keep: How many older files are kept.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, keep: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._handler = _Handler(
            path, maxBytes=max_bytes, backupCount=keep, delay=True, encoding="utf-8"
        )

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line."""
        record = logging.LogRecord("", logging.INFO, "", 0, json.dumps(line), (), None)
        self._handler.emit(record)

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


class _Handler(logging.handlers.RotatingFileHandler):
    """A rotating file whose failures are told once and stop nothing."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("a line of %s was lost", self.baseFilename, exc_info=True)


def of_rank(path: str | os.PathLike[str]) -> Path:
    """A path of this rank's own: `guard.rank3.jsonl` where there are several ranks."""
    whole = Path(path)
    has_ranks = dist.is_available() and dist.is_initialized()
    if not has_ranks or dist.get_world_size() == 1:
        return whole
    return whole.with_name(f"{whole.stem}.rank{dist.get_rank()}{whole.suffix}")
