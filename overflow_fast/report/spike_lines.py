"""The line that a guard logs for a step with a spike."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..text import as_lines

_log = logging.getLogger("overflow_fast")


def log_spike(
    step: int, spikes: Sequence[object], is_skipped: bool, notes: Sequence[str]
) -> None:
    """Logs (WARNING) a finite step whose loss or gradients are far above the last.

    Args:
        step: The step's number.
        spikes: What this rank has seen; empty where it was another one.
        is_skipped: Whether the optimizer's step is skipped.
        notes: Further sentences.
    """
    seen = "; ".join(map(str, spikes)) or "seen on another rank"
    made = "was skipped" if is_skipped else "was made"
    sentences = [
        f"Step {step} is finite, but spikes: {seen}.",
        f"The optimizer step {made}.",
        *notes,
    ]
    _log.warning("%s", as_lines(sentences))
