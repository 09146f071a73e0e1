"""Finds the failure that is left once a remedy is in place."""

from __future__ import annotations

from ..finding import explain_culprit
from ..slice import ForwardRows, culprit_in
from .failure import Failure
from .ground import Trial
from .lines import expression_of
from .trials import Trials


def uncovered(
    failure: Failure, trials: Trials, trial: Trial, place: int
) -> Failure | None:
    """Replays the step with a remedy in place; returns the failure that is left.

    Args:
        failure: The failure that the remedy was tried for.
        trials: The trials; the remedy is in place.
        trial: The remedy.
        place: The place of the call that was bad with it.

    Returns:
        The failure; None if it is the same one still, or is not known.
    """
    if place < 0:
        return None
    outcome = trials.run(trials.ground.change, armed=place)
    if outcome.error is not None or outcome.table is None:
        return None
    models = trials.rerun.models
    culprit = culprit_in(outcome, models)
    if culprit is None:
        return None
    rows = ForwardRows(outcome.table)
    found = explain_culprit(culprit, rows, outcome.is_in_gradients)
    after = Failure.of(found, culprit, outcome.table, place)
    after.checkpoints = failure.checkpoints
    return None if _is_same(failure, after, trials, trial) else after


def _is_same(failure: Failure, after: Failure, trials: Trials, trial: Trial) -> bool:
    """Tells whether the same expression fails still, as it was or in its new form."""
    if after.mark != failure.mark:
        return False
    if after.row is None or trial.source is None:
        return True
    source, node = expression_of(after.row, trials.ground)
    text = "" if source is None or node is None else source.text_of(node)
    return not text or any(text in each for each in trial.texts)
