"""The first difference of a comparison, as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text import printable
from .judged_rows import Difference, coarser

_MAX_PLACES = 3


@dataclass
class First:
    """The first difference that is not inherited, and what made it.

    Attributes:
        module: The name of the module that made it; "" is the model itself, or what is
            outside of it.
        class_name: The module's class, or "".
        kind: "weights", "batch", "forward", "backward", "loss" where the gradient that
            the model was given differs, or "gradients" where those of parameters
            differ, and what made them could not be compared.
        row: The first row that shows it.
        after: The last call that had returned within the module, or "".
        op: The first operation that differs, with its line, or "". `compare_live()` and
            `shadow()` find it.
        remark: What it may be, in a sentence, or "".
        unknown: The places of what it was computed from that could not be compared; the
            difference may come from there, and `module` is not to blame then.
    """

    module: str
    class_name: str
    kind: str
    row: Difference
    after: str = ""
    op: str = ""
    remark: str = ""
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """It as texts and numbers."""
        return {
            "module": self.module,
            "class": self.class_name,
            "kind": self.kind,
            "row": self.row.name,
            "step": self.row.step,
            "rank": self.row.rank,
            "after": self.after,
            "op": self.op,
            "remark": self.remark,
            "unknown": list(self.unknown),
            "sentence": str(self),
        }

    def __str__(self) -> str:
        """One or two sentences."""
        row = self.row
        name = self.module or "the model"
        of_class = f" ({self.class_name})" if self.class_name else ""
        on_rank = "" if row.rank is None else f" on rank {row.rank}"
        amount = _amount(row)
        if self.kind == "weights":
            text = f"{row.place} of {name}{of_class} differs{on_rank}{amount}."
        elif self.kind == "batch":
            text = f"The model was given other inputs{on_rank}: {row.place}{amount}."
        elif self.kind == "gradients":
            text = (
                f"Gradients of parameters differ{on_rank}, {row.place} first{amount}; "
                "what made them could not be compared."
            )
        elif self.kind == "loss":
            text = (
                f"The gradient that the model was given differs{on_rank}: {row.place}"
                f"{amount}. The loss, its scale, its labels, or other code outside of "
                "the model makes it."
            )
        else:
            where = "Backward of " if self.kind == "backward" else ""
            does = "gives another result" if self.unknown else "computes differently"
            text = f"{where}{name}{of_class} {does}{on_rank}{amount}."
            seen = f" It shows at {row.place}"
            text += f"{seen}, after {self.after}." if self.after else f"{seen}."
            text += _caveat(self.unknown)
        if self.op:
            text += f" The first operation that differs: {self.op}."
        return printable(f"{text} {self.remark}".rstrip())


def _caveat(unknown: Sequence[str]) -> str:
    if not unknown:
        return ""
    more = f" and {len(unknown) - _MAX_PLACES} more" * (len(unknown) > _MAX_PLACES)
    return (
        f" The difference may come from what could not be compared: "
        f"{', '.join(unknown[:_MAX_PLACES])}{more}."
    )


def has_other_shape(row: Difference) -> bool:
    """Tells whether the two were not compared for their shapes."""
    return row.measures is None and row.shapes[0] != row.shapes[1]


def _amount(row: Difference) -> str:
    if has_other_shape(row):
        return f", of shapes {row.shapes[0]} and {row.shapes[1]}"
    if row.num_nan[0] != row.num_nan[1] or row.num_inf[0] != row.num_inf[1]:
        (nan, its_nan), (inf, its_inf) = row.num_nan, row.num_inf
        return f", by {nan} nan and {inf} inf against {its_nan} and {its_inf}"
    text = f", by {row.relative:.2g} of its norm"
    times = row.times
    if times is not None and times < 1e6:
        text += f", {times:.3g} times what {coarser(*row.dtypes)} rounding explains"
    return text
