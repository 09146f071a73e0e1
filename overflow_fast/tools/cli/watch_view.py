"""Draws the summary of a run in a terminal, with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...base.text import counted, printable
from ...base.types import TensorPath
from ..record.table import DRAWN

Numbers = Mapping[str, Any]

_FEW_BITS = 1.0  # half of the dtype's maximum, where Headroom() warns, too
_SOME_BITS = 4.0  # 1/16 of it; chosen


def view_of(found: Numbers) -> RenderableType:
    """Returns what the terminal shows of a summary.

    Args:
        found: See `summary_of()`.
    """
    parts: list[RenderableType] = [_title(found), _ranks(found["ranks"])]
    parts += [_entries(found["worst"])] if found["worst"] else [Text("No steps yet.")]
    if found["incidents"]:
        parts.append(_incidents(found["incidents"]))
    return Group(*parts)


def _title(found: Numbers) -> Text:
    models = ", ".join(found["models"]) or "a run"
    ranks = f"{len(found['ranks'])} of {counted(found['world_size'], 'rank')}"
    host = "" if found["host"] is None else f" on {found['host']}"
    policy = "" if found["policy"] is None else f", on_overflow={found['policy']}"
    return Text(printable(f"{models}{host}, {ranks}{policy}"), style="bold")


def _ranks(ranks: Sequence[Numbers]) -> Table:
    used = [name for name in DRAWN if any(r.get(name) is not None for r in ranks)]
    table = _table("rank", "step", "s ago", "s/step", "guard", *used, "skipped")
    for each in ranks:
        if each["step"] is None:
            table.add_row(str(each["rank"]), "none yet")
            continue
        share = each["guard_share"]
        table.add_row(
            str(each["rank"]),
            str(each["step"]),
            f"{each['age_seconds']:.0f}",
            _number(each["step_seconds"]),
            "" if share is None else f"{share:.1%}",
            *(_number(each[name]) for name in used),
            str(each["skipped"]),
        )
    return table


def _entries(worst: Sequence[Numbers]) -> Table:
    table = _table("bits left", "per step", "largest", "dtype", "rank")
    table.add_column("where")
    for each in worst:
        bits = each["headroom_bits"]
        trend = each["trend"]
        table.add_row(
            Text(f"{bits:.1f}", style=_style(bits)),
            "" if trend is None else f"{trend:+.2f}",
            _number(each["abs_max"]),
            Text(printable(each["dtype"])),
            str(each["rank"]),
            Text(printable(_where(each))),
        )
    return table


def _where(entry: Numbers) -> str:
    """An entry as pages name it, such as `h.0: gradient of weight`."""
    names = ("module", "kind", "label")
    return str(TensorPath.from_label(*(entry[name] for name in names)))


def _style(bits: float) -> str:
    if bits < _FEW_BITS:
        return "bold red"
    return "yellow" if bits < _SOME_BITS else ""


def _incidents(incidents: Sequence[Numbers]) -> Table:
    table = _table("incident at", "rank", "step")
    table.add_column("action")
    for each in incidents:
        first, last = each["step"], each["last_step"]
        table.add_row(
            datetime.fromtimestamp(each["time"]).isoformat(" ", "seconds"),
            str(each["rank"]),
            str(first) if first == last else f"{first} to {last}",
            Text(printable(_actions(each["actions"]))),
        )
    return table


def _actions(actions: Mapping[str, int]) -> str:
    return ", ".join(
        name if count == 1 else f"{count} x {name}" for name, count in actions.items()
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
