"""Remarks before anything is compared: how the two runs were unlike."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from .matching import Matched
from .run_reader import RankStep, Run
from .whole import Entry

_MAX_NAMES = 6
_SETTINGS = {
    "devices": "devices",
    "dtypes": "dtypes of weights",
    "autocast": "autocast",
    "matmul_precision": "float32 matmul precision",
    "deterministic": "deterministic algorithms",
    "threads": "threads",
    "training": "training mode",
}


def of_runs(run: Run, reference: Run) -> Iterator[str]:
    """Sentences on two runs: damage, versions, ranks, steps."""
    yield from (*run.damaged, *reference.damaged)
    mine, its = run.heads[0].get("versions", {}), reference.heads[0].get("versions", {})
    for name in sorted({*mine, *its}):
        if mine.get(name) != its.get(name):
            yield f"{name}: {mine.get(name, 'none')} against {its.get(name, 'none')}."
    if run.num_ranks != reference.num_ranks:
        yield f"{run.num_ranks} against {reference.num_ranks} ranks."
    only = sorted({*run.steps} ^ {*reference.steps})
    if only:
        yield f"Steps of one run only, not compared: {_some(map(str, only))}."


def of_step(step: int, mine: Sequence[RankStep], its: Sequence[RankStep]) -> list[str]:
    """Sentences on a step: settings, dropout, random states, failures."""
    own, other = mine[0].modes, its[0].modes
    found = [
        f"{name}: {_text(own.get(key))} against {_text(other.get(key))}"
        for key, name in _SETTINGS.items()
        if key in own and key in other and own[key] != other[key]
    ]
    dropout = own.get("dropout") or other.get("dropout")
    if dropout:
        found.append(f"dropout is on in {len(dropout)} modules, such as {dropout[0]}")
    found += _of_random(own, other)
    for side in (*mine, *its):
        found += [f"not recorded: {text}" for text in side.modes.get("failures", [])]
        if side.modes.get("raised"):
            found.append(f"rank {side.rank} raised {side.modes['raised']} in this step")
    return [f"Step {step}: {text}." for text in found]


def _of_random(own: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """Describes what unequal random states mean, where it is known who drew."""
    unequal = _unequal(own.get("random", {}), other.get("random", {}))
    if not unequal:
        return
    names = ", ".join(unequal)
    if "drawn" not in own or "drawn" not in other:  # an older recording, or no own one
        yield f"the random states were unequal ({names}): what was drawn may differ"
        return
    drawn = [name for name in unequal if name in {*own["drawn"], *other["drawn"]}]
    if drawn:
        yield (
            f"random numbers were drawn, from unequal states ({', '.join(drawn)}): "
            "what depends on them differs"
        )
    else:
        yield f"the random states were unequal ({names}), but nothing was drawn of them"


def of_matches(step: int, matched: Matched) -> Iterator[str]:
    """Sentences on tensors without a twin, and modules paired by their order."""
    for entries, whose in (
        (matched.only, "first"),
        (matched.only_reference, "reference"),
    ):
        if entries:
            yield f"Step {step}: {_missing(entries)} of the {whose} run alone."
    if matched.renamed:
        pairs = [f"{a} = {b}" for a, b in matched.renamed.items() if a != b]
        if pairs:
            yield (
                f"Step {step}: {len(pairs)} modules were paired by order and shape: "
                f"{_some(pairs)}."
            )


def _missing(entries: Sequence[Entry]) -> str:
    roles = collections.Counter(e.place.role.replace("_", " ") for e in entries)
    counts = ", ".join(f"{count} {role}" for role, count in roles.most_common())
    ranks = {entry.rank for entry in entries if entry.rank is not None}
    of_ranks = f" (ranks {_some(map(str, sorted(ranks)))})" if ranks else ""
    modules = list(dict.fromkeys(e.place.module or "the model" for e in entries))
    return f"not compared: {counts} of {_some(modules)}{of_ranks},"


def _some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMES} more" if len(listed) > _MAX_NAMES else ""
    return ", ".join(listed[:_MAX_NAMES]) + more


def _unequal(mine: dict[str, str], its: dict[str, str]) -> list[str]:
    """The generators that both runs have, in unequal states; torch's first."""
    return [name for name in mine if name in its and mine[name] != its[name]]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
