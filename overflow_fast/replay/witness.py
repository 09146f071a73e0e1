"""A replay is compared with the step itself: the first value that differs."""

from __future__ import annotations

from dataclasses import dataclass

from .change import Change


@dataclass(frozen=True)
class Stats:
    """The extremes of an entry in a step.

    Attributes:
        num_tensors: How many tensors they are of.
        abs_min: The smallest magnitude; nan where there is a nan.
        abs_max: The largest magnitude; nan where there is a nan.
        num_nan: The number of nans.
        num_inf: The number of infs.
    """

    num_tensors: int
    abs_min: float
    abs_max: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class Difference:
    """The first entry, in execution order, whose extremes differ.

    Attributes:
        module: The name of its module.
        label: Its label, such as "output" or "grad_output".
        step: Its extremes in the step.
        replay: Those in the replay.
    """

    module: str
    label: str
    step: Stats
    replay: Stats

    def __str__(self) -> str:
        """The difference as a clause."""
        place = f"{self.label} of {self.module or 'the model'}"
        return f"{place} is the first that differs: {self._what()}"

    def _what(self) -> str:
        step, replay = self.step, self.replay
        for kind in ("nan", "inf"):
            numbers = (getattr(step, f"num_{kind}"), getattr(replay, f"num_{kind}"))
            if numbers[0] != numbers[1]:
                return f"{numbers[0]} {kind} in the step, {numbers[1]} in the replay"
        extreme = "smallest" if step.abs_max == replay.abs_max else "largest"
        name = "abs_min" if extreme == "smallest" else "abs_max"
        values = _apart(getattr(step, name), getattr(replay, name))
        return f"{extreme} magnitude {values[0]} in the step, {values[1]} in the replay"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Writes two numbers with as many digits as tell them apart."""
    for digits in (3, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


class Witness(Change):
    """A change of a replay: it is watched as the step was. Changes no value."""

    def difference(self) -> Difference | None:
        """The first value that differs from the step's; None if none is known to."""
        raise NotImplementedError


def difference_of(watched: Change | None) -> Difference | None:
    """The first value of a watched run that differs from the step's, if one is known.

    Args:
        watched: What watched the run; None where nothing did.
    """
    return watched.difference() if isinstance(watched, Witness) else None
