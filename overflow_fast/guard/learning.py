"""Learns non-finite values of clean steps, and proposes rules that allow them."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence

from .. import _C
from ..detector.selection import Wanted
from ..scanner.types import TensorPath
from .ranks.agreement import Agreement
from .verdict.bad_frames import BadFrame
from .verdict.roles import FORWARDS
from .verdict.rules import KINDS, Rules, kinds_text, tensor_path
from .watching.watch import ModelWatch

_log = logging.getLogger("overflow_fast")


def check_can_learn(wanted: Wanted) -> None:
    """Raises ValueError if a guard does not check what it would learn from."""
    if not (wanted.activations and wanted.gradients):
        raise ValueError(
            "learn() needs a guard whose watch holds 'activations' and 'gradients': "
            "they show which values are non-finite, and that these are harmless"
        )


class Learning:
    """Collects non-finite values of a number of clean steps, then proposes rules.

    Infs in inputs and outputs of modules count as intended where the step is clean
    otherwise: no nan, and nothing bad in the loss, gradients and weights.

    Args:
        steps: The number of clean steps.
        adopt: Add the rules to the guard's.
        rules: The guard's.
        watches: The watched models.
        agreement: The ranks that learn together.

    Attributes:
        is_over: The steps are over.
    """

    def __init__(
        self,
        steps: int,
        adopt: bool,
        rules: Rules,
        watches: Sequence[ModelWatch],
        agreement: Agreement,
    ) -> None:
        self._steps = steps
        self._adopt = adopt
        self._rules = rules
        self._watches = watches
        self._agreement = agreement
        self._seen: dict[TensorPath, int] = {}
        self._pending: dict[TensorPath, int] = {}
        self._num_clean = 0
        self._last_step: int | None = None
        self.is_over = False

    def without_expected(
        self, frames: Sequence[BadFrame], may_learn: bool, is_skipped: bool
    ) -> list[BadFrame]:
        """Frames to alarm on: all, or none if all look expected.

        Args:
            frames: The step's bad frames.
            may_learn: All of the step was checked, and its gradients are finite. If
                False, only values that were seen before are expected.
            is_skipped: A GradScaler has skipped the step, whose gradients prove nothing
                then: it is no alarm, and nothing is learned from it.
        """
        self._pending = {}
        if self.is_over or not frames:
            return list(frames)
        found = self._candidates(frames)
        if found is None:
            return list(frames)
        is_known = all(
            kinds & ~self._seen.get(name, 0) == 0 for name, kinds in found.items()
        )
        if not (may_learn or is_skipped or is_known):
            return list(frames)
        if may_learn and not is_skipped:
            self._pending = found
        return []

    def _candidates(self, frames: Sequence[BadFrame]) -> dict[TensorPath, int] | None:
        """The non-finite values of a step, or None if they cannot be intended."""
        found: dict[TensorPath, int] = {}
        for bad in frames:
            names, frame = bad.watch.modules.all_names(), bad.frame
            for entry in bad.bad_entries:
                kinds = entry.nonfinite_kinds
                is_scalar = entry.numel == 1  # it may be a loss
                is_intended = _is_activation(entry.label) and not kinds & KINDS["nan"]
                if frame.kind not in FORWARDS or is_scalar or not is_intended:
                    return None
                path = tensor_path(names, entry.place)
                found[path] = found.get(path, 0) | kinds
        return found

    def end_step(self, is_clean: bool, step: int | None) -> None:
        """Learns from a step that is clean on all ranks; after the last, proposes.

        Args:
            is_clean: This rank has checked all of it, and it was not skipped.
            step: Its number: it counts once, however often it is judged. None counts
                always.
        """
        if self.is_over or not self._agreement.all_agree(is_clean):
            return
        for name, kinds in self._pending.items():
            self._seen[name] = self._seen.get(name, 0) | kinds
        self._pending = {}
        self._num_clean += step is None or step != self._last_step
        self._last_step = step
        if self._num_clean < self._steps:
            return
        self.is_over = True
        together = self._agreement.is_needed
        for seen in self._agreement.gather(self._seen) if together else [self._seen]:
            for name, kinds in seen.items():
                self._seen[name] = self._seen.get(name, 0) | kinds
        proposed = self._proposed()
        if self._adopt:
            self._rules.add(proposed)
            for watch in self._watches:
                self._rules.put_on(watch)
        self._log_proposal(proposed)

    def _proposed(self) -> dict[str, str | list[str]]:
        names = [name for watch in self._watches for name in watch.modules.all_names()]
        return {
            self._widened(path, kinds, names).rule: kinds_text(kinds)
            for path, kinds in self._seen.items()
        }

    def _widened(
        self, path: TensorPath, kinds: int, names: Iterable[str]
    ) -> TensorPath:
        """With `*` for its numbers, where all modules of such names have the same."""
        parts = path.module.split(".")
        if not any(part.isdigit() for part in parts):
            return path
        pattern = r"\.".join(r"\d+" if p.isdigit() else re.escape(p) for p in parts)
        alike = [other for other in names if re.fullmatch(pattern, other)]
        wide = ".".join("*" if part.isdigit() else part for part in parts)
        # `*` spans dots, so it may match more than what is alike.
        matched = [other for other in names if re.fullmatch(_as_regex(wide), other)]
        is_same = all(
            self._seen.get(dataclasses.replace(path, module=other)) == kinds
            for other in matched
        )
        is_wide = len(alike) > 1 and is_same
        return dataclasses.replace(path, module=wide) if is_wide else path

    def _log_proposal(self, proposed: dict[str, str | list[str]]) -> None:
        if not proposed:
            _log.warning(
                "No rule is needed: in %d clean steps all values were finite.",
                self._num_clean,
            )
            return
        state = "are allowed from now on" if self._adopt else "are still alarms"
        _log.warning(
            "Some values were non-finite in %d clean steps, apparently by design. They "
            "%s. For the next run, review these rules and pass them: allow=%r",
            self._num_clean,
            state,
            proposed,
        )


def _is_activation(label: _C.Label) -> bool:
    """Returns True for an input or output that is not named a loss."""
    is_loss = any("loss" in str(part.value) for part in label.parts)
    return label.role in (_C.Role.INPUT, _C.Role.OUTPUT) and not is_loss


def _as_regex(wide: str) -> str:
    return re.escape(wide).replace(r"\*", ".*")
