"""Recordings: writes a model's steps to a folder, and reads those of all ranks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import operator
import os
import platform
import socket
import sys
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...guard.files.fields import line_of
from ...guard.files.json_text import dumps
from ...guard.files.reading import (
    FileError,
    lines_of,
    open_regular,
    why_unreadable,
)
from ...guard.files.schema import decode, head_of, plain
from ...guard.files.tensor_files import open_tensors
from ...guard.files.writing import open_appending, write_all, write_new
from ...guard.process import own_rank, settings_of_torch, world_size
from ...guard.undo.random import RandomStates
from ...scanner.modules import named_modules, stepped_by
from ...scanner.tensors import devices_of
from ...scanner.text import counted, dtype_name, with_progress
from ...torch_internals.compiler import (
    uncompiled,
)
from ...torch_internals.module_internals import is_dropout
from .recording_schema import HeadLine, RecordedStepLine, RowLine, decoder
from .summary import (
    Shard,
    Summary,
    fetch,
    magnitudes,
    part_of,
    summarize,
    sums_of,
    values_of,
)
from .tensor_hooks import BACKWARD, StepPath, TensorHooks, is_compiled, scalars_in

# Rows of a recording: what was known of one tensor at one place.


SCHEMA = 1  # of recordings


# In the order of a line's fields.
_PLACE = ("phase", "module", "class_name", "call", "role", "path", "caller", "is_leaf")


@dataclass
class RecordedTensor:
    """A tensor at its place in a step.

    Attributes:
        place: Where it was.
        order: Its number in the step, from 0.
        dtype: Its dtype, such as "bfloat16".
        shape: Its shape; of a part that ranks share, that of the whole.
        summary: Its numbers; None if it has those of `same`, or was not read.
        same: The order of an earlier row with the same tensor, or None.
        part: Its place in a tensor that ranks share, or None.
        why: Why there are no numbers, or "".
        file: The file that has the tensor, or "".
        local: The shape of this rank's part.
        requires_grad: Whether it required gradients; None for gradients.
    """

    place: StepPath
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Summary | None = None
    same: int | None = None
    part: Shard | None = None
    why: str = ""
    file: str = ""
    local: tuple[int, ...] = ()
    requires_grad: bool | None = None

    @property
    def local_numel(self) -> int:
        """The number of elements of this rank's part."""
        return math.prod(self.local)

    def to_plain(self) -> dict[str, Any]:
        """The row as JSON, without what is empty."""
        plain: dict[str, Any] = {"order": self.order}
        plain |= {name: getattr(self.place, name) for name in _PLACE}
        plain |= {"dtype": self.dtype, "shape": list(self.shape)}
        plain["local"] = None if self.part is None else list(self.local)
        plain["requires_grad"] = self.requires_grad
        plain |= {"same": self.same, "why": self.why, "file": self.file}
        plain["part"] = None if self.part is None else self.part.to_plain()
        if self.summary is not None:
            plain |= self.summary.to_plain()
        empty = (None, "")
        return {k: v for k, v in plain.items() if k == "module" or v not in empty}

    @classmethod
    def from_line(cls, line: RowLine, summary: Summary | None) -> RecordedTensor:
        """Makes one of a line of a recording, and of the numbers in it."""
        return cls(
            _place_of(*_place_fields(line)),
            line.order,
            line.dtype,
            line.shape,
            summary,
            line.same,
            None if line.part is None else Shard(*line.part),
            line.why,
            line.file,
            line.shape if line.local is None else line.local,
            line.requires_grad,
        )


# Each step has the same places: they are made once. Bounded, as any file may be read.
_place_of = functools.lru_cache(maxsize=2**17)(StepPath)
_place_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(StepPath)))


class RecordingError(FileError):
    """A folder holds no recording that can be read."""


@dataclass
class Source:
    """Where the values of a row are.

    Attributes:
        rank: The rank that recorded it.
        row: The row, with the numbers of the tensor that it shares.
        folder: The folder of its file.
        unread: Gets the files whose tensors cannot be read, and why.
    """

    rank: int
    row: RecordedTensor
    folder: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)

    def load(self) -> torch.Tensor | None:
        """Reads the tensor; None if its fingerprint is all there is."""
        if self.folder is None or not self.row.file:
            return None
        path = self.folder / self.row.file
        try:
            tensor = self._read(path)
        except (OSError, FileError, ImportError) as error:
            self.unread.setdefault(str(path), why_unreadable(error))
            return None
        if tensor.shape != self.row.local or dtype_name(tensor.dtype) != self.row.dtype:
            self.unread.setdefault(str(path), "its tensors are not those of the rows")
            return None
        return tensor

    def _read(self, path: Path) -> torch.Tensor:
        name = str(self.row.order if self.row.same is None else self.row.same)
        with open_tensors(path) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@dataclass
