"""The exit status that tells a launcher what to do about an incident."""

from __future__ import annotations

from .causes import NOT_REPRODUCIBLE
from .findings import Findings

# Megatron-LM's rerun machine ends with these: 16 asks for a run on other hardware,
# which tells a faulty device from the data; 17 says that a result was not valid.
DETERMINISTIC, TRANSIENT, OTHERWISE = 16, 17, 1


def exit_code_of(explanation: Findings | None) -> int:
    """Chooses the exit status for an incident.

    Args:
        explanation: The findings of the replay, or None.

    Returns:
        16 if the replay gave it again, 17 if the whole step was replayed and finite,
        else 1.
    """
    if explanation is None:
        return OTHERWISE
    if explanation.is_transient:
        return TRANSIENT
    if explanation.cause == NOT_REPRODUCIBLE.name:
        return OTHERWISE  # code that was not replayed may have made it
    is_known = explanation.op is not None or bool(explanation.phase)
    return DETERMINISTIC if is_known else OTHERWISE
