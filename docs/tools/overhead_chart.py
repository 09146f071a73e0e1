"""Writes docs/images/overhead.svg: what watching adds to a training step.

python docs/tools/overhead_chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "raw"
CHART = Path(__file__).parents[1] / "images" / "overhead.svg"
MODEL = "GPT-2 small"
_TITLE = f"Added to a training step of {MODEL}, two CPU cores, paired steps"
_BARS = {
    "guard, tripwire": ("guard", "tripwire"),
    "guard, everything": ("guard", "everything"),
    "DebugUnderflowOverflow": ("models", "ours"),
    "torch's detect_anomaly": ("models", "detect_anomaly"),
    "transformers' detector": ("models", "original"),
}
# A page that is dark shows a dark picture.
_STYLE = (
    "text { fill: #222 } .ground { fill: #fff } @media (prefers-color-scheme: dark) "
    "{ text { fill: #e8e8e8 } .ground { fill: #16181b } }"
)
_COLOURS = {"float32": "#3949ab", "bfloat16": "#7986cb"}
_LEFT, _SCALE, _HEIGHT = 205, 4.4, 44  # pixels: of names, of a percent, of a row


def percents() -> dict[str, dict[str, float]]:
    """The overhead of each by paired steps, in percent, by name and dtype."""
    return {
        name: {dtype: _percent(*place, dtype) for dtype in _COLOURS}
        for name, place in _BARS.items()
    }


def _percent(file: str, column: str, dtype: str) -> float:
    rows = [row for row in _rows(file) if row["dtype"] == dtype]
    if file == "guard":
        (row,) = [row for row in rows if row["guard"] == column]
        return round(float(row["adds"].rstrip("%")), 1)
    (row,) = [row for row in rows if row["run"] == "training step"]
    return round(100 * (float(row[column].rstrip("x")) - 1), 1)


def _rows(file: str) -> list[dict[str, Any]]:
    (path,) = RESULTS.glob(
        "guard-amd-*.json" if file == "guard" else "models-intel-*.json"
    )
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["model"] == MODEL]


def chart() -> str:
    """The chart."""
    parts = [f'<text x="10" y="24" font-weight="600">{_TITLE}</text>']
    for x, (dtype, colour) in zip((575, 660), _COLOURS.items(), strict=True):
        parts.append(f'<rect x="{x}" y="13" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="24">{dtype}</text>')
    for row, (name, values) in enumerate(percents().items()):
        y = 44 + _HEIGHT * row
        parts.append(f'<text x="10" y="{y + 20}">{name}</text>')
        for i, (dtype, value) in enumerate(values.items()):
            top, width = y + 16 * i, max(1, round(_SCALE * value, 1))
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{width}" height="14" '
                f'fill="{_COLOURS[dtype]}"/><text x="{_LEFT + width + 6}" '
                f'y="{top + 12}" font-size="12">{value:g} %</text>'
            )
    height = 44 + _HEIGHT * len(_BARS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" '
        'font-family="system-ui, sans-serif" font-size="14">\n'
        f"<title>{_TITLE}</title>\n<style>{_STYLE}</style>\n"
        f'<rect class="ground" width="740" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    CHART.write_text(chart())