class RankStep:
    """A step of one rank: its rows in the order of execution, and its settings.

    Attributes:
        rank: The rank.
        modes: The settings.
        sources: The rows.
        data: The bytes of the rows in their file; empty if they are of none.
    """

    rank: int
    modes: dict[str, Any]
    sources: list[Source]
    data: bytes = b""

    def read(self, twins: Sequence[RankStep] = ()) -> RankStep:
        """The step itself: of a dump, all steps are read at once."""
        return self


Span = tuple[int, int]  # where bytes of a file begin and end


@dataclass
class StoredStep:
    """A step of one rank, of which only the place in its file is kept.

    Attributes:
        rank: The rank.
        file: Its file.
        spans: Where the step's rows are.
        end: Where its last line is.
        settings: What the lines of all steps of the file say of modules.
        number: How many of these lines there are up to its own.
        run: The run.
        num_bad: How many of its rows were damaged, once it has been read.
    """

    rank: int
    file: Path
    spans: list[Span]
    end: Span
    settings: SettingsHistory
    number: int
    run: RecordedRun
    num_bad: int = 0

    def read(self, twins: Sequence[RankStep] = ()) -> RankStep:
        """Decodes the step.

        Args:
            twins: The same step of another run: rows of equal bytes are not decoded
                again.

        Raises:
            RecordingError: If the file is not what it was when the step was found.
        """
        line, data = self._line(), self._bytes(self.spans)
        modes = {**plain(line), "settings": self.settings.up_to(self.number)}
        twin = next((each for each in twins if each.data == data != b""), None)
        if twin is None:
            rows, self.num_bad = _rows_of(data, line.step)
            _share_summaries(rows)
        else:
            rows = [source.row for source in twin.sources]
        folder, unread = self.file.parent, self.run.unread
        sources = [Source(self.rank, row, folder, unread) for row in rows]
        return RankStep(self.rank, modes, sources, data)

    def _line(self) -> RecordedStepLine:
        data = self._bytes([self.end])
        try:
            return decode(data, RecordedStepLine)
        except FileError as error:
            why = f"{self.file} was changed while it was read"
            raise RecordingError(why) from error

    def _bytes(self, spans: Sequence[Span]) -> bytes:
        try:
            with open_regular(self.file) as file:
                return b"".join([_read_at(file, *span) for span in spans])
        except OSError as error:
            why = f"{self.file} cannot be read: {error.strerror}"
            raise RecordingError(why) from error


