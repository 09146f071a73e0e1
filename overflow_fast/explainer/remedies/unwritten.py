"""The forward with 0 in a cache, where nobody has written to it.

A cache that was allocated without values (`torch.empty`) has in it what its memory held
before. Of one that the forward writes to, whether a bad value was there before is not
known: it was, where the forward is finite with 0 in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ... import _C
from ...base.modules import own_tensors
from ...guard.report.causes import BAD_DATA, BAD_WEIGHTS
from ...guard.report.remedy import Remedy
from ...torch_internals.module_internals import BUFFERS
from ..calls import Call
from ..explain_origin import CARRIED
from ..named_tensors import modules_by_name
from .failure import Failure
from .patches import ChangedCall
from .trials import Attempts, Trial, Trials


def zero_trials(failure: Failure, trials: Trials) -> Attempts:
    """The forward with 0 for what a cache holds where nobody has written to it."""
    found, call = failure.found, trials.calls[failure.place]
    if call.has_backward or not trials.replayer.ranks.is_alone:
        return
    name, cache = found.tensor, dict(call.leaves()).get(found.tensor)
    put, models = ".nan_to_num_(0.0, 0.0, 0.0)", trials.replayer.models
    code = f"{name}{put}"
    if cache is None:
        if not _kept_at(models, name)[0]:
            return
        owner, _, key = name.rpartition(".")
        is_one = len(models) == 1
        code = f'model.get_submodule("{owner}").{key}{put}' if is_one else ""
    elif not call.was_written(cache):
        return
    text = f"put 0 in the place of what is not finite in `{name}` before the call"
    remedy = Remedy(text, code)
    if (yield Trial(remedy, WithoutBad(failure.place, name, cache is None))):
        found.cause = BAD_WEIGHTS.name if cache is None else BAD_DATA.name
        said = CARRIED.format(f"`{name}`")
        found.notes = [each for each in found.notes if each != said]
        found.evidence.append("with 0 in the place of these values it is finite")


@dataclass(frozen=True)
class WithoutBad(ChangedCall):
    """A cache has 0 in place of what is not finite.

    Attributes:
        name: The tensor's place in the batch, or its name in a model.
        is_kept: A module keeps it, and it is none of the batch.
    """

    name: str
    is_kept: bool = False
    _zeroed: list[tuple[torch.Tensor, torch.Tensor, int | None]] = field(
        default_factory=list, compare=False
    )

    @property
    def is_applied(self) -> bool:
        """True if the run has written to it, and not to most of the bad values.

        Else it is no cache, or the run may have made them.
        """
        return bool(self._zeroed) and all(
            (zeroed.is_inference() or _C.version_of(zeroed) != version)
            and 2 * int((zeroed[bad] == 0).sum()) >= int(bad.sum())
            for zeroed, bad, version in self._zeroed
        )

    def changed(self, call: Call) -> Call:
        """See `ChangedCall`."""
        wanted = None if self.is_kept else dict(call.leaves()).get(self.name)
        if wanted is None:
            return call
        return call.with_batch(
            lambda each: self._without_bad(each) if each is wanted else each
        )

    @contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Patch`."""
        self._zeroed.clear()
        table, key = _kept_at(models, self.name) if self.is_kept else ({}, "")
        value = table.get(key)
        try:
            if value is not None:
                table[key] = self._without_bad(value)
            yield
        finally:
            if value is not None:
                table[key] = value

    def _without_bad(self, tensor: torch.Tensor) -> torch.Tensor:
        zeroed = tensor.nan_to_num(0.0, 0.0, 0.0)
        self._zeroed.append((zeroed, ~tensor.isfinite(), _C.version_of(zeroed)))
        return zeroed


def _kept_at(models: Mapping[str, nn.Module], name: str) -> tuple[dict[str, Any], str]:
    """The table that has a module's buffer or plain tensor, and its key in there.

    The table is empty where no module has one of that name.
    """
    owner, _, key = name.rpartition(".")
    module = modules_by_name(models).get(owner)
    for table in () if module is None else (own_tensors(module, BUFFERS), vars(module)):
        if isinstance(table.get(key), torch.Tensor):
            return table, key
    return {}, ""
