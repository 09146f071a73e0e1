"""The page of an examination, with a heatmap of the links."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..page.render import GENERATOR, html_templates, page_style, save_page
from .diagnosis import Diagnosis
from .stage import STATES, Pair

_MOST_RANKS = 256  # in a matrix; a browser shows no more at once
_FAST_HUE, _SLOW_HUE = 210, 0  # blue, red at four times the median


@dataclass(frozen=True)
class Cell:
    """A link in the heatmap."""

    hue: int
    text: str


@dataclass(frozen=True)
class Matrix:
    """A heatmap of the links between ranks."""

    title: str
    note: str
    ranks: list[int]
    rows: list[tuple[int, list[Cell | None]]]


def save_diagnosis(path: str | os.PathLike[str], diagnosis: Diagnosis) -> Path:
    """Writes the page of a diagnosis.

    Args:
        path: The file; an older page of overflow_fast is written over, nothing else.
        diagnosis: The diagnosis.

    Raises:
        OSError: If it cannot be written, or is no page of overflow_fast.
        ImportError: If jinja2 is not installed.
    """
    from markupsafe import Markup

    pages = html_templates(Path(__file__).parent)
    return save_page(
        path,
        lambda: pages.get_template("diagnosis.html").render(
            generator=Markup(GENERATOR),
            style=Markup(page_style()),
            diagnosis=diagnosis,
            words=STATES,
            matrices=matrices_of(diagnosis),
        ),
    )


def matrices_of(diagnosis: Diagnosis) -> list[Matrix]:
    """Makes the heatmaps of latency and transfers, where links were measured."""
    found = []
    for name, title in (
        ("latency", "Latency of a small message there and back"),
        ("transfer", "Time of a large message there and back"),
    ):
        links = diagnosis.links(name)
        if links:
            found.append(_matrix(title, links))
    return found


def _matrix(title: str, links: Mapping[Pair, float]) -> Matrix:
    median = statistics.median(links.values())
    ranks = sorted({rank for pair in links for rank in pair})
    shown = ranks[:_MOST_RANKS]
    rows = [
        (a, [_cell(links.get((min(a, b), max(a, b))), median, a, b) for b in shown])
        for a in shown
    ]
    note = f"The median is {median * 1e6:.0f} us; red is four times that."
    if len(shown) < len(ranks):
        note += f" The first {len(shown)} of {len(ranks)} ranks."
    return Matrix(title, note, shown, rows)


def _cell(seconds: float | None, median: float, a: int, b: int) -> Cell | None:
    if seconds is None:
        return None
    share = min(1.0, max(0.0, math.log2(seconds / median) / 2)) if seconds else 0.0
    hue = round(_FAST_HUE + share * (_SLOW_HUE - _FAST_HUE))
    times = seconds / median if median else 1.0
    return Cell(hue, f"ranks {a} and {b}: {seconds * 1e6:.0f} us, {times:.1f} x")
