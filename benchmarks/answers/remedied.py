"""Follows recommended remedies to the letter, in fresh runs of the failures."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.causes import (
    BAD_WEIGHTS,
    DIVERGENCE,
    NOT_REPRODUCIBLE,
    ONLY_COMPILED,
)

from .failure import Failure, Run, is_finite, train
from .verify import in_float64

_NONE = {NOT_REPRODUCIBLE.name, ONLY_COMPILED.name, BAD_WEIGHTS.name, DIVERGENCE.name}
_numbers = itertools.count()


@dataclass(frozen=True)
class Followed:
    """A recommended remedy, and what came of it in a fresh run.

    Attributes:
        text: The remedy.
        is_recommended: Whether it is; else it is named as the nearest.
        is_finite: Whether the run with it is finite all along; None where it is told in
            words, which no program can follow.
        lasts: Whether it is for 50 further steps; None where the run that is cured by
            hand is not, either.
        healthy: By how much it changes the loss of the batch without the sample that
            fails, or of another batch that is finite, relative to it; None where there
            is none.
        announced: By how much it says that it changes the other samples' loss, or
            their gradients.
        is_true: Whether the loss of the failing step is that of the run in float64, or
            said to be off; None where that run is not finite.
        is_exact: Whether that loss is the one in float64, and gradients are, too.
        state_lasts: Whether the optimizer's state is finite at the end of the run.
        like_cured: By how much the loss of the failing step differs from that of the
            run that is cured by hand, relative to it; None where there is none.
    """

    text: str
    is_finite: bool | None
    is_recommended: bool = True
    lasts: bool | None = None
    healthy: float | None = None
    announced: float | None = None
    like_cured: float | None = None
    is_true: bool | None = None
    is_exact: bool = False
    state_lasts: bool | None = None

    @property
    def keeps_its_word(self) -> bool:
        """Whether it raises the loss of a healthy batch by no more than it says."""
        said = _AS_IT_IS if self.announced is None else max(_AS_IT_IS, self.announced)
        return self.healthy is None or self.healthy <= said


def can_be_remedied(failure: Failure) -> bool:
    """True if a change of the program cures it, not other hardware or weights."""
    is_alone = failure.ranks == 1 and failure.kind == ""
    return is_alone and not set(failure.causes) & _NONE


def followed(failure: Failure) -> list[Followed]:
    """Follows each remedy that the guard recommends for a failure, or the nearest."""
    found = _explanation(failure)
    if found is None:
        return []
    # Where one sample is left out there is nothing to write into a program.
    left = [each for each in found.remedies if each.code or not each.is_of_data]
    good = [each for each in left if each.is_recommended]
    shown = [*filter(None, [found.nearest]), *good]
    return [
        replace(_followed(each, failure), is_recommended=each.is_recommended)
        for each in shown
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


def _followed(remedy: Any, failure: Failure) -> Followed:
    if not all(part.code for part in _parts(remedy)):
        return Followed(str(remedy), None)
    if any(part.file not in ("", failure.file) for part in _parts(remedy)):
        return Followed(str(remedy), False)  # no file of the failure's own
    try:
        return _run_with(remedy, failure)
    except Exception as error:  # the text is no program that runs
        return Followed(f"{remedy} ({error})", False)


def _run_with(remedy: Any, failure: Failure) -> Followed:
    with _remedied(remedy, failure) as build:
        is_all = is_finite(build())
        cured = _longer(failure.build(True))
        lasts = is_finite(_longer(build())) if is_finite(cured) else None
        healthy = _healthy_batch(failure)
        plain = _first_loss(failure.build(False), healthy)
        changed = _first_loss(build(), healthy)
        own, wanted = _last_loss(build()), _last_loss(failure.build(True))
        true = _last_loss(in_float64(failure))
        last = build()
        is_finite(last)
    more = None if plain is None else max(0.0, _difference(changed, plain) or 0.0)
    unlike = None if own is None or wanted is None else _difference(own, wanted)
    return Followed(
        str(remedy),
        is_all,
        lasts=lasts,
        healthy=more,
        announced=_announced(remedy),
        like_cured=None if unlike is None else abs(unlike),
        is_true=_is_true(own, true, remedy),
        is_exact=_is_exact(own, true, remedy),
        state_lasts=_has_finite_state(last),
    )


def _is_true(own: float | None, true: float | None, remedy: Any) -> bool | None:
    if remedy.is_of_data or ".data.mul_(" in remedy.code:
        return None  # another batch, or other weights, have another loss
    error = _difference(own, true)
    is_beyond = remedy.true_loss is not None and remedy.error is None
    is_said = bool(remedy.misses) or is_beyond
    return None if error is None else abs(error) <= _NEAR or is_said


def _is_exact(own: float | None, true: float | None, remedy: Any) -> bool:
    error = _difference(own, true)
    is_near = error is not None and abs(error) <= _NEAR
    return is_near and remedy.is_right and not remedy.is_of_data


def _has_finite_state(run: Run) -> bool:
    state = [] if run.optimizer is None else list(run.optimizer.state.values())
    tensors = [t for t in pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]
    return all(bool(each.isfinite().all()) for each in tensors)


_FURTHER = 50
_AS_IT_IS = 1e-3  # of a loss: what a report calls the same
_LEAST = 1e-6
_NEAR = 1e-2  # of the true loss: what rounding of half precision comes to


def _parts(remedy: Any) -> list[Any]:
    is_one = bool(remedy.file) or not remedy.parts
    return [remedy] if is_one else list(remedy.parts)


@contextlib.contextmanager
def _remedied(remedy: Any, failure: Failure) -> Iterator[Callable[[], Run]]:
    """Yields what builds the failure's run with a remedy."""
    parts = _parts(remedy)
    edits = [part for part in parts if part.file]
    with _edited(edits, failure) as module:

        def build() -> Run:
            torch.manual_seed(0)
            plain = failure.build if not edits else getattr(module, failure.name)
            run: Run = plain(False)
            for part in parts:
                if not part.file:
                    _apply(part.code, run)
            return run

        yield build


