"""The summary, and the files that hold everything: few, so that they travel."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from check import record
from check.stages import NAMES, STAGES
from check.state import CUT_OFF, FAILED, NOT_RUN, Result, State

MAX_LINES = 60
MAX_COLUMNS = 150
LOG_BYTES = 400_000  # of each stage, its beginning and its end
SHOWN_FACTS = (
    "name",
    "gpu",
    "capability",
    "compute_cap",
    "driver_version",
    "memory_gib",
)
SHOWN_FACTS += (
    "free_gib",
    "mig.mode.current",
    "torch",
    "cuda",
    "nvcc",
    "python",
    "cores",
)


def stage_lines(name: str, result: Result) -> list[str]:
    """A line for a stage, and its first errors."""
    when = "earlier" if result.is_earlier else f"{result.seconds:.0f} s"
    line = f"{result.status:8} {name:10} {when:>8}  {result.reason}"
    return [line, *(f"           {error}" for error in result.errors[:3])]


def parts_of(state: State, name: str) -> list[dict[str, Any]]:
    """The results that a stage has written, complete or not."""
    found = [record.read_json(p) for p in sorted(state.folder(name).glob("*.json"))]
    return [part for part in found if isinstance(part, dict)]


def summary(state: State) -> list[str]:
    """At most 60 lines: the device, each stage, the key figures, what was missing."""
    facts = state.facts
    head = [f"commit {facts['commit']}, sources {facts['sources']}, {facts['date']}"]
    shown = [f"{key} {facts[key]}" for key in SHOWN_FACTS if facts.get(key)]
    head.append(f"on {facts['device']}: " + ", ".join(shown))
    if facts.get("missing"):
        head.append("missing packages: " + ", ".join(facts["missing"]))
    stages: list[str] = []
    headlines: list[str] = []
    lacking: list[str] = []
    for name in NAMES:
        if name in state.results:
            stages += stage_lines(name, state.results[name])
        for part in parts_of(state, name):
            headlines += [f"{name}: {line}" for line in part.get("headlines", [])]
            lacking += [f"{name}: {line}" for line in part.get("lacking", [])]
    lines = head + stages + ["key figures:"] * bool(headlines) + headlines + lacking
    return [*fitted(lines, len(head) + len(stages) + 1), verdict(state)]


def fitted(lines: list[str], num_kept: int) -> list[str]:
    """As many lines as there is room for; the first ones are kept."""
    if len(lines) >= MAX_LINES:
        left_out = len(lines) - (MAX_LINES - 2)
        kept = lines[: max(0, min(num_kept, MAX_LINES - 2))]
        rest = lines[len(kept) : MAX_LINES - 2]
        lines = [*kept, *rest, f"({left_out} more lines in the .md)"]
    return [line if len(line) <= MAX_COLUMNS else f"{line[:147]}..." for line in lines]


def verdict(state: State) -> str:
    """The last line."""
    of_status = {
        status: [n for n in NAMES if n in state.results and state.status(n) == status]
        for status in (FAILED, CUT_OFF, NOT_RUN)
    }
    unasked = [name for name in NAMES if name not in state.results]
    said = [f"{s}: {', '.join(names)}" for s, names in of_status.items() if names]
    if not said:
        said = ["everything that was run has passed"]
    if of_status[CUT_OFF] or of_status[NOT_RUN] or unasked:
        rest = f" (not asked for: {', '.join(unasked)})" if unasked else ""
        said.append(f"not everything was run{rest}; --resume goes on")
    return "; ".join(said)


def slug(facts: dict[str, Any]) -> str:
    """The name of the result files."""
    name = str(facts.get("gpu") or facts.get("name") or "unknown")
    kind = f"gpu-{name}" if facts["device"] == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def trimmed(path: Path) -> str:
    """A log without its middle, if it is long."""
    text = path.read_text(errors="replace") if path.exists() else ""
    half = LOG_BYTES // 2
    return text if len(text) <= LOG_BYTES else f"{text[:half]}\n[...]\n{text[-half:]}"


def is_whole(state: State) -> bool:
    """Whether every stage has run to its end, on a GPU, in its real size."""
    ended = all(state.status(name) not in ("", "running", CUT_OFF) for name in NAMES)
    is_short = any("s left" in result.reason for result in state.results.values())
    return ended and not is_short and state.facts["device"] == "cuda"


def publish(state: State) -> None:
    """Writes all results as one JSON, one table and one log, again after each stage.

    They are copied to the folder that `OUT` names, if it is set, and to
    benchmarks/results once every stage has run.
    """
    stem = slug(state.facts)
    lines = ["# Check on a GPU", "", "```", *summary(state), "```", ""]
    result: dict[str, Any] = {"facts": state.facts, "stages": {}}
    logs = []
    for stage in STAGES:
        if stage.name not in state.results:
            continue
        folder = state.folder(stage.name)
        for table in sorted(folder.glob("*.md")):
            lines += [table.read_text(), ""]
        result["stages"][stage.name] = vars(state.results[stage.name]) | {
            path.name: record.read_json(path) for path in sorted(folder.glob("*.json"))
        }
        for path in sorted(folder.glob("*.jsonl")):
            result["stages"][stage.name][path.name] = path.read_text().splitlines()
        logs += [f"==== {stage.name}", trimmed(state.log(stage.name))]
    record.write_whole(state.out / f"{stem}.md", "\n".join(lines))
    record.write_whole(state.out / f"{stem}.json", json.dumps(result, indent=1) + "\n")
    record.write_whole(state.out / f"{stem}.log.txt", "\n".join(logs))
    if os.environ.get("OUT"):
        copy_to(Path(os.environ["OUT"]), state.out, stem, ("md", "json", "log.txt"))
    if is_whole(state) and not state.facts["is_quick"]:
        results = record.ROOT / "benchmarks" / "results"
        copy_to(results, state.out, stem, ("md",))
        copy_to(results / "raw", state.out, stem, ("json",))


def copy_to(folder: Path, out: Path, stem: str, kinds: tuple[str, ...]) -> None:
    """Copies files by their endings; a folder that refuses them is named."""
    try:
        for kind in kinds:
            shutil.copyfile(out / f"{stem}.{kind}", folder / f"{stem}.{kind}")
    except OSError as error:
        print(f"not copied: {error}", flush=True)
