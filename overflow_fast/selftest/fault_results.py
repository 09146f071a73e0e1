"""What became of planted faults, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FAULTS = {"nan": math.nan, "inf": math.inf}
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class FaultResult:
    """What became of one planted fault.

    Attributes:
        layer: The qualified name of the module in whose output it was planted.
        class_name: The module's class.
        direction: "forward", in the output, or "backward", in its gradient.
        value: "nan" or "inf".
        is_planted: Whether the layer was called, and backward came by.
        is_caught: Whether the guard raised an alarm.
        found_at: Where the guard said it was, or "".
        is_attributed: Whether that is the layer.
    """

    layer: str
    class_name: str
    direction: str
    value: str
    is_planted: bool
    is_caught: bool
    found_at: str
    is_attributed: bool

    @property
    def text(self) -> str:
        """What became of it, in a word or two."""
        if not self.is_planted:
            return "not reached"
        if not self.is_caught:
            return "MISSED"
        return "caught" if self.is_attributed else f"caught, BLAMED ON {self.found_at}"


@dataclass(frozen=True)
class SelfTestResult:
    """What became of all faults. `str()` of it is a table.

    Attributes:
        clean: What was found without a fault, in words; "" if nothing. If something
            was, no fault is planted.
        faults: The planted faults.
        not_chosen: How many layers were not tried.
        not_watched: What the guard was not asked to look at; see `watch`.
    """

    clean: str
    faults: list[FaultResult]
    not_chosen: int
    not_watched: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether the clean run was clean and each planted fault caught and attributed.

        False if nothing was planted at all.
        """
        planted = [fault for fault in self.faults if fault.is_planted]
        return (
            not self.clean
            and bool(planted)
            and all(fault.is_attributed for fault in planted)
        )

    def __str__(self) -> str:
        """A line for each layer."""
        if self.clean:
            return (
                f"Nothing was planted: {self.clean} is not finite without a fault. "
                "Give a batch that is clean, or allow what is meant (see `learn()`)."
            )
        kinds = [(way, value) for way in DIRECTIONS for value in FAULTS]
        rows = [["layer", *(f"{way} {value}" for way, value in kinds)]]
        for at in range(0, len(self.faults), len(kinds)):
            of_layer = self.faults[at : at + len(kinds)]
            name = f"{of_layer[0].layer} ({of_layer[0].class_name})"
            rows.append([name, *(fault.text for fault in of_layer)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        planted = sum(fault.is_planted for fault in self.faults)
        caught = sum(fault.is_attributed for fault in self.faults)
        lines.append(
            f"{caught} of {planted} planted faults were caught and attributed; without "
            "a fault the guard is quiet."
        )
        if self.not_watched and caught < planted:
            kinds_missed = ", ".join(
                name.replace("_", " ") for name in self.not_watched
            )
            lines.append(f"The guard was not asked to watch: {kinds_missed}.")
        if self.not_chosen:
            lines.append(f"{self.not_chosen} other layers were not tried (layers=).")
        return "\n".join(lines)
