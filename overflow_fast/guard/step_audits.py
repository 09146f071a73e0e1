"""Looks now and then at what no frame shows: operations, bits, replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.optim import Optimizer

from ..core.devices import place_of
from ..distributed.replicas import Difference, ReplicaCheck
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from ..replay.explanation import Explanation
from ..replay.hidden import hidden_failures
from ..text import as_lines
from .config import GuardConfig
from .isolation import ErrorIsolation
from .layer_audit import LayerAudit

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
        self._has_warned = False
        self._layers = (
            None
            if config.audit is None
            else LayerAudit(watches, config.audit, isolation.isolated)
        )

    def begin_step(self, step: int) -> None:
        """Hooks the layer of a step that is audited."""
        if self._layers is not None:
            with self._isolation.isolated():
                self._layers.begin_step(step)

    def before_step(self, step: int) -> None:
        """Looks inside the operations of a clean step, before its optimizer steps."""
        every, capture = self._config.ops_every, self._capture
        if every is None or step % every or capture is None or not capture.calls:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return
        with self._isolation.isolated():
            models = {w.prefix: w.model for w in self._watches if w.model is not None}
            found = hidden_failures(models, capture.calls, capture.start())
            self._report_hidden(step, found)

    def end_step(self, step: int) -> None:
        """Compares replicas, once the step is over: a collective."""
        every = self._config.check_replicas
        has_ranks = dist.is_available() and dist.is_initialized()
        if every is None or step % every:
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
        if self._config.ops_every is not None:
            values["hidden_failures_total"] = self._num_hidden
        if self._layers is not None:
            values["layers_audited_total"] = self._layers.num_audited
            values["layers_different_total"] = self._layers.num_different
        if self._config.check_replicas is not None:
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
                "check_replicas has nothing to compare: no weight is kept by several "
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
