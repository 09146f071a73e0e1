"""Writes the tensors of a model's steps, or their fingerprints, to a folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...base.tensors import devices_of
from ...guard.files.json_text import dumps
from ...guard.files.writing import open_appending, write_all, write_new
from ...guard.undo.random import RandomStates
from .recording_schema import HeadLine, RecordedStepLine, RowLine
from .recordings import SCHEMA, add_numbers, row_line
from .run_settings import modes, process, settings_of_optimizer, versions
from .summary import fetch, magnitudes, part_of, summarize, values_of
from .tensor_hooks import StepPath, TensorHooks

_log = logging.getLogger("overflow_fast")
MAX_HELD = 2**28  # bytes of copies that wait for their file


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
        self._settings: dict[str, dict[str, str]] = {}  # as they were last written
        self._hooks: TensorHooks | None = None
        self._failure = ""
        self._optimizer_hook: Any = None
        self._check()

    def _check(self) -> None:
        if self._has_tensors:
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
            self._stop()
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
        self._rows: list[tuple[RowLine, torch.Tensor | None]] = []
        self._held: dict[str, torch.Tensor] = {}
        self._num_held = self._num_files = 0
        self._has_gradients = False
        self._modes = modes(self._model)
        self._random = RandomStates(devices_of([self._model]))
        self._optimizers = set[int]()  # that have stepped
        parameters = self._model.parameters()
        self._parameters = {id(each) for each in parameters if each.requires_grad}
        self._hooks = TensorHooks(self._model, self._add)
        self._hooks.show_state()
        self._hooks.__enter__()
        self._optimizer_hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        """Records gradients as the first optimizer of the model's parameters has them.

        Where one is stepped within backward, most have none yet.
        """
        self._isolated(lambda: self._add_optimizer(optimizer))

    def _add_optimizer(self, optimizer: Any) -> None:
        if self._hooks is None or id(optimizer) in self._optimizers:
            return
        number = len(self._optimizers)
        found = settings_of_optimizer(optimizer, number, self._parameters)
        if not found:
            return
        self._optimizers.add(id(optimizer))
        self._modes["settings"] |= found
        if not self._has_gradients:
            self._has_gradients = True
            self._hooks.show_gradients()

    def _stop(self) -> TensorHooks | None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        return hooks

    def _end(self, raised: str) -> None:
        if self._hooks is None:
            return
        if not self._has_gradients:
            self._hooks.show_gradients()
        hooks = self._stop()
        assert hooks is not None
        self._save()
        summaries = iter(fetch([n for _, n in self._rows if n is not None]))
        lines = []
        for row, numbers in self._rows:
            if numbers is not None:
                add_numbers(row, next(summaries))
            lines.append(f"{dumps(row)}\n")
        drawn = self._random.drawn()
        settings = {**self._modes.pop("settings"), **hooks.arguments}
        changed = {k: v for k, v in settings.items() if self._settings.get(k) != v}
        self._settings |= changed
        end = RecordedStepLine(
            step=self._step,
            **self._modes,
            settings=changed,
            had_gradients=bool(hooks.had_gradients),
            has_drawn=bool(drawn),
            drawn=drawn,
            failures=hooks.failures,
            raised=raised,
            rows=len(lines),
        )
        lines.append(f"{dumps(end)}\n")
        with open_appending(self._file) as file:
            write_all(file, "".join(lines).encode())
        self._rows, self._held = [], {}

    def _add(self, place: StepPath, tensor: torch.Tensor, same: int | None) -> None:
        row = row_line(place, tensor, self._step, len(self._rows), same)
        self._rows.append((row, None))  # also if it cannot be read
        part = part_of(tensor)
        values = values_of(tensor)
        if isinstance(part, str) or isinstance(values, str):
            row.why = part if isinstance(part, str) else str(values)
            return
        if part is not None:
            row.part, row.local = part.to_plain(), tuple(values.shape)
        if same is None:
            numbers = summarize(values, part)
            if place.role in ("accumulated_gradient", "parameter_gradient"):
                numbers = torch.cat([numbers, magnitudes(values)])
            self._rows[-1] = row, numbers
            if self._has_tensors:
                self._hold(row, values)

    def _hold(self, row: RowLine, values: torch.Tensor) -> None:
        row.file = self._name()
        self._held[str(row.order)] = values.cpu().contiguous().clone()
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