def _read_at(file: BufferedReader, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _rows_of(data: bytes, step: int) -> tuple[list[RecordedTensor], int]:
    """Decodes the rows of a step, and counts the lines that are none."""
    texts = data.split(b"\n")
    if not texts[-1]:
        texts.pop()
    decoded = [_decoded(text) for text in texts]
    lines = [x for x in decoded if isinstance(x, RowLine) and x.step == step]
    prints = sums_of([x.fingerprint for x in lines if x.fingerprint is not None])
    rows = []
    for line in lines:
        has_numbers = line.fingerprint is not None
        summary = _summary_of(line, next(prints)) if has_numbers else None
        rows.append(RecordedTensor.from_line(line, summary))
    return rows, len(texts) - len(rows)


def _summary_of(line: RowLine, sums: torch.Tensor) -> Summary:
    """The numbers of a line that has a fingerprint, which `sums_of()` has read."""
    low, high, squares = map(float, (line.low, line.high, line.squares))
    counts = line.num_nan, line.num_inf
    return Summary(low, high, squares, *counts, sums, line.magnitudes)


_DAMAGED = object()


_lines = functools.cache(decoder)


def _decoded(text: bytes | None) -> Any:
    """A line of a recording: None if it is passed over, or `_DAMAGED`."""
    try:
        return _DAMAGED if text is None else _lines().decode(text)
    except FileError:
        return _DAMAGED


class SettingsHistory:
    """The plain values of a rank's modules: each step's line has those that changed."""

    def __init__(self) -> None:
        self._changes: list[dict[str, dict[str, str]]] = []
        self._merged: dict[str, dict[str, str]] = {}
        self._number = 0

    def add(self, changes: dict[str, dict[str, str]]) -> int:
        """Adds those of a step's line, and returns how many lines there are."""
        self._changes.append(changes)
        return len(self._changes)

    def up_to(self, number: int) -> dict[str, dict[str, str]]:
        """Merges those of the first so many lines; asked in order, each once."""
        if number < self._number:
            self._merged, self._number = {}, 0
        changes = [each for each in self._changes[self._number : number] if each]
        if changes:
            self._merged = self._merged.copy()
        for each in changes:
            self._merged |= each
        self._number = number
        return self._merged


@dataclass
class RecordedRun:
    """The recordings of a run.

    Attributes:
        name: Its folder.
        heads: The first line of each rank's file.
        steps: The ranks' parts of each step, by its number.
        damaged: Sentences on what could not be read.
        unread: The files whose tensors could not be read so far, and why.
        bad_lines: How many lines of each file are damaged, beside rows of its steps;
            of steps that are not whole there is 0.
        has_forward: Whether a forward was in the steps that were read so far.
    """

    name: str
    heads: list[dict[str, Any]]
    steps: dict[int, list[RankStep | StoredStep]]
    damaged: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    bad_lines: dict[Path, int] = field(default_factory=dict)
    has_forward: bool = False

    @property
    def num_ranks(self) -> int:
        """The number of ranks that have recorded."""
        return len(self.heads)

    def damage(self) -> Iterator[str]:
        """Sentences on what could not be read so far: rows count once decoded."""
        found = dict(self.bad_lines)
        for step in (each for ranks in self.steps.values() for each in ranks):
            if isinstance(step, StoredStep) and step.num_bad:
                found[step.file] = found.get(step.file, 0) + step.num_bad
        for file, num_bad in found.items():
            what = counted(num_bad, "damaged line") if num_bad else _NOT_WHOLE
            verb = "are" if num_bad > 1 else "is"
            yield f"{file} has {what}, which {verb} left out."
        yield from self.damaged


_NOT_WHOLE = "a step that is not whole"


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Finds the steps of a recording. A rank's file that is damaged is left out.

    A step is decoded when it is compared, so that memory is bounded by one step.

    Args:
        folder: The folder.

    Raises:
        RecordingError: If there is no recording that can be read.
    """
    path = Path(folder)
    files = sorted(path.glob("rank-*.jsonl"), key=_rank_of)
    if not files:
        raise RecordingError(
            f"{path} holds no recording (no rank-0.jsonl) and no dump of msprobe"
        )
    run, left_out = RecordedRun(str(path), [], {}), list[str]()
    for file in files:
        try:
            _find_steps(run, file)
        except OSError as error:
            left_out.append(f"{file} cannot be read: {error.strerror}")
        except RecordingError as error:
            left_out.append(str(error))
    if not run.heads:
        raise RecordingError(left_out[0])
    run.damaged += [f"{why}. That rank is left out." for why in left_out]
    expected = max(int(head["world_size"]) for head in run.heads)
    if expected > run.num_ranks:
        run.damaged.append(
            f"{run.name} has recordings of {run.num_ranks} of {expected} ranks."
        )
    return run


def _rank_of(path: Path) -> tuple[int, str]:
    number = path.stem.partition("-")[2]
    is_number = number.isdecimal() and len(number) < 10
    return (int(number) if is_number else 1 << 30), path.name


_MOST = 2**38  # bytes of a rank's file: two minutes of reading


def _find_steps(run: RecordedRun, file: Path) -> None:
    """Adds a rank to a run: where its steps are in its file.

    Raises:
        OSError: If its file cannot be read.
        RecordingError: If it is no recording; nothing is added then.
    """
    with open_regular(file) as opened:
        lines = lines_of(opened, _MOST)
        first = next(lines, b"")
        if first == b"":
            raise RecordingError(f"{file} is empty")
        head = _head_of(first, file)
        if any(head.rank == other["rank"] for other in run.heads):
            raise RecordingError(f"{file} is of rank {head.rank}, as is another file")
        found = StepIndex(run, file, head.rank)
        steps = list(with_progress(found.steps(opened, lines), "steps found", None))
    run.heads.append(plain(head))
    for number, step in steps:
        run.steps.setdefault(number, []).append(step)
    if found.num_bad or found.num_open:
        run.bad_lines[file] = found.num_bad


class StepIndex:
    """Finds the steps of a rank's file; a row is decoded when its step is read.

    Args:
        run: The run.
        file: The file.
        rank: The rank.

    Attributes:
        num_bad: How many lines are of no step.
        num_open: How many steps have rows, but no end.
    """

    def __init__(self, run: RecordedRun, file: Path, rank: int) -> None:
        self._run, self._file, self._rank = run, file, rank
        self._spans: dict[int, list[Span]] = {}  # of rows whose step has no end yet
        self._settings = SettingsHistory()
        self.num_bad = 0

    @property
    def num_open(self) -> int:
        """The number of steps that have rows, but no end so far."""
        return len(self._spans)

    def steps(
        self, file: BufferedReader, lines: Iterator[bytes | None]
    ) -> Iterator[tuple[int, StoredStep]]:
        """Yields the steps with their numbers, as they end."""
        begin, start, number = file.tell(), b"", 0
        for text in lines:
            end = file.tell() if text is None else begin + len(text)
            span, begin = (begin, end), end
            if start and text is not None and text.startswith(start):
                self._add_row(number, span)  # as the row before; checked when decoded
                continue
            line = _decoded(text)
            if isinstance(line, RowLine):
                number = line.step
                start = f'{{"kind": "row", "step": {number}, '.encode()
                self._add_row(number, span)
            elif isinstance(line, RecordedStepLine):
                yield line.step, self._ended(line, span)
            elif line is not None:
                self.num_bad += 1

    def _add_row(self, number: int, span: Span) -> None:
        spans = self._spans.setdefault(number, [])
        if spans and spans[-1][1] == span[0]:
            spans[-1] = spans[-1][0], span[1]
        else:
            spans.append(span)

    def _ended(self, line: RecordedStepLine, span: Span) -> StoredStep:
        number = self._settings.add(plain(line).get("settings", {}))
        spans = self._spans.pop(line.step, [])
        return StoredStep(
            self._rank, self._file, spans, span, self._settings, number, self._run
        )


def _head_of(text: bytes | None, file: Path) -> HeadLine:
    """The first line of a rank's file.

    Raises:
        RecordingError: If it is not that of a recording that can be read.
    """
    head = head_of(text)
    if text is None or head.kind != "recording":
        raise RecordingError(f"{file} is not a recording")
    try:
        head.check_schema(SCHEMA)
        return decode(text, HeadLine)
    except FileError as error:
        raise RecordingError(f"{file} cannot be read: {error}") from error


def _share_summaries(rows: Sequence[RecordedTensor]) -> None:
    """Gives rows of a tensor that an earlier row has the numbers of that row."""
    by_order = {row.order: row for row in rows}
    # From the first on: what a row shares has no further one to look for then.
    for row in sorted(rows, key=lambda row: row.order):
        shared = by_order.get(row.same) if row.same is not None else None
        while shared is not None and shared.same is not None:
            shared = by_order.get(shared.same)
        if shared is not None:
            row.summary, row.file, row.same = shared.summary, shared.file, shared.order


# Versions, random states and modes, which may make two runs differ.


_LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "timm", "numpy")


def versions() -> dict[str, str]:
    """The versions of what computes, of loaded libraries alone."""
    from ... import __version__

    found = {
        "overflow_fast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    backends: Any = torch.backends
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(backends.cudnn.version())
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def process() -> dict[str, Any]:
    """The host, the process and its rank."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": own_rank(),
        "world_size": world_size(),
    }


