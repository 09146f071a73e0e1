"""The policy: from a verdict and the guard's history to an action. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field

ACTIONS = ("raise", "warn", "skip")
_BEYOND_REPAIR = (
    "It stays non-finite without this step: skipping steps cannot repair it. Load a "
    "checkpoint in which it is finite."
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
    """

    can_skip: bool
    is_skipped: bool
    is_undone: bool
    is_beyond_repair: bool


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
    if asked != "skip":
        return Choice(asked)
    if not (situation.can_skip or situation.is_skipped):
        return Choice("warn")
    if situation.is_beyond_repair and not situation.is_undone:
        return Choice("raise", (_BEYOND_REPAIR,))
    return Choice("skip")


def limit_skips(action: str, consecutive_skips: int, most: int) -> Choice:
    """Replaces a skip by "raise" after too many in a row.

    Args:
        action: The action for the step.
        consecutive_skips: The number of skipped steps in a row, this one included.
        most: The guard's `max_consecutive_skips`.
    """
    if consecutive_skips <= most:
        return Choice(action)
    note = (
        f"{consecutive_skips} steps in a row are bad, more than "
        f"max_consecutive_skips={most}."
    )
    return Choice("raise", (note,))


def checked_action(action: object) -> str:
    """Returns the action that a user's callable returned; None is "warn".

    Raises:
        ValueError: If it is not an action.
    """
    if action is None:
        return "warn"
    if action not in ACTIONS:
        raise ValueError(
            "on_overflow must return 'raise', 'warn' or 'skip' (None is 'warn'), got "
            f"{action!r}"
        )
    return str(action)
