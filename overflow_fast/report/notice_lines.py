"""The lines that a guard logs for a finite step that a monitor has a notice of."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..text import as_lines

_log = logging.getLogger("overflow_fast")


def log_notices(
    step: int, clauses: Sequence[str], is_skipped: bool, notes: Sequence[str]
) -> None:
    """Logs (WARNING) a finite step that monitors have something to say of.

    Args:
        step: The step's number.
        clauses: What they say: "spikes: loss 9.1, ...". Nothing is logged without any.
        is_skipped: Whether the optimizer's step is skipped.
        notes: Further sentences.
    """
    if not clauses:
        return
    made = "was skipped" if is_skipped else "was made"
    sentences = [
        *(f"Step {step} is finite, but {clause}." for clause in clauses),
        f"The optimizer step {made}.",
        *notes,
    ]
    _log.warning("%s", as_lines(sentences))
