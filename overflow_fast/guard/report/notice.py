"""The words of a finite step that a monitor has a notice of."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.text import as_lines


def notices_text(
    step: int, clauses: Sequence[str], is_skipped: bool, notes: Sequence[str]
) -> str:
    """Writes what monitors have to say of a finite step.

    Args:
        step: The step's number.
        clauses: What they say: "spikes: loss 9.1, ...".
        is_skipped: Whether the optimizer's step is skipped.
        notes: Further sentences.
    """
    made = "was skipped" if is_skipped else "was made"
    sentences = [
        *(f"Step {step} is finite, but {clause}." for clause in clauses),
        f"The optimizer step {made}.",
        *notes,
    ]
    return as_lines(sentences)
