"""Joins the parts of a GPU check into one JSON and one table, which it prints.

python report.py FOLDER: the folder holds a JSON file of each benchmark, and what
check.sh says of the stages (`summary.txt`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from common import size_text

RESULTS = Path(__file__).parent.parent / "results"


def rows_of(part: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    return [row for row in (part or {}).get("rows", []) if row["kind"] == kind]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def scan_tables(part: dict[str, Any] | None) -> list[str]:
    lines = []
    for row in rows_of(part, "ceiling"):
        read, copy = row["plain read"]["gb_per_s"], row["copy"]["gb_per_s"]
        lines += [f"Ceilings: plain read {read:.0f} GB/s, copy {2 * copy:.0f} GB/s", ""]
    cells = [
        [
            row.get("dtype", row.get("layout", "")),
            size_text(row["bytes"]),
            row.get("l2", ""),
            f"{row['scan']['gb_per_s']:.4g}",
            f"{row['plain read']['over_scan']:.3f}",
        ]
        for kind in ("bandwidth", "layout")
        for row in rows_of(part, kind)
    ]
    lines += table(["tensor", "size", "L2", "scan GB/s", "of a plain read"], cells)
    names = ("original", "aminmax", "foreach_norm", "unscale")
    cells = [
        [
            f"{row['dtype']}, {size_text(row['bytes'])}, {row['kind']}",
            *(f"{row[n]['over_scan']:.3g}" if n in row else "" for n in names),
        ]
        for kind in ("alternatives", "with syncs")
        for row in rows_of(part, kind)
    ]
    lines += table(["how much longer take", *names], cells)
    cells = [
        [str(row["tensors"]), f"{row['scan']['seconds'][1] * 1e6:.1f}"]
        for row in rows_of(part, "list")
    ]
    lines += table(["tensors of 4 KiB", "GPU us"], cells)
    cells = [
        [row["values"], f"{row['scan']['gb_per_s']:.0f}"]
        for row in rows_of(part, "nonfinite")
    ]
    lines += table(["1 GiB of bfloat16", "GB/s"], cells)
    cells = [
        [str(row["blocks"]), size_text(row["bytes"]), f"{row['gb_per_s']:.0f}"]
        for row in rows_of(part, "blocks")
    ]
    return lines + table(["blocks a multiprocessor", "size", "GB/s"], cells)


def hook_tables(part: dict[str, Any] | None) -> list[str]:
    cells = [
        [row["chain"], row["watched"], f"{row['us'][1]:.2f}", f"{row['added_us']:.2f}"]
        for row in rows_of(part, "module")
    ]
    lines = table(["chain of", "watched by", "host us a module", "added"], cells)
    cells = [
        [
            row["sync"],
            str(row["host_waits_in_10_steps"]),
            str(row["slots"]),
            str(row.get("bytes_added", "")),
        ]
        for row in rows_of(part, "step")
    ]
    return lines + table(["sync", "waits in 10 steps", "slots", "bytes added"], cells)


def variant_tables(part: dict[str, Any] | None) -> list[str]:
    cells = [
        [
            row["variant"],
            row["dtype"],
            size_text(row["bytes"]),
            f"{row['gb_per_s']:.0f}",
        ]
        for row in rows_of(part, "constants")
    ]
    lines = table(["threads, loads, blocks", "dtype", "size", "GB/s"], cells)
    cells = [
        [
            str(row["tensors"]),
            str(row["large"]),
            f"{row['host_us']:.2f}",
            f"{row['gpu_us']:.2f}",
        ]
        for row in rows_of(part, "parameters")
    ]
    lines += table(["tensors in a list", "32 KiB", "host us", "GPU us"], cells)
    cells = [
        [row["way"], str(row["slots"]), row["unit"], f"{row['us']:.2f}"]
        for row in rows_of(part, "to the host")
    ]
    return lines + table(["way to the host", "slots", "time of", "us"], cells)


def model_table(part: dict[str, Any] | None) -> list[str]:
    names = {
        "step": "ours",
        "lagged": "ours, lagged",
        "guard": "guard",
        "guard, lagged": "guard, lagged",
        "guard, gradients": "guard, gradients",
        "original": "original",
    }
    cells = [
        [
            row["model"],
            f"{row['bare']['seconds'][1] * 1e3:.1f} ms",
            *(f"{row[name]['over_bare']:.3f}x" for name in names),
        ]
        for row in rows_of(part, "training step")
    ]
    return table(["training step", "bare", *names.values()], cells)


def compile_table(part: dict[str, Any] | None) -> list[str]:
    cells = [
        [
            row["model"],
            row["mode"],
            f"{row['bare']['seconds'][1] * 1e3:.1f} ms",
            f"{row['guard']['over_bare']:.3f}x",
        ]
        for row in rows_of(part, "compiled step")
    ]
    return table(["compiled training step", "mode", "bare", "guard"], cells)


def main() -> None:
    folder = Path(sys.argv[1])
    parts = {
        name: json.loads(path.read_text()) if path.exists() else None
        for name in ("scan", "hooks", "models", "variants", "compile")
        for path in [folder / f"{name}.json"]
    }
    facts = next((part["device"] for part in parts.values() if part), {})
    summary = (folder / "summary.txt").read_text().splitlines()
    lines = ["# On a GPU", "", *summary, "", *scan_tables(parts["scan"])]
    lines += variant_tables(parts["variants"])
    lines += hook_tables(parts["hooks"]) + model_table(parts["models"])
    lines += compile_table(parts["compile"])
    lines += [", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    slug = re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", "no gpu").lower()).strip("-")
    target = RESULTS if "gpu" in facts else folder
    (target / f"gpu-{slug}.md").write_text("\n".join(lines))
    result = {"device": facts, "summary": summary, **parts}
    (target / f"gpu-{slug}.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
