"""The evidence of a bad step on disk: its tensors, its batch, its report."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...base.text import printable
from ..files.json_text import SCHEMA, dumps
from ..files.writing import make_folder, write_new
from .chosen_tensors import choose
from .explanation import Explanation
from .findings import Artifact
from .report import Report
from .run_identity import RunIdentity

_log = logging.getLogger("overflow_fast")
_SUBFOLDER = "overflow_fast"
_MARKER = "overflow_fast.json"
_PAGE = "page.html"


class EvidenceFolder:
    """A folder of a run's own, with one folder for each of its last bad steps.

    `PATH/overflow_fast/RUN/step-00000012/` holds `overflow_fast.json` (the marker of
    this run), `report.txt`, `report.json`, `page.html`, `tensors.safetensors`,
    `batch.safetensors`, and `left_out.txt` with what was too large or not a plain
    tensor. A second report of the same step is in `step-00000012.2/`.

    Nothing is overwritten. Only this run's own folders are removed, if they still have
    the marker and exactly their files: a folder in which a file was added or changed,
    or that was moved, is left alone. Nothing here raises: a failure to write is logged,
    once.

    Args:
        path: The folder to write to; it is made when it is first needed.
        run: The run.
        max_bytes: How many bytes of tensors a step may leave.
        keep: How many of this run's steps are kept; older ones are removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: RunIdentity,
        max_bytes: int,
        keep: int,
    ) -> None:
        self._path = Path(path) / _SUBFOLDER / run.id
        self._run = run
        self._max_bytes = max_bytes
        self._keep = keep
        self._steps: collections.deque[_StepFolder] = collections.deque()
        self._has_warned = False

    def keep(self, step: int, tensors: object, batch: object) -> str | None:
        """Writes a step's evidence, and removes that of all but the last `keep` steps.

        Incurs a CPU-GPU sync for each tensor on a device.

        Args:
            step: The step's number.
            tensors: The offending tensors, in any nesting.
            batch: The inputs of the forward that was bad, in any nesting.

        Returns:
            The folder, or None if there is none.
        """
        folder: _StepFolder | None = None
        try:
            folder = _StepFolder(self._path, self._run, step)
            self._steps.append(folder)
            room, left_out = self._max_bytes, list[str]()
            for name, values in (("tensors", tensors), ("batch", batch)):
                try:
                    chosen = choose(name, values, room, left_out)
                    room -= sum(tensor.nbytes for tensor in chosen.values())
                    folder.save(f"{name}.safetensors", chosen)
                except Exception as error:
                    left_out.append(f"{name}: {error}")
                    self._tell(step, error)
            folder.room = room
            if left_out:
                folder.write("left_out.txt", "\n".join(map(printable, left_out)))
            if len(self._steps) > self._keep:
                self._steps.popleft().remove()
        except Exception as error:
            self._tell(step, error)
        return None if folder is None else str(folder.path)

    def add_page(self, report: Report, make_page: Callable[[], str]) -> None:
        """Writes a page beside a step's evidence, and notes its path in the report."""
        folder = self._folder_of(report)
        if folder is None:
            return
        try:
            folder.write(_PAGE, make_page())
            report.page = str(folder.path / _PAGE)
        except Exception as error:
            self._tell(report.step, error)

    def _folder_of(self, report: Report) -> _StepFolder | None:
        """The folder of a report whose evidence was just kept."""
        folder = self._steps[-1] if self._steps else None
        is_its = folder is not None and str(folder.path) == report.evidence
        return folder if is_its else None

    def add_report(self, report: Report) -> None:
        """Writes the report of a step whose evidence was just kept."""
        folder, explanation = self._folder_of(report), report.explanation
        artifacts: list[Artifact] = []
        if explanation is not None:  # a report that stays holds no batch
            artifacts, explanation.artifacts = explanation.artifacts, []
        if folder is None:
            return
        try:
            folder.write("report.txt", str(report))
            folder.write("report.json", report.to_json())
            if explanation is not None:
                folder.write("explanation.json", _as_json(explanation))
                folder.save_artifacts(artifacts)
        except Exception as error:
            self._tell(report.step, error)

    def _tell(self, step: int, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Not all evidence of step %d was kept: %s. Logged once.",
                step,
                error,
            )


class _StepFolder:
    """A new folder of one bad step, and the list of what was written to it.

    Args:
        parent: The run's folder.
        run: The run.
        step: The step's number.
    """

    def __init__(self, parent: Path, run: RunIdentity, step: int) -> None:
        self.room = 0
        make_folder(parent)
        for number in itertools.count(1):
            suffix = f".{number}" if number > 1 else ""
            self.path = parent / f"step-{step:08d}{suffix}"
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
                break
        self._real = os.path.realpath(self.path)
        self._files: dict[str, tuple[int, ...]] = {}
        marker = {"schema": SCHEMA, "kind": "evidence", "run": run.id, "step": step}
        self._marker = dumps(marker)
        try:
            self.write(_MARKER, self._marker)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path / _MARKER)
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise

    def write(self, name: str, text: str) -> None:
        """Writes a new file of text."""
        write_new(self.path / name, f"{text}\n")
        self._files[name] = _state_of(self.path / name)

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Saves tensors, if there are any, to a new file, or leaves none."""
        from safetensors.torch import save_file

        if tensors:
            self._save(name, functools.partial(save_file, tensors))

    def _save(self, name: str, save: Callable[[Path], object]) -> None:
        try:
            save(self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self.path / name)
            raise
        self._files[name] = _state_of(self.path / name)

    def save_artifacts(self, artifacts: Sequence[Artifact]) -> None:
        """Saves the files of an explanation, if there is room for them all."""
        if sum(each.num_bytes for each in artifacts) > self.room:
            return
        for each in artifacts:
            self._save(each.name, functools.partial(torch.save, each.content))

    def remove(self) -> None:
        """Removes the folder if nothing in it has changed since; never raises."""
        with contextlib.suppress(OSError, ValueError):
            if os.path.realpath(self.path) != self._real or not self._is_as_left():
                return
            for name in self._files:
                os.unlink(self.path / name)
            self.path.rmdir()

    def _is_as_left(self) -> bool:
        names = os.listdir(self.path)
        states = {name: _state_of(self.path / name) for name in names}
        marker = (self.path / _MARKER).read_text(encoding="utf-8")
        return states == self._files and marker == f"{self._marker}\n"


def _as_json(explanation: Explanation) -> str:
    marker = {"schema": SCHEMA, "kind": "explanation"}
    return dumps({**marker, **explanation.to_dict()})


def _state_of(path: Path) -> tuple[int, ...]:
    """Returns what changes when a file is written to or replaced, of a link its own."""
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns
