"""The steps before the first difference: which weights an update has moved apart.

A weight of a later step is judged by the gradients that it was updated with:

1. Where they were equal bit for bit, any difference of the weight is the update's.
2. Where they differed by rounding, an optimizer that multiplies them (SGD) makes
   weights that differ no more than `FLAGGED` times as much; beyond, it is the update.
3. Any other one may divide a gradient by its size, as Adam does, and make a whole step
   of rounding: such weights are not judged, unless the settings of optimizers differ.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

from ...base.text import capitalized
from .first_difference import RootDifference
from .judged_rows import FLAGGED, INTRODUCED, PROPAGATED, TensorDifference
from .recording_schema import STATE
from .run_settings import OPTIMIZER, Settings

# Settings that choose an implementation of the same update.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


class EarlierSteps:
    """Judges weights by the steps before, and describes an update."""

    def __init__(self) -> None:
        self._last_step = -2  # that had gradients
        self._last = set[str]()  # the parameters with a gradient in it
        # Of each rank's parameter the largest relative difference of its gradients; of
        # buffers, by the name "", of all that was propagated.
        self._relative = collections.defaultdict[tuple[int | None, str], float](float)
        self._classes = set[str]()
        self._changes = dict[str, list[str]]()  # of the optimizers' settings

    def judge(self, rows: Sequence[TensorDifference]) -> bool:
        """Judges the weights and buffers that are introduced in a step.

        Returns:
            True if weights could not be judged.
        """
        # A program without an optimizer multiplies gradients, too.
        is_linear = bool(self._changes) or self._classes <= {"'SGD'"}
        left = False
        for row in rows:
            is_buffer = row.place.role == "buffer"
            before = self._relative[row.rank, "" if is_buffer else row.place.fqn]
            if row.place.phase != STATE or row.verdict != INTRODUCED or not before:
                continue
            row.propagated = before if is_buffer or is_linear else math.inf
            if not row.why and row.relative <= FLAGGED * row.propagated:
                row.verdict = PROPAGATED
                left |= math.isinf(row.propagated)
        return left

    def add(self, step: int, rows: Sequence[TensorDifference]) -> None:
        """Adds a step that was compared."""
        compared = [row for row in rows if not row.why]
        gradients = [r for r in compared if r.place.role == "parameter_gradient"]
        if gradients:
            self._last_step = step
            self._last = {each.place.fqn for each in gradients}
        found = [(row.place.fqn, row) for row in gradients]
        found += [("", row) for row in compared if row.verdict == PROPAGATED]
        for name, row in found:
            before = self._relative[row.rank, name]
            self._relative[row.rank, name] = max(before, row.relative)

    def add_optimizers(
        self, settings: Iterable[Settings], differing: Mapping[str, Sequence[str]]
    ) -> None:
        """Adds the optimizers of a step.

        Args:
            settings: The settings of all ranks of both runs.
            differing: How those of an optimizer differ, in clauses, by its name.
        """
        for each in settings:
            own = (v for name, v in each.items() if name.startswith(OPTIMIZER))
            self._classes.update(values.get("class", "") for values in own)
        for name, texts in differing.items():
            kinds = {text.partition(" is ")[0] for text in texts}
            if name.startswith(OPTIMIZER) and not kinds <= {*_IMPLEMENTATIONS}:
                self._changes.setdefault(name, list(texts))

    def described(self, first: RootDifference) -> RootDifference:
        """Adds what is known of these steps to the first difference."""
        row = first.row
        is_weight = first.kind == "weights" and row.place.role == "parameter"
        is_next = self._last_step == row.step - 1
        if not (is_weight and is_next and row.place.fqn in self._last):
            return first
        if row.has_other_shape:
            return first
        first.kind = "update"
        makers = [
            f"{capitalized(n)}: {'; '.join(t)}." for n, t in self._changes.items()
        ]
        if not makers:
            makers = ["The optimizer, its state, or other code that writes to weights "]
            makers[0] += "makes it."
        first.remark = " ".join([first.remark, *makers])
        return first
