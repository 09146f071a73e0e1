"""A step on disk, from which another process can explain it."""

from __future__ import annotations

import collections
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..guard.files.fields import line_of
from ..guard.files.json_text import SCHEMA, dumps
from ..guard.files.reading import FileError, read_bytes
from ..guard.files.tensor_files import read_tensors
from ..guard.report.explanation import Artifact
from ..scanner.modules import parameters_of
from ..scanner.tensors import digest_of, has_memory, host_copy, is_readable
from ..scanner.text import dtype_name
from .ambient import as_plain, of_plain
from .calls import Call, ModelCall, names_of_inputs
from .named_tensors import names_of, state_by_name
from .step_schema import SavedCall, SavedStepFile, SavedValue

STEP, TENSORS = "replay.json", "replay.safetensors"


class UnreadableStepError(FileError):
    """Raised where a folder's step cannot be explained."""


def saved_step(
    models: Mapping[str, nn.Module],
    calls: Sequence[Call],
    start: Sequence[tuple[torch.Tensor, torch.Tensor]],
    most: int,
) -> list[Artifact]:
    """Makes the files of a step: its batches, random states and digests of weights.

    Incurs a CPU-GPU sync.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        start: Buffers and what was in them when the step began.
        most: How many bytes of tensors may be written.
    """
    before = {id(buffer): value for buffer, value in start}
    tensors: dict[str, torch.Tensor] = {}
    step = SavedStepFile.line(
        schema=SCHEMA,
        torch=torch.__version__,
        python=platform.python_version(),
        prefixes=list(models),
        calls=[_call(each, tensors) for each in calls],
        weights={
            name: _identity(before.get(id(tensor), tensor))
            for _, name, tensor in names_of(models)
        },
    )
    if sum(tensor.nbytes for tensor in tensors.values()) > most:
        return []
    return [Artifact(STEP, dumps(step)), Artifact(TENSORS, tensors=tensors)]


