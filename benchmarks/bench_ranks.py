"""How guards of up to 256 ranks come through scripted incidents: collectives, files."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from common import progress, write
from simulated_ranks import SCENARIOS, Network, bytes_of_lines, files_of, play
from timing import QUICK

WORLDS = (8, 16) if QUICK else (8, 32, 128, 256)
COLUMNS = [
    "ranks",
    "scenario",
    "collectives a rank",
    "bytes a rank gives",
    "log and record, files",
    "log and record, KiB",
    "evidence, files",
    "evidence, KiB",
    "ranks with an error",
    "different words",
    "bad step, s of all threads",
]
NOTES = (
    "Ranks are threads of one process, which take turns; collectives exchange Python "
    "objects, so that no time is that of a network. Guard, agreement, log, record, "
    "evidence and replay are the real ones, with `ranks='rank0'`. Three steps, the "
    "second of which is bad. `different words` counts what ranks say of it."
)


def row_of(world: int, name: str) -> dict[str, Any]:
    """Plays a scenario."""
    with tempfile.TemporaryDirectory() as folder:
        network, path = Network(world), Path(folder)
        begin = time.perf_counter()
        seen = play(SCENARIOS[name](world), network, path)
        progress(f"{name}, {world} ranks: {time.perf_counter() - begin:.1f} s")
        alive = [each for each in seen if not isinstance(each, Exception)]
        files = files_of(path)
        lines = bytes_of_lines(path)
        progress(f"  bytes of a log's line: {lines}")
    count = files["log"][0] + files["record"][0]
    size = files["log"][1] + files["record"][1]
    words = {(each.headline, each.cause, each.error) for each in alive}
    return {
        "ranks": world,
        "scenario": name,
        "collectives a rank": max(network.joined),
        "bytes a rank gives": max(network.num_bytes),
        "log and record, files": count,
        "log and record, KiB": round(size / 1024, 1),
        "evidence, files": files["evidence"][0],
        "evidence, KiB": round(files["evidence"][1] / 1024, 1),
        "ranks with an error": sum(bool(each.error) for each in alive),
        "different words": len(words),
        "bad step, s of all threads": round(max(each.seconds for each in alive), 2),
    }


def main() -> None:
    """Plays all scenarios."""
    logging.getLogger("overflow_fast").setLevel(logging.ERROR)
    rows = [row_of(world, name) for world in WORLDS for name in SCENARIOS]
    write("ranks", "Many ranks, simulated", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
