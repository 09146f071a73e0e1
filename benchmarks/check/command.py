"""The command: chooses stages, runs them one after the other, writes the summary."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from check import process, record, report
from check.stages import NAMES, Stage
from check.state import CUT_OFF, FAILED, NOT_RUN, Result, State, judge

LAST_WORDS = 4.0  # seconds kept for the summary
IGNORED = shutil.ignore_patterns(".git", "build", ".venv", "__pycache__", "*.so", ".*")


def stage_names(text: str) -> list[str]:
    """A list of stages, as `--only` takes it."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"there is no stage {name!r}; there are {', '.join(NAMES)}"
            )
    return names


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="the limit of the whole call")
    add("--only", type=stage_names, default=[], help=f"some of {','.join(NAMES)}")
    add("--resume", action="store_true", help="go on where an earlier call ended")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--quick", action="store_true", help="tiny sizes: only shows that all runs")
    add(
        "--out", type=Path, help="folder of the results; build/check if it is not given"
    )
    return parser.parse_args(arguments)


def is_writable(folder: Path) -> bool:
    """Whether a file can be made there; root may be refused, too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def elsewhere() -> Path:
    """A folder of this user for this checkout, outside of it, the same in each call."""
    mark = hashlib.sha256(str(record.ROOT).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"overflow_fast-{os.getuid()}-{mark}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        sys.exit(f"check: {folder} belongs to another user; set TMPDIR")
    return folder


def working_tree() -> Path:
    """The checkout if it can be written to, else a copy of what it holds."""
    if is_writable(record.ROOT) and is_writable(record.ROOT / "overflow_fast"):
        return record.ROOT
    copy = elsewhere() / "tree"
    shutil.copytree(record.ROOT, copy, ignore=IGNORED, dirs_exist_ok=True)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    print(f"the checkout cannot be written to: working in {copy}", flush=True)
    return copy


def environment_of(stage: Stage, state: State, tree: Path) -> dict[str, str]:
    paths = [str(tree), str(tree / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "COMMIT": state.facts["commit"],
        "CHECK_OUT": str(state.folder(stage.name)),
    }


def run_stage(stage: Stage, state: State, tree: Path, left: float) -> Result:
    """Runs a stage's commands within its limit and the time that is left."""
    state.begin(stage)
    deadline = time.monotonic() + min(stage.seconds, left)
    options = ["--device", state.facts["device"]]
    options += ["--quick"] if state.facts["is_quick"] else []
    endings: list[process.Ended] = []
    try:
        for command in stage.commands:
            endings.append(
                process.run(
                    [sys.executable, *command, *options],
                    state.log(stage.name),
                    deadline - time.monotonic(),
                    tree,
                    environment_of(stage, state, tree),
                )
            )
            if endings[-1].was_cut_off:
                break
    except OSError as error:
        return Result(FAILED, str(error), errors=[str(error)])
    except process.Interrupted as signal:
        state.set(stage.name, Result(CUT_OFF, f"by {signal}"))
        raise
    return judge(endings, state.log(stage.name).read_text(errors="replace"))


def run_stages(options: argparse.Namespace, state: State, tree: Path) -> None:
    deadline = time.monotonic() + options.minutes * 60 - LAST_WORDS
    for stage in state.chosen(options.only, options.resume):
        left = deadline - time.monotonic()
        if lacking := state.lacking(stage):
            result = Result(NOT_RUN, lacking)
        elif left < stage.least:
            left = max(0.0, left)
            result = Result(NOT_RUN, f"{left:.0f} s left, {stage.least:.0f} needed")
        else:
            print(f"== {stage.name}: {stage.question}", flush=True)
            result = run_stage(stage, state, tree, left)
            print("\n".join(report.stage_lines(stage.name, result)), flush=True)
        state.set(stage.name, result)
        report.publish(state)


def main(arguments: list[str] | None = None) -> int:
    """Runs the check.

    Returns:
        0 if nothing failed or was cut off (skipped stages do not count), else 1; 130
        after Ctrl-C or SIGTERM.
    """
    options = parse(arguments)
    process.raise_on_signals()
    out = options.out or record.ROOT / "build" / "check"
    if not is_writable(out):
        out = elsewhere() / "check"
        print(f"results go to {out}", flush=True)
    was_interrupted = False
    facts = record.facts(options.device) | {"is_quick": options.quick}
    state = State(out.resolve(), facts, options.resume)
    if state.could_not_resume:
        print("nothing is resumed: the sources or the machine are others", flush=True)
    try:
        run_stages(options, state, working_tree())
    except process.Interrupted:
        was_interrupted = True
    report.publish(state)
    print("\n".join(report.summary(state)), flush=True)
    bad = any(result.status in (FAILED, CUT_OFF) for result in state.results.values())
    return 130 if was_interrupted else int(bad)
