"""`recording()`: a context manager that writes what a model computes to a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from ...base.given_steps import check_module
from ...guard.files.json_text import dumps
from ...guard.files.writing import make_folder, write_new
from ...guard.process import own_rank
from .step_recorder import StepRecorder

_log = logging.getLogger("overflow_fast")


class Recording:
    """A recording that is being made: a context manager around one step or several.

    `overflow_fast.recording()` makes it.

    Attributes:
        folder: The folder that it writes to.
    """

    def __init__(self, folder: Path, model: nn.Module, steps: set[int] | None) -> None:
        self.folder = folder
        self._model, self._steps = model, steps
        self._rank, self._step = own_rank(), 0
        self._recorder: StepRecorder | None = None
        self._failure = ""
        if found := next(folder.glob(f"rank-{self._rank}.*"), None):
            raise FileExistsError(
                f"folder must have no recording of this rank, but there is {found}"
            )

    def __enter__(self) -> Recording:
        self._isolated(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._isolated(self._end, "" if kind is None else kind.__name__)

    def step(self) -> None:
        """Ends a step, after its optimizer's; what follows belongs to the next one."""
        self._isolated(self._end)
        self._step += 1
        self._isolated(self._begin)

    def _isolated(self, function: Callable[..., None], *arguments: str) -> None:
        """Calls a function; after an error the recording ends, and the program runs."""
        if self._failure:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            if self._recorder is not None:
                self._recorder.stop()
            _log.warning("Recording to %s ended: %s", self.folder, self._failure)

    def _begin(self) -> None:
        if self._steps is not None and self._step not in self._steps:
            return
        self._recorder = StepRecorder(self._model, self._step)
        self._recorder.begin()

    def _end(self, raised: str = "") -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        try:
            recorder.record_gradients()
            found = recorder.end(raised)
        finally:
            recorder.stop()
        lines = found.line, *(row.line for row in found.rows)
        text = "".join(f"{dumps(line)}\n" for line in lines)
        write_new(self.folder / f"rank-{self._rank}.step-{self._step}.jsonl", text)


def recording(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    steps: Iterable[int] | None = None,
) -> Recording:
    """Records the tensors of a model's steps, to compare them with another run's.

    In the order of execution: parameters and buffers as the step begins; inputs and
    outputs of all modules; gradients of both; gradients of parameters, as backward
    leaves them and as the first optimizer of theirs finds them, else at the end of the
    step. Of each it writes its range, its norm, its counts of nan and inf, and a
    fingerprint of 1 KiB. The program computes the same as without it; if a file cannot
    be written, the recording ends with a warning. Incurs a few CPU-GPU syncs a step.

    Args:
        folder: Gets one file a step and rank. It may not hold a recording of this rank.
        model: The model, as it is called: wrapped by DDP, FSDP or `torch.compile`, or
            not. Of compiled code only what goes in and what comes out is recorded.
        steps: The numbers of the steps to record, from 0; None: all. Call `step()` of
            what is returned after each step but the last.

    Returns:
        A context manager around the step, or the steps.

    Raises:
        TypeError: If `model` is no module, or `folder` no path.
        OSError: If `folder` is a file, or cannot be made.
        FileExistsError: If the folder has a recording of this rank.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with recording(tempfile.mkdtemp() + "/run_a", model):
        ...     model(torch.ones(1, 2)).sum().backward()
    """
    check_module(model)
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be a path, got {type(folder).__name__}")
    path = Path(folder)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"folder must be a folder, but {path} is a file")
    try:
        make_folder(path)
    except OSError as error:
        raise type(error)(f"folder cannot be made: {error}") from error
    return Recording(path, model, None if steps is None else set(steps))
