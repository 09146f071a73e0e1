"""Looks now and then at what no frame shows: operations, bits, replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.optim import Optimizer

from ..core.devices import place_of
from ..core.text import as_lines
from ..distributed.replicas import Difference, ReplicaCheck
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from ..replay.explain import variables_of
from ..replay.explanation import Explanation
from ..replay.hidden import hidden_failures
from ..state.snapshot import Snapshot
from .config import GuardConfig
from .isolation import ErrorIsolation
from .layer_audit import LayerAuditor
from .options import LayerAudit, MaskedOps, Replicas

_log = logging.getLogger("overflow_fast")
_FEW = 4


class StepAudits:
    """Runs the audits that a guard was asked for; each logs what it finds.

    Args:
        config: The guard's.
        watches: The watched models.
        capture: Keeps the calls of a step, or None.
        optimizers: Returns the guard's optimizers.
        isolation: Isolates the guard's own errors.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        capture: Capture | None,
        optimizers: Callable[[], Sequence[Optimizer]],
        isolation: ErrorIsolation,
    ) -> None:
        self._config = config
        self._watches = watches
        self._capture = capture
        self._optimizers = optimizers
        self._isolation = isolation
        self._known: set[tuple[str, int, str]] = set()  # the places that were logged
        self._num_hidden = self._num_different = 0
        self._has_warned = self._has_warned_of_lost = False
        self._layers = (
            None
            if (audit := config.monitor(LayerAudit)) is None
            else LayerAuditor(watches, audit.every, isolation.isolated)
        )

    def begin_step(self, step: int) -> None:
        """Hooks the layer of a step that is audited."""
        if self._layers is not None:
            with self._isolation.isolated():
                self._layers.begin_step(step)

    def before_step(self, step: int) -> None:
        """Looks inside the operations of a clean step, before its optimizer steps."""
        masked, capture = self._config.monitor(MaskedOps), self._capture
        if masked is None or step % masked.every:
            return
        if capture is None or not capture.calls:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return
        with self._isolation.isolated():
            models = {w.prefix: w.model for w in self._watches if w.model is not None}
            around = variables_of(capture.calls)
            state = Snapshot(models, capture.start, around)
            found = hidden_failures(models, capture.calls, state)
            self._warn_of_lost(state)
            self._report_hidden(step, found)

    def _warn_of_lost(self, state: Snapshot) -> None:
        """Warns once that steps are not replayed, or have left a trace."""
        texts = state.problems
        if state.lost:
            texts = ["MaskedOps: clean steps are not replayed.", state.lost_text]
        if texts and not self._has_warned_of_lost:
            self._has_warned_of_lost = True
            _log.warning("%s", as_lines([*texts, "Logged once."]))

    def end_step(self, step: int) -> None:
        """Compares replicas, once the step is over: a collective."""
        replicas = self._config.monitor(Replicas)
        has_ranks = dist.is_available() and dist.is_initialized()
        if replicas is None or step % replicas.every:
            return
        with self._isolation.isolated():
            models = {w.prefix: w.model for w in self._watches if w.model is not None}
            check = ReplicaCheck(models, self._optimizers())
            found = check.differences() if has_ranks else []
            if not check.num_compared:
                self._warn_of_no_replicas()
            if found:
                self._num_different += 1
                self._report_replicas(step, found)

    def detach(self) -> None:
        """Removes the hook of a layer."""
        if self._layers is not None:
            self._layers.end_step()

    def metrics(self) -> dict[str, int]:
        """Returns how often each audit has found something."""
        values = {}
        if self._config.monitor(MaskedOps) is not None:
            values["hidden_failures_total"] = self._num_hidden
        if self._layers is not None:
            values["layers_audited_total"] = self._layers.num_audited
            values["layers_different_total"] = self._layers.num_different
        if self._config.monitor(Replicas) is not None:
            values["replicas_different_total"] = self._num_different
        return values

    def _report_hidden(self, step: int, found: Sequence[Explanation]) -> None:
        """Logs each place once."""
        lines = []
        for each in found:
            op = each.op
            assert op is not None
            place = op.file, op.line, op.name
            if place not in self._known:
                self._known.add(place)
                where = f" in {each.module}" if each.module else ""
                made = each.evidence[0] if each.evidence else each.cause
                lines.append(f"{op.place}: {op.code} ({op.name}{where}): {made}.")
        self._num_hidden += len(lines)
        if lines:
            _log.warning(
                "%s",
                as_lines(
                    [
                        f"Step {step} is finite, but values inside of it were not:",
                        *lines,
                        "They did not reach the loss or a gradient.",
                    ]
                ),
            )

    def _warn_of_no_replicas(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Replicas() has nothing to compare: no weight is kept by several "
                "ranks, as under DDP and HSDP.\nLogged once."
            )

    def _report_replicas(self, step: int, found: Sequence[Difference]) -> None:
        lines = [_difference_text(each) for each in found[:_FEW]]
        if len(found) > _FEW:
            lines.append(f"{len(found) - _FEW} more tensors.")
        own = dist.get_rank()
        if any(own in each.ranks for each in found):
            device = next(
                (
                    p.device
                    for w in self._watches
                    if w.model
                    for p in w.model.parameters()
                ),
                None,
            )
            lines += [] if device is None else [f"Rank {own} is {place_of(device)}."]
        _log.warning(
            "%s", as_lines([f"Step {step}: replicas of weights differ:", *lines])
        )


def _difference_text(found: Difference) -> str:
    if not found.ranks:
        ranks = ", ".join(map(str, found.group))
        return f"{found.name} differs between ranks {ranks}: none is in the majority."
    odd = ", ".join(map(str, found.ranks))
    others = len(found.group) - len(found.ranks)
    ranks = "ranks" if len(found.ranks) > 1 else "rank"
    return f"{found.name}: {ranks} {odd} of {len(found.group)}; {others} agree."
