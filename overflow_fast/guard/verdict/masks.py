"""The -inf of outputs, which is no alarm where nothing else is bad: masks are of it.

Healthy models return it: scores of actions or tokens that are not allowed, a padded
vocabulary, beams, the logarithm of 0 in a one-hot target. What comes of it is seen in
the loss and the gradients. Beside anything else that is bad it stays, as what may have
made that.

- An output without a finite value is no mask, and so is a loss. What `guard.record()`
  is given is judged, too.
- Where the recorder has met so many bad frames that it has left some out, a mask is not
  known to be all.
- In a training the place is let through from then on: what is bad later is something
  else, and devices that skip steps by themselves let it through, too.
- No row of what a request returns may be -inf as a whole, along its last dimension: a
  softmax makes nan of that, and nothing behind a request is seen.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ... import _C
from ...base.tree import tensors
from ...base.types import TensorPath
from ..report.entry_words import what_of
from ..watching.inputs import is_plain
from .attribution import bad_entry
from .bad_frames import BadFrame
from .rules import Rules, is_output, tensor_path

_log = logging.getLogger("overflow_fast")
_MOST_FRAMES = 4096  # that a recorder keeps: with more here, some would be missed
_Bad = tuple[BadFrame, _C.Entry]


class Masks:
    """Leaves masks out of what is judged, and logs each place once.

    Args:
        rules: The values that are allowed.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._logged = set[TensorPath]()

    def are_all(self, frames: Sequence[BadFrame]) -> bool:
        """True if all that bad frames hold are masks."""
        return bool(_masks_of(frames))

    def left_out(self, frames: Sequence[BadFrame], subject: str) -> list[BadFrame]:
        """Returns bad frames of a training, or none where all they hold are masks.

        Args:
            frames: All bad frames of a step, or of a forward alone.
            subject: What they are of, as a sentence begins with it.
        """
        found = _masks_of(frames)
        if not found:
            return list(frames)
        self._log(found, subject)
        for watch in {bad.watch for bad, _ in found.values()}:
            self._rules.let_through(found, watch)
        return []

    def are_served(self, frames: Sequence[BadFrame], subject: str, output: Any) -> bool:
        """True if all that the bad frames of a request's forward hold are masks.

        Args:
            frames: The frames.
            subject: The request, as a sentence begins with it.
            output: What it has returned, whose rows are looked at: incurs a CPU-GPU
                sync for each tensor, if there are masks.
        """
        found = _masks_of(frames)
        if not (found and _leaves_rows(output)):
            return False
        self._log(found, subject)
        return True

    def _log(self, found: Mapping[TensorPath, _Bad], subject: str) -> None:
        new = {path: bad for path, bad in found.items() if path not in self._logged}
        self._logged.update(new)
        if new:
            _log.warning("%s", _text(subject, new))


def _masks_of(frames: Sequence[BadFrame]) -> dict[TensorPath, _Bad]:
    """The masks in bad frames by their places; none if they hold anything else."""
    found = [(bad, entry) for bad in frames for entry in bad.bad_entries]
    if len(frames) >= _MOST_FRAMES or not all(_is_mask(entry) for _, entry in found):
        return {}
    return {
        tensor_path(bad.watch.modules.all_names(), entry.place): (bad, entry)
        for bad, entry in found
    }


def _is_mask(entry: _C.Entry) -> bool:
    stat = entry.stat
    if stat is None or entry.nonfinite_kinds != _C.NEGATIVE_INF:
        return False
    return is_output(entry.place) and stat.num_inf < entry.numel


def _leaves_rows(output: Any) -> bool:
    """True if no row is -inf as a whole. Incurs a CPU-GPU sync for each tensor."""
    floats = (t for _, t in tensors(output) if is_plain(t) and t.is_floating_point())
    rows = (t.isneginf().all(-1) for t in floats if t.dim() and t.numel())
    return not any(bool(each.any()) for each in rows)


def _text(subject: str, new: Mapping[TensorPath, _Bad]) -> str:
    what = what_of(bad_entry(*next(iter(new.values()))))
    others = f"{len(new) - 1} more output{'s' * (len(new) > 2)}"
    also = f"; -inf is in {others}, too" * (len(new) > 1)
    rules = dict.fromkeys((path.rule for path in new), "-inf")
    if len(rules) > 1:  # those of all layers in one
        rules = {re.sub(r"\d+", "*", rule): "-inf" for rule in rules}
    return (
        f"{subject}: {what}{also}. Alone that is no alarm, since masks are made of "
        "-inf; it is logged once.\n"
        f"To silence it, pass allow={rules}. To have the tensor judged, give it to "
        "`guard.record(name=tensor)`."
    )
