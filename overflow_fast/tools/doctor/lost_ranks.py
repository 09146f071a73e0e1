"""The ranks that did not come out of a stage. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.text import capitalized
from .stage import BROKEN, Finding, Hosts, StageOutcome, named

_GONE = {
    "silent": "gave no answer: the process or its host is gone, frozen, or without a "
    "network",
    "died": "died",
}


def lost_ranks(
    stage: str, outcomes: Mapping[int, StageOutcome], hosts: Hosts
) -> tuple[list[Finding], list[int]]:
    """Names the ranks that keep a stage from ending.

    A rank that is gone explains why others wait for it. If none is, those are named
    that stand before what the others wait in.

    Args:
        stage: Its name.
        outcomes: The outcome of each rank that took part.
        hosts: The names of their hosts.

    Returns:
        The findings, and the ranks that must not take part any more.
    """
    gone = [rank for rank, each in outcomes.items() if each.state in _GONE]
    if gone:
        return [_gone(stage, rank, outcomes[rank], hosts) for rank in gone], gone
    stuck = {r: each for r, each in outcomes.items() if each.state != "done"}
    if not stuck:
        return [], []
    least = min(each.number for each in stuck.values())
    behind = [rank for rank, each in stuck.items() if each.number == least]
    # Others leave a collective by its timeout: who is still inside then keeps them.
    inside = [rank for rank in behind if outcomes[rank].state == "hung"]
    behind = inside or behind
    return [_stuck(stage, behind, outcomes, hosts)], behind


def _gone(stage: str, rank: int, outcome: StageOutcome, hosts: Hosts) -> Finding:
    why = f" ({outcome.detail})" if outcome.detail else ""
    where = f", in {outcome.doing}" if outcome.doing else ""
    text = f"{named([rank], hosts)} {_GONE[outcome.state]}{why}{where}."
    return Finding(stage, BROKEN, (rank,), capitalized(text))


def _stuck(
    stage: str,
    behind: Sequence[int],
    outcomes: Mapping[int, StageOutcome],
    hosts: Hosts,
) -> Finding:
    first = outcomes[behind[0]]
    # A collective that the others leave by its timeout is no reason of its own.
    errors = list(dict.fromkeys(outcomes[r].detail for r in behind))
    why = "".join(f": {text}" for text in errors[:2] if text)
    who = named(behind, hosts)
    if len(behind) == len(outcomes) > 1:
        text = f"No rank came out of {first.doing}{why}."
        return Finding(stage, BROKEN, (), capitalized(text))
    others = ""
    ahead = [each for rank, each in outcomes.items() if rank not in behind]
    if ahead and all(each.state == "done" for each in ahead):
        others = "; the others did"
    elif ahead:
        others = f"; the others wait in {max(ahead, key=lambda a: a.number).doing}"
    left = [rank for rank, each in outcomes.items() if each.state == "error"]
    if first.state == "hung" and left and not others.startswith("; the others did"):
        others = f"; {named(left, {})} left with an error: {outcomes[left[0]].detail}"
    text = f"{who} did not come out of {first.doing}{others}{why}."
    return Finding(stage, BROKEN, tuple(behind), capitalized(text))
