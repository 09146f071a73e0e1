"""The policy: from a verdict and the guard's history to an action. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ACTIONS = ("raise", "warn", "skip")
_WANTED = "on_overflow must return 'raise', 'warn' or 'skip'"
_BEYOND_REPAIR = (
    "It stays non-finite without this step: skipping steps cannot repair it. Load a "
    "checkpoint in which it is finite."
)
_APART = (
    "The step is not skipped: other ranks may make it, and their weights would differ "
    "from then on. Pass process_group=torch.distributed.group.WORLD to the guard, or "
    "the group of the ranks that share the model; process_group=False lets each rank "
    "skip alone."
)


@dataclass(frozen=True)
class Situation:
    """The facts that an action depends on.

    Attributes:
        can_skip: The optimizer can still be kept from stepping.
        is_skipped: Other code has skipped the step already.
        is_undone: A skip puts back weights that the step has changed.
        is_beyond_repair: A weight or an optimizer's state was non-finite before the
            step, and stays so without it.
        is_apart: There are other ranks, and it is not known which share the model.
        has_raised: The program's own code has raised, and goes on to do so.
    """

    can_skip: bool
    is_skipped: bool
    is_undone: bool
    is_beyond_repair: bool
    is_apart: bool = False
    has_raised: bool = False


@dataclass(frozen=True)
class Choice:
    """An action ("raise", "warn", "skip"), and notes that explain it in the report."""

    action: str
    notes: tuple[str, ...] = field(default=())


def choose(asked: str, situation: Situation) -> Choice:
    """Chooses the action for a bad step.

    Args:
        asked: The action that the user asked for, or that their callable returned.
        situation: The facts of the step.

    Returns:
        The action that is possible: a step that was made is not skipped, and one that
        cannot be repaired by a skip raises.
    """
    if situation.has_raised:
        return Choice("raise")
    if asked != "skip":
        return Choice(asked)
    if not (situation.can_skip or situation.is_skipped):
        return Choice("warn")
    if situation.is_beyond_repair and not situation.is_undone:
        return Choice("raise", (_BEYOND_REPAIR,))
    if situation.is_apart and not situation.is_skipped:
        return Choice("raise", (_APART,))
    return Choice("skip")


def limit_skips(consecutive_skips: int, most: int) -> Choice:
    """Replaces a skip by "raise" after too many in a row.

    Args:
        consecutive_skips: The number of skipped steps in a row, this one included.
        most: The guard's `max_consecutive_skips`.
    """
    if consecutive_skips <= most:
        return Choice("skip")
    note = (
        f"{consecutive_skips} steps in a row were skipped, more than "
        f"max_consecutive_skips={most}."
    )
    return Choice("raise", (note,))


def plain_action(action: Any) -> Any:
    """Returns an action as a plain string; anything else as it is.

    A member of an enum of strings equals its value, and is another key of a dict.
    """
    is_one = isinstance(action, str) and action in ACTIONS
    return ACTIONS[ACTIONS.index(action)] if is_one else action


def checked_action(answer: object) -> str:
    """Returns the action that a user's callable returned.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is another string.
    """
    if not isinstance(answer, str):
        is_short = answer is None or isinstance(answer, (bool, int, float))
        got = repr(answer) if is_short else type(answer).__name__
        raise TypeError(f"{_WANTED}, got {got}")
    if answer not in ACTIONS:
        raise ValueError(f"{_WANTED}, got {answer!r}")
    return str(plain_action(answer))