_ON_GPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
_PRODUCTS = ("cuda", "mkldnn")
# Those of `torch.set_float32_matmul_precision()`.
_WORDS = (("bf16", "medium"), ("tf32", "high"))


def modes(model: nn.Module) -> dict[str, Any]:
    """Settings, dtypes and random states at the beginning of a step, as JSON."""
    devices = devices_of([model])
    types = ["cpu", *dict.fromkeys(device.type for device in devices)]
    autocast = [t for t in types if torch.is_autocast_enabled(t)]
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = collections.Counter(dtype_name(tensor.dtype) for tensor in tensors)
    switches = settings_of_torch()
    on_gpu = {switches[f"{each}.fp32_precision"] for each in _ON_GPU}
    products = {switches[f"{each}.matmul.fp32_precision"] for each in _PRODUCTS}
    return {
        "devices": [torch.device("cpu").type, *map(str, devices)],
        "dtypes": dict(dtypes.most_common()),
        "autocast": {t: dtype_name(torch.get_autocast_dtype(t)) for t in autocast},
        "matmul_precision": next((w for v, w in _WORDS if v in products), "highest"),
        "tf32": "cuda" in types and "tf32" in on_gpu,
        "deterministic": switches["deterministic_algorithms"],
        "threads": torch.get_num_threads(),
        "training": model.training,
        "compiled": [name for name, m in named_modules(model) if _hides(m)],
        "dropout": [name for name, module in named_modules(model) if _drops(module)],
        "random": RandomStates(devices, loads_numpys=False).digests(),
        "settings": {name: settings_of(m) for name, m in named_modules(model)},
    }


