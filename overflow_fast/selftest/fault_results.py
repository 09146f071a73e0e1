"""The results of planted faults, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..text import printable

FAULTS = {"nan": math.nan, "inf": math.inf}
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class FaultResult:
    """The result of one planted fault.

    Attributes:
        layer: The qualified name of the module in whose output it was planted.
        class_name: The module's class.
        direction: "forward", in the output, or "backward", in its gradient.
        value: "nan" or "inf".
        is_planted: True if the layer was called, and backward reached it.
        is_caught: True if the guard raised an alarm.
        found_at: The place in the guard's report, or "".
        is_attributed: True if that is the layer.
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
        """The result in a word or two."""
        if not self.is_planted:
            return "not reached"
        if not self.is_caught:
            return "MISSED"
        return "caught" if self.is_attributed else f"caught, BLAMED ON {self.found_at}"


@dataclass(frozen=True)
class SelfTestResult:
    """The results of all faults. `str()` of it is a table.

    Attributes:
        clean: The findings without a fault, in words; "" if there are none. If there
            are, no fault is planted.
        faults: The planted faults.
        not_chosen: How many layers were not tried.
        not_watched: The kinds of tensors that `watch` leaves out.
    """

    clean: str
    faults: list[FaultResult]
    not_chosen: int
    not_watched: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """True if the clean run was clean and each planted fault caught and attributed.

        False if nothing was planted at all.
        """
        planted = [fault for fault in self.faults if fault.is_planted]
        return (
            not self.clean
            and bool(planted)
            and all(fault.is_attributed for fault in planted)
        )

    def __str__(self) -> str:
        """Writes a line for each layer."""
        if self.clean:
            return (
                f"Nothing was planted: {self.clean} is not finite without a fault. "
                "Give a finite batch, or allow intended values (see `learn()`)."
            )
        kinds = [(way, value) for way in DIRECTIONS for value in FAULTS]
        rows = [["layer", *(f"{way} {value}" for way, value in kinds)]]
        for at in range(0, len(self.faults), len(kinds)):
            of_layer = self.faults[at : at + len(kinds)]
            name = printable(f"{of_layer[0].layer} ({of_layer[0].class_name})")
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
            "a fault the guard raises no alarm."
        )
        if self.not_watched and caught < planted:
            kinds_missed = ", ".join(
                name.replace("_", " ") for name in self.not_watched
            )
            lines.append(f"Not checked (not in `watch`): {kinds_missed}.")
        if self.not_chosen:
            lines.append(f"{self.not_chosen} other layers were not tried (layers=).")
        return "\n".join(lines)