def _call(call: Call, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    def put(tensor: torch.Tensor) -> str:
        name = f"tensor{len(tensors)}"
        tensors[name] = host_copy(tensor)
        return name

    return line_of(
        SavedCall,
        is_of_model=isinstance(call, ModelCall),
        batch=_plain(call.batch, put),
        ambient=as_plain(call.ambient, put),
        returns_loss=call.returns_loss,
        is_alone=call.has_backward is False,
        held={str(place): put(held) for place, held in call.held.items()},
    )


def _plain(value: Any, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """A batch as JSON; of a tensor its name, of what cannot be saved its type.

    No code of the value's type runs when it is read: what comes back as another type
    has the name of its own one.
    """
    return line_of(SavedValue, **_fields_of(value, put))


def _fields_of(value: Any, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not is_readable(value):
            return {"lost": kind.__name__}
        is_wanted = value.requires_grad and value.is_floating_point()
        return {"tensor": put(value), "requires_grad": is_wanted}
    was = {} if kind in _PLAIN else {"was": kind.__name__}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": value, **was}  # JSON has it as a string
    if isinstance(value, str) and not _is_unicode(value):
        return {"lost": kind.__name__}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value, **was}
    if isinstance(value, Mapping):
        pairs = [(_plain(k, put), _plain(each, put)) for k, each in value.items()]
        if all(type(key) is str and _is_unicode(key) for key in value):
            named = zip(value, (each for _, each in pairs), strict=True)
            return {"by_key": dict(named), **was}
        return {"pairs": pairs, **was}
    if kind in (list, tuple):  # others would come back as another type
        name = "listed" if kind is list else "tupled"
        return {name: [_plain(each, put) for each in value]}
    fields = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        each = zip(fields, value, strict=False)
        return {"named": {k: _plain(v, put) for k, v in each}, "was": kind.__name__}
    return {"lost": kind.__name__}


_PLAIN = (type(None), bool, int, float, str, dict)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _identity(tensor: torch.Tensor) -> list[Any]:
    """Identifies a weight: dtype, shape, digest."""
    digest = int(digest_of(tensor)) if has_memory(tensor) and tensor.numel() else 0
    return [dtype_name(tensor.dtype), list(tensor.shape), digest]


class SavedStep:
    """The step of a folder.

    Args:
        folder: The folder of a bad step's evidence.

    Raises:
        UnreadableStepError: If a file is missing, broken, or of a newer schema.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._others: list[str] = []  # values of another type than they were
        self._step = self._read_step()
        try:
            self._tensors = read_tensors(folder / TENSORS)
        except FileNotFoundError:
            raise UnreadableStepError(
                f"{folder / TENSORS} is missing: it holds the step's batch"
            ) from None
        except (OSError, FileError, ImportError) as error:
            raise UnreadableStepError(
                f"{folder / TENSORS} cannot be read: {error}"
            ) from error

    def _read_step(self) -> SavedStepFile:
        path = self._folder / STEP
        try:
            from ..guard.files.schema import decode_document

            return decode_document(read_bytes(path), SavedStepFile, SCHEMA)
        except FileNotFoundError:
            raise UnreadableStepError(
                f"{path} is missing: a guard writes it with evidence=, if it kept the "
                "step's calls (explain=False and sync='lagged' keep none)"
            ) from None
        except (OSError, FileError, ImportError) as error:
            raise UnreadableStepError(f"{path} cannot be read: {error}") from error

    @property
    def notes(self) -> list[str]:
        """Lists the differences of this process from that of the step, in sentences."""
        others = list(dict.fromkeys(self._others))
        if self._step.torch == torch.__version__:
            return others
        return [
            f"The step ran with torch {self._step.torch}, this is {torch.__version__}.",
            *others,
        ]

    def models(self, model: nn.Module) -> dict[str, nn.Module]:
        """The models by their prefixes: one, or those of a model list or dict."""
        prefixes = self._step.prefixes
        if len(prefixes) == 1:
            return {prefixes[0]: model}
        children = dict(model.named_children())
        missing = [each for each in prefixes if each.rstrip(".") not in children]
        if missing:
            raise UnreadableStepError(
                f"the step has several models, and the one given has no {missing[0]!r}"
            )
        return {prefix: children[prefix.rstrip(".")] for prefix in prefixes}

    def differences(self, models: Mapping[str, nn.Module]) -> list[str]:
        """The names of weights and buffers that are not those of the step."""
        own = state_by_name(models)
        wanted = {name: list(each) for name, each in self._step.weights.items()}
        missing = [name for name in wanted if name not in own]
        changed = [n for n in wanted if n in own and _identity(own[n]) != wanted[n]]
        return missing + changed

    def calls(self, model: nn.Module, loss: Callable[..., Any] | None) -> list[Call]:
        """The calls, to be made again.

        Args:
            model: The model.
            loss: Takes the model and the batch, and returns the loss; None for the loss
                that the model returns.

        Raises:
            UnreadableStepError: If an argument was not saved, or a loss is needed.
        """
        return [self._made(each, model, loss) for each in self._step.calls]

    def _made(
        self, saved: SavedCall, model: nn.Module, loss: Callable[..., Any] | None
    ) -> Call:
        if loss is None and not saved.is_of_model:
            raise UnreadableStepError(
                "the step's loss was computed by a function of its own: give it with "
                "--loss FILE.py:FUNCTION; it takes the model and a dict of "
                f"{', '.join(saved.batch.by_key or {})}"
            )
        device = next((p.device for p in parameters_of(model)), torch.device("cpu"))
        try:
            batch = self._value(saved.batch, device)
            ambient = of_plain(saved.ambient, self._tensor)
            held = {
                int(place): self._tensor(name).to(device)
                for place, name in saved.held.items()
            }
        except UnreadableStepError:
            raise
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            path = self._folder / STEP
            raise UnreadableStepError(f"{path} is damaged: {error}") from error
        if saved.is_of_model:
            _check_arguments(batch, self._folder / STEP)
        if saved.is_of_model and loss is None:
            call: Call = ModelCall.of(model, batch, ambient)
        else:
            own = _one_argument(model, batch) if saved.is_of_model else batch
            call = Call(_with_model(loss, model), own, ambient)
        call.returns_loss = loss is not None or saved.returns_loss
        call.has_backward = False if saved.is_alone else call.has_backward
        if loss is None:
            call.held = held
        return call

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UnreadableStepError(f"{self._folder / TENSORS} has no {name!r}")
        return self._tensors[name]

    def _value(self, found: Any, device: torch.device, at: str = "") -> Any:
        from ..guard.files.schema import convert

        is_read = isinstance(found, SavedValue)  # the outermost one, with its call
        saved = found if is_read else convert(found, SavedValue)
        if isinstance(saved.lost, str):
            raise UnreadableStepError(
                f"an argument of the step could not be saved: batch{at} was a "
                f"{saved.lost}"
            )
        value = self._made_of(saved, device, at)
        if saved.was:
            kind = (
                "named tuple" if isinstance(saved.named, dict) else type(value).__name__
            )
            self._others.append(
                f"batch{at} was a {saved.was} in the step; it is a plain {kind} here."
            )
        return value

    def _made_of(self, saved: SavedValue, device: torch.device, at: str) -> Any:
        if isinstance(saved.tensor, str):
            tensor = self._tensor(saved.tensor).to(device)
            return tensor.requires_grad_() if saved.requires_grad else tensor
        if isinstance(saved.by_key, dict):
            items = saved.by_key.items()
            return {k: self._value(e, device, f"{at}[{k!r}]") for k, e in items}
        if isinstance(saved.pairs, list):
            keys = [self._value(key, device, at) for key, _ in saved.pairs]
            values = zip(keys, saved.pairs, strict=True)
            return {k: self._value(e, device, f"{at}[{k!r}]") for k, (_, e) in values}
        if isinstance(saved.named, dict):
            items = saved.named.items()
            made = collections.namedtuple(saved.was, list(saved.named))  # type: ignore[misc]
            return made(*(self._value(e, device, f"{at}.{k}") for k, e in items))
        for several, kind in ((saved.listed, list), (saved.tupled, tuple)):
            if isinstance(several, list):
                return kind(
                    self._value(each, device, f"{at}[{i}]")
                    for i, each in enumerate(several)
                )
        number = saved.number
        return float(number) if isinstance(number, (float, str)) else saved.value


def _check_arguments(batch: Any, path: Path) -> None:
    """Raises UnreadableStepError if a batch is not the arguments of a model's call."""
    is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
    if not (
        is_pair and isinstance(batch[0], (list, tuple)) and isinstance(batch[1], dict)
    ):
        raise UnreadableStepError(f"{path} is damaged: no arguments of a model's call")


def _with_model(
    loss: Callable[..., Any] | None, model: nn.Module
) -> Callable[[Any], Any]:
    assert loss is not None
    return lambda batch: loss(model, batch)


def _one_argument(model: nn.Module, batch: Any) -> Any:
    """The arguments of a model's call: the one there is, or all by their names."""
    args, kwargs = batch
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args:
        return kwargs
    names = names_of_inputs(model, len(args))
    return {**dict(zip(names, args, strict=True)), **kwargs}
