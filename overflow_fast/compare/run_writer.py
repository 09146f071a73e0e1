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

from ..core.devices import devices_of
from ..files.json_text import dumps
from ..files.writing import make_folder, open_appending, write_all, write_new
from ..state.random import RandomStates
from .places_of import Place
from .run_rows import SCHEMA, Row
from .shards import part_of
from .summary import fetch, summarize, values_of
from .surroundings import modes, process, versions
from .tap import Tap

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
        self._tap: Tap | None = None
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
        make_folder(self.folder)
        head = {"kind": "recording", "schema": SCHEMA, "time": time.time()}
        own = {"tensors": self._has_tensors, "class": type(self._model).__name__}
        line = {**head, **own, **self._process, "versions": versions()}
        write_new(self._file, f"{dumps(line)}\n")

    def _begin(self) -> None:
        if self._steps is not None and self._step not in self._steps:
            return
        self._rows: list[tuple[Row, torch.Tensor | None]] = []
        self._held: dict[str, torch.Tensor] = {}
        self._num_held = self._num_files = 0
        self._has_gradients = False
        self._modes = modes(self._model)
        self._random = RandomStates(devices_of([self._model]))
        gradients = (each.grad for each in self._model.parameters())
        self._modes["had_gradients"] = any(each is not None for each in gradients)
        self._tap = Tap(self._model, self._add)
        self._tap.show_state()
        self._tap.__enter__()
        self._optimizer_hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        """Records gradients as the first optimizer of the model's parameters has them.

        Where one is stepped within backward, most have none yet.
        """
        self._isolated(lambda: self._add_gradients(optimizer))

    def _add_gradients(self, optimizer: Any) -> None:
        if self._tap is None or self._has_gradients:
            return
        own = {id(each) for each in self._model.parameters()}
        groups = (group["params"] for group in optimizer.param_groups)
        if any(id(each) in own for params in groups for each in params):
            self._has_gradients = True
            self._tap.show_gradients()

    def _stop(self) -> Tap | None:
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.__exit__(None, None, None)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        return tap

    def _end(self, raised: str) -> None:
        if self._tap is None:
            return
        if not self._has_gradients:
            self._tap.show_gradients()
        tap = self._stop()
        assert tap is not None
        self._save()
        summaries = iter(fetch([n for _, n in self._rows if n is not None]))
        lines = []
        for row, numbers in self._rows:
            row.summary = next(summaries) if numbers is not None else None
            line = {"kind": "row", "step": self._step, **row.to_plain()}
            lines.append(f"{dumps(line)}\n")
        drawn = self._random.drawn()
        step = {"kind": "step", "step": self._step, **self._modes}
        step |= {"has_drawn": bool(drawn), "drawn": drawn}
        end = {"failures": tap.failures, "raised": raised, "rows": len(lines)}
        lines.append(f"{dumps({**step, **end})}\n")
        with open_appending(self._file) as file:
            write_all(file, "".join(lines).encode())
        self._rows, self._held = [], {}

    def _add(self, place: Place, tensor: torch.Tensor, same: int | None) -> None:
        order, dtype = len(self._rows), str(tensor.dtype)[6:]
        row = Row(place, order, dtype, tuple(tensor.shape), same=same)
        self._rows.append((row, None))  # also if it cannot be read
        part = part_of(tensor)
        values = values_of(tensor)
        if isinstance(part, str) or isinstance(values, str):
            row.why = part if isinstance(part, str) else str(values)
            return
        row.part, row.local = part, tuple(values.shape)
        if same is None:
            self._rows[-1] = row, summarize(values, part)
            if self._has_tensors:
                self._hold(row, values)

    def _hold(self, row: Row, values: torch.Tensor) -> None:
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