def settings_of(module: nn.Module) -> dict[str, str]:
    """The plain values among a module's attributes, such as eps, as text."""
    return scalars_in(vars(uncompiled(module)))


OPTIMIZER = "the optimizer"  # begins the names of optimizers among settings


def settings_of_optimizer(
    optimizer: Any, number: int, own: Set[int]
) -> dict[str, dict[str, str]]:
    """The plain values of an optimizer's groups, by a name for each, such as lr.

    Args:
        optimizer: The optimizer.
        number: How many others of the model have stepped before it.
        own: The ids of the model's parameters that require gradients; groups without
            any are left out.
    """
    found = dict[str, dict[str, str]]()
    held = set(map(id, stepped_by(optimizer)))
    values: dict[str, Any] = {"class": type(optimizer).__name__}
    values["parameters left out"] = len(own - held)
    for i, group in enumerate(optimizer.param_groups):
        if own.isdisjoint(id(each) for each in group["params"]):
            continue
        name = OPTIMIZER + (f" {number + 1}" if number else "")
        name += f", group {i + 1}" if i else ""
        values |= {k: _plain(v) for k, v in group.items() if not k.startswith("param")}
        found[name] = scalars_in(values)
    return found


def _plain(value: Any) -> Any:
    """A setting; of one in a tensor on the CPU its number."""
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.item() if is_tensor and value.numel() == 1 else value


def has_unequal_states(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """True if torch's generators of the models' devices were in other states."""
    own, other = mine.get("random", {}), its.get("random", {})
    names = [n for n in own if n in other and n not in ("cpu", "python", "numpy")]
    return any(own[n] != other[n] for n in names or ["cpu"] if n in own and n in other)


def _hides(module: nn.Module) -> bool:
    """True if modules within are compiled, so that nothing of them is recorded."""
    return is_compiled(module) and any(True for _ in uncompiled(module).children())


def _drops(module: nn.Module) -> bool:
    """True if a module sets random values to 0 now.

    Attention that is one function has its probability in an attribute of its module.
    """
    if not module.training:
        return False
    if is_dropout(module):
        return bool(getattr(module, "p", 0))
    found = (vars(module).get(name) for name in ("dropout", "attention_dropout"))
    return any(isinstance(each, float) and each > 0 for each in found)


# Writes the tensors of a model's steps, or their fingerprints, to a folder.


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
        line = line_of(
            HeadLine,
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
        self._rows: list[tuple[RecordedTensor, torch.Tensor | None]] = []
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
            row.summary = next(summaries) if numbers is not None else None
            line = line_of(RowLine, step=self._step, **row.to_plain())
            lines.append(f"{dumps(line)}\n")
        drawn = self._random.drawn()
        settings = {**self._modes.pop("settings"), **hooks.arguments}
        changed = {k: v for k, v in settings.items() if self._settings.get(k) != v}
        self._settings |= changed
        end = line_of(
            RecordedStepLine,
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
        order, dtype = len(self._rows), dtype_name(tensor.dtype)
        row = RecordedTensor(place, order, dtype, tuple(tensor.shape), same=same)
        row.requires_grad = None if place.phase == BACKWARD else tensor.requires_grad
        self._rows.append((row, None))  # also if it cannot be read
        part = part_of(tensor)
        values = values_of(tensor)
        if isinstance(part, str) or isinstance(values, str):
            row.why = part if isinstance(part, str) else str(values)
            return
        row.part, row.local = part, tuple(values.shape)
        if same is None:
            numbers = summarize(values, part)
            if place.role in ("accumulated_gradient", "parameter_gradient"):
                numbers = torch.cat([numbers, magnitudes(values)])
            self._rows[-1] = row, numbers
            if self._has_tensors:
                self._hold(row, values)

    def _hold(self, row: RecordedTensor, values: torch.Tensor) -> None:
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
