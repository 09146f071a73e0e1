"""Checks weights, buffers and the optimizer's state before they are saved."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..base.modules import named_modules
from ..base.text import some
from ..base.types import TensorPath
from ..detector.selection import Named, Selection, full_name
from ..scanner.ops import Scanned, scan_values
from .files.reading import FileError
from .kinds import Path
from .models import Models, named_models
from .optimizers.wrapped import innermost, optimizers_of
from .report.report import NonFiniteError, Report
from .saved_state import check_saved, entry_of, is_state_dict, kinds_of
from .verdict.roles import kind_of
from .verdict.rules import Allow, Rules, state_path
from .verdict.state_origin import never_finite
from .verdict.verdict import Verdict
from .watching.judged_tensors import state_of
from .watching.named_tensors import NamedTensors

_log = logging.getLogger("overflow_fast")
_warned: set[str] = set()


def assert_finite_state(
    model: Models | Mapping[str, Any] | Path,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    allow: Allow | None = None,
) -> None:
    """Raises if a checkpoint of model and optimizer holds, or would hold, nan or inf.

    Checks parameters, buffers and the optimizer's state; -inf alone in a buffer is no
    alarm (masks), but it is one in a state dict, which does not tell buffers from
    weights. Of sharded tensors, checks this rank's part. Logs which tensors could not
    be checked, once for each reason. Reads their memory once, and incurs one CPU-GPU
    sync for each device.

    Args:
        model: The model, a list or dict of models, a state dict, or the path of a
            checkpoint: a file of safetensors or `torch.save`, or a folder of them or of
            `torch.distributed.checkpoint`. Nothing in a file is executed, and its
            tensors are read one after another.
        optimizer: The optimizer, or a list of them, or None; None for a state dict or a
            path.
        allow: Intended non-finite values; see `OverflowGuard`.

    Raises:
        NonFiniteError: If a value is not finite; the report names it.
        TypeError, ValueError: If an argument cannot be used, or not all of a saved
            state could be checked.
        OSError: If there is no such path.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> assert_finite_state(model)  # then: torch.save(model.state_dict(), path)
    """
    rules = Rules(allow or {})
    if isinstance(model, (str, os.PathLike)) or is_state_dict(model):
        if optimizer is not None:
            raise TypeError(
                "optimizer must be None for a state dict or a path, got "
                f"{type(optimizer).__name__}: check its state dict in a call of its own"
            )
        report = _saved_report(cast("Mapping[str, Any] | Path", model), rules)
    else:
        models = named_models(cast(Models, model))
        report = state_report(models, optimizers_of(optimizer), rules)
    if report is not None:
        raise NonFiniteError(report)


def _saved_report(source: Mapping[str, Any] | Path, rules: Rules) -> Report | None:
    found = check_saved(source, rules)
    report = found.report()
    if report is None and found.not_checked:
        raise FileError(f"{found.gist}: {some(found.not_checked, 3)}")
    return report


def state_report(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    rules: Rules,
    step: int = 0,
) -> Report | None:
    """Returns the report of what is not finite, or None. Incurs the sync.

    Args:
        models: The models, by what their modules' names begin with.
        optimizers: The optimizers whose state is checked.
        rules: The values that are allowed.
        step: The step that the report names.
    """
    lists = list(_lists_of(models, optimizers))
    scanned = scan_values([tensor for _, named in lists for tensor in named[1]])
    _warn_of_gaps(each.why_not for each in scanned if each.stat is None)
    results = iter(scanned)
    every = [
        _StateTensor(number, role, name, next(results))
        for number, (role, named) in enumerate(lists)
        for name in named[0]
    ]
    found = [(each, kinds) for each in every if (kinds := kinds_of(each.scanned))]
    modules = [
        full_name(prefix, fqn)
        for prefix, model in models.items()
        for fqn, _ in (named_modules(model) if rules and found else ())
    ]
    bad = [
        (each, kinds)
        for each, kinds in found
        if kinds & ~(each.masks | rules.allowed(each.path(modules)))
    ]
    if not bad:
        return None
    words = (f"{kind_of(e.role).replace('_', ' ')} {e.name}" for e, _ in bad)
    notes = [
        f"All non-finite tensors: {some(words, 8)}.",
        "Do not save this state.",
    ]
    # A weight comes first: what else is bad may come from it.
    first, kinds = min(bad, key=lambda pair: pair[0].role != _C.Role.WEIGHT)
    verdict = Verdict(
        first=entry_of(kind_of(first.role), first.name, first.scanned, kinds),
        origin=never_finite(first.role, first.name),
        num_bad_frames=len({each.number for each, _ in bad}),
    )
    return Report(step, "raise", verdict, notes=notes, is_of_state=True)


def _lists_of(
    models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[_C.Role, Named]]:
    """Yields lists of named tensors, those of models before optimizers' states."""
    known: dict[int, str] = {}
    for prefix, model in models.items():
        tensors = NamedTensors(prefix, Selection(None, ()))
        names, parameters = tensors.parameters(model)
        known.update((id(p), name) for name, p in zip(names, parameters, strict=True))
        yield _C.Role.WEIGHT, (names, parameters)
        yield _C.Role.BUFFER, tensors.buffers(model)
    for optimizer in optimizers:
        yield _C.Role.OPTIMIZER_STATE, state_of(innermost(optimizer), known)


class _StateTensor(NamedTuple):
    """A tensor of the state that was scanned, and the number of its list."""

    number: int
    role: _C.Role
    name: str
    scanned: Scanned

    @property
    def masks(self) -> int:
        """The kinds that are no alarm: additive masks are buffers of -inf."""
        return _C.NEGATIVE_INF if self.role == _C.Role.BUFFER else 0

    def path(self, modules: Sequence[str]) -> TensorPath:
        """Where it is in a model with modules of these names."""
        return state_path(modules, self.role, self.name)


def _warn_of_gaps(reasons: Iterable[str]) -> None:
    """Logs how many tensors could not be checked, each reason once."""
    for why, count in Counter(reasons).items():
        if why not in _warned:
            _warned.add(why)
            _log.warning(
                "%d tensors of the state were not checked: %s. Logged once.",
                count,
                why,
            )
