"""Records the tensors of a model's steps: in memory, or to a folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...base.tensors import devices_of
from ...base.text import dtype_name
from ...guard.files.json_text import dumps
from ...guard.files.writing import open_appending, write_all, write_new
from ...guard.undo.random import RandomStates
from .recording_schema import HeadLine, RecordedStepLine, RowLine
from .recordings import SCHEMA, RankStep, RecordedTensor, share_summaries
from .run_settings import (
    has_tf32,
    process,
    settings_of,
    settings_of_optimizer,
    versions,
)
from .summary import fetch, part_of, summarize, values_of
from .tensor_hooks import BACKWARD, StepPath, TensorHooks, compiled_modules

_log = logging.getLogger("overflow_fast")
MAX_HELD = 2**28  # bytes of copies that wait for their file


class StepRecorder:
    """Records one step: from `begin()` to `end()`.

    Args:
        model: The model.
        step: The number of the step.
        keep: Is called with the row of each tensor and the tensor, or None.
        is_one_thread: Whether only calls in the thread of `begin()` are recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        step: int,
        keep: Callable[[RecordedTensor, torch.Tensor], None] | None,
        is_one_thread: bool = False,
    ) -> None:
        self._model, self._step, self._keep = model, step, keep
        self._rows: list[tuple[RecordedTensor, torch.Tensor | None]] = []
        self._hooks = TensorHooks(model, self._add, is_one_thread)
        self._optimizers = set[int]()  # that have stepped
        self._has_gradients = False
        self._optimizer_hook: Any = None

    def begin(self) -> None:
        """Records parameters and buffers, and what the model computes from now on."""
        self._settings = settings_of(self._model)
        self._has_tf32 = has_tf32(self._model)
        self._compiled = compiled_modules(self._model)
        devices = devices_of([self._model])
        self._random = RandomStates(devices, loads_numpys=False)
        parameters = self._model.parameters()
        self._parameters = {id(each) for each in parameters if each.requires_grad}
        self._hooks.show_state()
        self._hooks.__enter__()
        self._optimizer_hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        """Records gradients as the first optimizer of the model's parameters has them.

        Where one is stepped within backward, most have none yet.
        """
        self._hooks.isolated(self._add_optimizer, optimizer)

    def _add_optimizer(self, optimizer: Any) -> None:
        if id(optimizer) in self._optimizers:
            return
        number = len(self._optimizers)
        found = settings_of_optimizer(optimizer, number, self._parameters)
        if found:
            self._optimizers.add(id(optimizer))
            self._settings |= found
            self.show_gradients()

    def show_gradients(self, found: Mapping[int, torch.Tensor] | None = None) -> None:
        """Records the gradients of parameters, once.

        Args:
            found: The gradients by the parameters' ids; None: those that they have.
        """
        if not self._has_gradients:
            self._has_gradients = True
            self._hooks.show_gradients(found)

    def stop(self) -> None:
        """Removes the hooks."""
        self._hooks.__exit__(None, None, None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()

    def end(self, rank: int = 0, raised: str = "") -> RankStep:
        """Ends the step. Incurs a CPU-GPU sync for each device and dtype."""
        self.stop()
        summaries = iter(fetch([n for _, n in self._rows if n is not None]))
        for row, numbers in self._rows:
            row.summary = None if numbers is None else next(summaries)
        rows = [row for row, _ in self._rows]
        drawn = self._random.drawn()
        end = RecordedStepLine(
            step=self._step,
            settings={**self._settings, **self._hooks.arguments},
            tf32=self._has_tf32,
            compiled=self._compiled,
            random=self._random.digests(),
            drawn=drawn,
            had_gradients=bool(self._hooks.had_gradients),
            failures=self._hooks.failures,
            raised=raised,
            rows=len(rows),
        )
        return RankStep(rank, end, rows)

    def _add(self, place: StepPath, tensor: torch.Tensor, same: int | None) -> None:
        line = RowLine(
            step=self._step,
            order=len(self._rows),
            **vars(place),
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            requires_grad=None if place.phase == BACKWARD else tensor.requires_grad,
            same=same,
        )
        row = RecordedTensor(line, place)
        self._rows.append((row, None))  # also if it cannot be read
        part, values = part_of(tensor), values_of(tensor)
        if isinstance(part, str) or isinstance(values, str):
            line.why = part if isinstance(part, str) else str(values)
            return
        if part is not None:
            line.part, line.local = part.to_plain(), tuple(values.shape)
        if same is None:
            self._rows[-1] = row, summarize(values, part)
            if self._keep is not None:
                self._keep(row, values)


class Recording:
    """A recording that is being made: a context manager around one step or several.

    `overflow_fast.recording()` makes it.

    Attributes:
        folder: The folder that it writes to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        tensors: bool,
        steps: Iterable[int] | None,
    ) -> None:
        self.folder = Path(folder)
        self._model, self._has_tensors = model, tensors
        self._steps = None if steps is None else set(steps)
        self._process = process()
        self._file = self.folder / f"rank-{self._process['rank']}.jsonl"
        self._step = 0
        self._recorder: StepRecorder | None = None
        self._failure = ""
        if tensors:
            import safetensors.torch  # noqa: F401
        if self._file.exists():
            raise FileExistsError(
                f"folder must have no recording of this rank, but there is {self._file}"
            )

    def __enter__(self) -> Recording:
        self._isolated(self._begin_run)
        self._isolated(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        raised = "" if kind is None else kind.__name__
        self._isolated(lambda: self._end(raised))

    def step(self) -> None:
        """Ends a step, after its optimizer's; what follows belongs to the next one."""
        self._isolated(lambda: self._end(""))
        self._step += 1
        self._isolated(self._begin)

    def _isolated(self, function: Callable[[], None]) -> None:
        """Calls a function; after an error the recording ends, and the program runs."""
        if self._failure:
            return
        try:
            function()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            if self._recorder is not None:
                self._recorder.stop()
            _log.warning("Recording to %s ended: %s", self.folder, self._failure)

    def _begin_run(self) -> None:
        line = HeadLine(
            schema=SCHEMA,
            time=time.time(),
            tensors=self._has_tensors,
            class_name=type(self._model).__name__,
            **self._process,
            versions=versions(),
        )
        write_new(self._file, f"{dumps(line)}\n")

    def _begin(self) -> None:
        if self._steps is not None and self._step not in self._steps:
            return
        self._held: dict[str, torch.Tensor] = {}
        self._num_held = self._num_files = 0
        keep = self._hold if self._has_tensors else None
        self._recorder = StepRecorder(self._model, self._step, keep)
        self._recorder.begin()

    def _end(self, raised: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        try:
            recorder.show_gradients()
            found = recorder.end(raised=raised)
        finally:
            recorder.stop()
        self._save()
        for row in found.rows:
            add_numbers(row)
        lines = "".join(
            f"{dumps(line)}\n" for line in (*(r.line for r in found.rows), found.end)
        )
        with open_appending(self._file) as file:
            write_all(file, lines.encode())

    def _hold(self, row: RecordedTensor, values: torch.Tensor) -> None:
        row.line.file = self._name()
        self._held[str(row.line.order)] = values.cpu().contiguous().clone()
        self._num_held += values.nbytes
        if self._num_held > MAX_HELD:
            self._save()

    def _name(self) -> str:
        rank, number = self._process["rank"], self._num_files
        return f"rank-{rank}.step-{self._step}.{number}.safetensors"

    def _save(self) -> None:
        if self._held:
            from safetensors.torch import save_file

            save_file(self._held, self.folder / self._name())
            self._held, self._num_held = {}, 0
            self._num_files += 1


def add_numbers(row: RecordedTensor) -> None:
    """Adds the numbers of a row's tensor to its line."""
    line, found = row.line, row.summary
    if found is not None:
        line.low, line.high, line.squares = found.low, found.high, found.squares
        line.num_nan, line.num_inf = found.num_nan, found.num_inf
        line.fingerprint = found.fingerprint


def in_memory(recorder: StepRecorder) -> RankStep:
    """Ends a step that stays in memory: each row has the numbers of its tensor."""
    found = recorder.end()
    share_summaries(found.rows)
    return found
