"""Follows recommended remedies to the letter, in fresh runs of the failures."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard

from .failure import Failure, Run, is_finite, train

_NONE = ("not reproducible", "only in compiled code", "bad weights", "divergence")
_numbers = itertools.count()


@dataclass(frozen=True)
class Followed:
    """A recommended remedy, and what came of it in a fresh run.

    Attributes:
        text: The remedy.
        is_finite: Whether the run with it is finite all along.
    """

    text: str
    is_finite: bool


def can_be_remedied(failure: Failure) -> bool:
    """True if a change of the program cures it, not other hardware or weights."""
    is_alone = failure.ranks == 1 and failure.kind == ""
    return is_alone and not set(failure.causes) & set(_NONE)


def followed(failure: Failure) -> list[Followed]:
    """Follows each remedy that the guard recommends for a failure."""
    found = _explanation(failure)
    if found is None:
        return []
    return [
        Followed(str(remedy), _is_finite_with(remedy, failure))
        for remedy in found.remedies
        if remedy.is_recommended
    ]


def _explanation(failure: Failure) -> Any:
    run = failure.build(False)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            OverflowGuard(run.model, run.optimizer, explain=True) as guard,
        ):
            for _ in train(run, guard.run):
                pass
    except NonFiniteError as error:
        return error.report.explanation
    return None


def _is_finite_with(remedy: Any, failure: Failure) -> bool:
    is_one = bool(remedy.file) or not remedy.parts
    parts = [remedy] if is_one else list(remedy.parts)
    edits = [part for part in parts if part.file]
    if any(part.file != failure.file for part in edits):
        return False  # no file of the failure's own
    with _edited(edits, failure) as module:
        run = getattr(module, failure.name)(False) if edits else failure.build(False)
        for part in parts:
            if not part.file:
                _apply(part.code, run)
        return is_finite(run)


@contextlib.contextmanager
def _edited(remedies: list[Any], failure: Failure) -> Iterator[ModuleType]:
    """The family's file with the lines of remedies in place of its own."""
    path = Path(failure.file)
    lines = path.read_text().splitlines()
    for remedy in sorted(remedies, key=lambda each: -each.line):
        first = lines[remedy.line - 1]
        indent = first[: len(first) - len(first.lstrip())]
        lines[remedy.line - 1 : remedy.last_line] = [indent + remedy.code]
    package = sys.modules[failure.build.__module__].__package__
    name = f"{package}.remedied_{next(_numbers)}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"{name}.py"
        text = "\n".join(lines).replace("@failure(", "@_unregistered(")
        head, _, tail = text.partition("from __future__ import annotations\n")
        own = "def _unregistered(*_, **__):\n    return lambda build: build\n"
        copy.write_text(f"{head}from __future__ import annotations\n{own}{tail}\n")
        spec = importlib.util.spec_from_file_location(name, copy)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__package__ = package
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield module
        finally:
            del sys.modules[name]


def _apply(code: str, run: Run) -> None:
    """Does to a run what a remedy without a line of its own says."""
    if code.startswith("keep = "):
        make_batch = run.batch

        def batch(step: int) -> Any:
            whole = make_batch(step)
            return _kept(whole, code)

        run.batch = batch
    elif ".masked_fill(" in code:  # of the batch, which is one tensor
        make_all = run.batch

        def filled(step: int) -> Any:
            space = {"batch": make_all(step)}
            exec(code, space)
            return space["batch"]

        run.batch = filled
    elif "(..., " in code:
        key, value = code.split("(..., ")[1].rstrip(")").split("=")
        assert run.optimizer is not None
        for group in run.optimizer.param_groups:
            group[key] = float(value)
    elif code.startswith("torch.autocast("):
        around, call = run.around, code.replace("device_type", "'cpu'")

        @contextlib.contextmanager
        def wider() -> Iterator[None]:
            half = torch.get_autocast_dtype("cpu")
            with around():
                if torch.is_autocast_enabled("cpu"):
                    with eval(call, {"torch": torch}):
                        yield
                else:
                    yield
            torch.set_autocast_dtype("cpu", half)

        run.around = wider
    elif code.startswith("model.to("):
        half, make = torch.float16, run.batch
        run.model.to(torch.bfloat16)
        if ";" in code:  # the inputs, too
            cast = lambda t: t.bfloat16() if t.dtype == half else t  # noqa: E731
            change = functools.partial(pytree.tree_map_only, torch.Tensor, cast)
            run.batch = lambda step: change(make(step))
    else:
        space = {
            "torch": torch,
            "re": re,
            "overflow_fast": overflow_fast,
            "model": run.model,
        }
        exec(code, space)


def _kept(batch: Any, code: str) -> Any:
    """The samples of a batch that a remedy keeps."""
    named = batch if isinstance(batch, dict) else {}
    tensors = batch if isinstance(batch, (tuple, list)) else [batch]
    space: dict[str, Any] = {"torch": torch, "batch": batch, **named}
    name = code.split("isfinite(")[1].split(")")[0]
    if name.isidentifier() and name not in space:  # the first argument of the model
        space[name] = next(t for t in tensors if not bool(t.isfinite().all()))
    exec(code, space)
    keep = space["keep"]
    if isinstance(batch, dict):
        return {key: value[keep] for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(value[keep] for value in batch)
    return batch[keep]