def _longer(run: Run) -> Run:
    run.steps += _FURTHER
    return run


def _difference(value: float | None, of: float | None) -> float | None:
    if value is None or of is None:
        return None
    return (value - of) / max(abs(of), _LEAST)


def _announced(remedy: Any) -> float | None:
    """By how much a remedy says that it changes the other samples."""
    if remedy.elsewhere is None:
        return None
    moved = cast("float | None", remedy.elsewhere.moved)
    if remedy.elsewhere.losses is None:
        return moved
    before, after = remedy.elsewhere.losses
    return max(abs(_difference(after, before) or 0.0), moved or 0.0)


def _healthy_batch(failure: Failure) -> Any:
    """A batch whose loss is finite as the program is: without the sample that fails."""
    run = failure.build(False)
    for step in range(run.steps + _FURTHER):
        batch = run.batch(step)
        for each in (batch, _without(batch, failure.sample)):
            if each is not None and _first_loss(failure.build(False), each) is not None:
                return each
    return None


def _without(batch: Any, sample: int | None) -> Any:
    """A batch without a sample; None if it is not known which, or how."""
    if sample is None:
        return None
    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
    sizes = {len(t) if t.dim() else 0 for t in tensors}
    if len(sizes) != 1 or sizes == {0}:
        return None
    kept = [i for i in range(sizes.pop()) if i != sample]
    return pytree.tree_map_only(torch.Tensor, lambda t: t[kept], batch)


def _first_loss(run: Run, batch: Any) -> float | None:
    """The loss of a batch with the weights that a run begins with, or None."""
    if batch is None:
        return None
    run.batch, run.steps = lambda step: batch, 1
    return _last_loss(run)


def _last_loss(run: Run) -> float | None:
    """The loss of a run's last step; None unless it and its gradients are finite."""
    loss = None
    try:
        for each in train(run):
            loss = float(each)
    except Exception:  # of a batch that the program does not take
        return None
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    is_good = all(bool(each.isfinite().all()) for each in gradients)
    return loss if loss is not None and math.isfinite(loss) and is_good else None


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
    elif ".masked_fill" in code or ".clamp" in code:  # of the batch
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
        if "\n" in code:  # the inputs, too
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
    space: dict[str, Any] = {"torch": torch, "batch": batch}
    found = re.search(r"isfinite\((\w+)|= (\w+)\.abs\(", code)
    name = None if found is None else found[1] or found[2]
    if name in (None, "batch"):  # all of it is in the code
        exec(code, space)
        return space["batch"]
    named = batch if isinstance(batch, dict) else {}
    tensors = batch if isinstance(batch, (tuple, list)) else [batch]
    space |= named
    if name not in space:  # the first argument of the model
        bad = [t for t in tensors if not bool(t.isfinite().all())]
        space[name] = max(bad or tensors, key=lambda each: float(each.abs().max()))
    exec(code, space)
    keep = space["keep"]
    if isinstance(batch, dict):
        return {key: value[keep] for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(value[keep] for value in batch)
    return batch[keep]
