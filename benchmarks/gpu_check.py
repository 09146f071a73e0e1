"""Checks a machine with a GPU in one call: builds, tests and measures, in stages.

Each stage runs within its limit, the most valuable first. Its log and results are on
disk as they come; all are joined in a table, a JSON file and a log after each stage.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import facts
from facts import ROOT, SKIPPED, find_nvcc, write_json, write_whole

PYTHON = sys.executable
PASSED, FAILED, CUT_OFF = "passed", "FAILED", "CUT OFF"
NOT_RUN, NO_TIME, RUNNING = "skipped", "no time", "running"
ERROR = re.compile(
    r"\bFAILED\b|^(ERROR|FAIL\b)|\berror:|^\w*(Error|Exception)\b|Error: "
)
PACKAGES = ("torch", "transformers", "pytest", "pytest-xdist", "hypothesis")
PACKAGES += ("lightning", "accelerate", "ninja", "numpy")
# What must be the same for a stage that passed not to be repeated.
KEY = ("commit", "sources", "device", "name", "torch", "is_quick")
GRACE = 5.0  # seconds in which pytest, interrupted, prints what has failed
LAST_WORDS = 4.0  # seconds kept for the summary
MAX_LINES, MAX_COLUMNS = 60, 150
LOG_BYTES = 400_000  # of each stage in the joined log: its beginning and its end
SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNCOPIED = shutil.ignore_patterns(".*", "build", "__pycache__", "*.so")
Commands = list[list[str]]


class CannotRunError(Exception):
    """A stage cannot do its work here; the message says why."""


class CutOffError(Exception):
    """A command reached its limit; the message is what it had printed last."""


class Stage(NamedTuple):
    """One part of the check."""

    name: str
    seconds: float  # its own limit on a machine with a GPU
    least: float  # it is not begun with fewer seconds left
    commands: Callable[[str, bool], Commands]  # of --device and --quick
    needs: tuple[str, ...] = ()  # stages that must not have failed
    refusal: str | None = None  # printed where the machine does not let it work


class Result(NamedTuple):
    """How a stage ended."""

    status: str
    reason: str = ""  # why it did not pass, else the last line of its log
    when: str = ""  # the seconds it took, or "earlier": it was resumed
    errors: Sequence[str] = ()  # the first error lines of its log


def program(device: str) -> str:
    """The path of the program that needs no torch, compiled by the stage `kernel`."""
    return f"{ROOT}/build/kernel_program_{device}"


def kernel(device: str, is_quick: bool) -> Commands:
    if device == "cuda":
        compiler = [find_nvcc() or "", "-arch=native", "-lineinfo", "-x", "cu"]
    else:  # emulated: see the Makefile
        compiler = [os.environ.get("CXX", "g++"), "-pthread", "-fno-strict-aliasing"]
        compiler += ["-Itests/cpp/cuda_emulation", "-x", "c++"]
    if not compiler[0]:
        raise CannotRunError("nvcc was not found (set CUDA_HOME)")
    (ROOT / "build").mkdir(exist_ok=True)
    sources = [str(path) for path in (ROOT / "csrc/scan/cuda").glob("*.cu")]
    files = ["tests/cpp/cuda_kernel_test.cpp", *sources, "-o", program(device)]
    compiling = [*compiler, "-std=c++20", "-O2", *files]
    return [compiling, [program(device), *["few"] * is_quick]]


def build(device: str, is_quick: bool) -> Commands:
    has_kernels = "from overflow_fast import _C; "
    has_kernels += "assert _C.has_kernels('cuda'), 'built without kernels'"
    checking = [PYTHON, "-c", has_kernels]
    wish = f"OVERFLOW_FAST_CUDA={int(device == 'cuda')}"
    building = ["env", wish, PYTHON, "setup.py", "-q", "build_ext", "--inplace"]
    return [building, *[checking] * (device == "cuda")]


def pytest(*arguments: str) -> list[str]:
    """pytest's command; -v shows where it was, should it be cut off."""
    if not importlib.util.find_spec("pytest"):
        raise CannotRunError("pytest is missing")
    options = ["-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "--skip-missing"]
    return [PYTHON, "-m", "pytest", *options, *arguments]


def gpu_tests(device: str, is_quick: bool) -> Commands:
    chosen = ["-m", "cuda", *["tests/scanner/test_cuda.py"] * is_quick]
    return [pytest(*chosen, *["--require-cuda"] * (device == "cuda"))]


def other_tests(device: str, is_quick: bool) -> Commands:
    chosen = ["-m", "not cuda", *["tests/base/test_names.py"] * is_quick]
    if importlib.util.find_spec("xdist"):
        chosen += ["-n", "auto", "--maxprocesses", "16"]
        chosen += ["--dist", "loadfile", "--no-loadscope-reorder"]
    return [pytest(*chosen)]


def sanitizer(device: str, is_quick: bool) -> Commands:
    """compute-sanitizer over the program without torch, then over a few tests."""
    if device == "cpu":
        raise CannotRunError("needs a GPU; `make sanitize` checks the emulation")
    beside = Path(find_nvcc() or "/usr/local/cuda/bin/nvcc").parent
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(beside)])
    found = shutil.which("compute-sanitizer", path=folders)
    if found is None:
        raise CannotRunError("compute-sanitizer was not found")
    few = "cuda and (test_layouts or test_planted_values or test_lists_of_any_length)"
    of_torch = ["--kernel-regex", "kns=overflow_fast"]  # torch has kernels of its own
    of_torch += pytest(
        "-k", few, "tests/scanner/test_scan.py", "tests/scanner/test_cuda.py"
    )
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    runs = [(tool, [program(device), "few"]) for tool in tools]
    runs += [(tool, of_torch) for tool in tools[:3]]
    return [[found, "--tool", t, "--error-exitcode", "9", *run] for t, run in runs]


def scripts(*names: str) -> Callable[[str, bool], Commands]:
    def commands(device: str, is_quick: bool) -> Commands:
        options = ["--device", device, *["--quick"] * is_quick]
        return [[PYTHON, f"benchmarks/bench_{name}.py", *options] for name in names]

    return commands


REFUSAL = "[Dd]evice (is )?not supported|Unable to find"
BUILD = ("build",)
STAGES = (
    Stage("kernel", 120, 15, kernel),
    Stage("build", 240, 30, build),
    # Early, so that a short loan of a GPU decides what only a GPU can.
    Stage("variants", 180, 30, scripts("variants", "constants"), BUILD),
    Stage("gpu-tests", 150, 15, gpu_tests, BUILD),
    Stage("scan", 100, 15, scripts("scan", "layouts", "lists"), BUILD),
    Stage("hooks", 60, 10, scripts("hooks"), BUILD),
    Stage("models", 120, 20, scripts("models"), BUILD),
    Stage("compile", 120, 30, scripts("compile"), BUILD),
    Stage("tests", 300, 30, other_tests, BUILD),
    Stage("sanitizer", 150, 20, sanitizer, ("kernel",), REFUSAL),
)


def run(command: list[str], log: Path, seconds: float, env: dict[str, str]) -> int:
    """Runs a command that prints to a log, and leaves no process of it behind.

    Returns:
        The exit status, negative for a signal.

    Raises:
        CutOffError: It did not end within these seconds.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | env,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise CutOffError("".join(lines_of(log)[-1:])) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def text_of(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def lines_of(log: Path) -> list[str]:
    return [line.strip()[:300] for line in text_of(log).splitlines() if line.strip()]


def judge(
    codes: list[int], cut_off: str, lines: list[str], refusal: str | None
) -> Result:
    """One result of a stage's exit statuses, of its end if cut off, and of its log."""
    bad = [code for code in codes if code not in (0, SKIPPED)]
    refused = [line for line in lines if refusal and re.search(refusal, line)]
    errors = [line for line in lines if ERROR.search(line)][:20]
    if bad and refused:
        return Result(NOT_RUN, refused[0])
    if bad:
        reason = f"exit status {bad[0]}" if bad[0] > 0 else f"signal {-bad[0]}"
        return Result(FAILED, reason, errors=errors or lines[-1:])
    if cut_off:
        return Result(CUT_OFF, cut_off, errors=errors)
    return Result(NOT_RUN if codes and all(codes) else PASSED, "".join(lines[-1:]))


class Check:
    """The results of a check, in a folder and there up to date after every change."""

    def __init__(self, out: Path, found: dict[str, Any], resumes: bool) -> None:
        self.out, self.facts = out, found
        gpu = f"gpu {found.get('name', 'unknown')}"
        name = gpu if found["device"] == "cuda" else "cpu"
        self.stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        self.results: dict[str, Result] = {}
        file = out / f"{self.stem}.json"
        kept = json.loads(file.read_text()) if resumes and file.exists() else None
        if kept and any(kept["facts"].get(key) != found.get(key) for key in KEY):
            print("nothing is resumed: the sources or the machine are others")
        elif kept:
            for name, values in kept["stages"].items():
                fields = {field: values[field] for field in Result._fields}
                self.results[name] = Result(**fields | {"when": "earlier"})
        if not self.results:
            shutil.rmtree(out / "stages", ignore_errors=True)

    def folder(self, name: str) -> Path:
        return self.out / "stages" / name

    def status(self, name: str) -> str:
        return self.results[name].status if name in self.results else ""

    def names(self, *statuses: str) -> list[str]:
        return [stage.name for stage in STAGES if self.status(stage.name) in statuses]

    def set(self, name: str, result: Result) -> None:
        self.results[name] = result
        self.publish()

    def chosen(self, only: list[str]) -> list[Stage]:
        """The stages to run. What failed before comes last, unless others need it."""
        wanted = [s for s in STAGES if s.name in only and self.status(s.name) != PASSED]
        failed = {stage for stage in STAGES if self.status(stage.name) == FAILED}
        return sorted(wanted, key=lambda stage: stage in failed and stage.needs != ())

    def run(self, stage: Stage, left: float) -> Result:
        """Runs a stage within its limit and the seconds that are left."""
        for name in stage.needs:
            if self.status(name) not in ("", PASSED):
                return Result(NOT_RUN, f"{name}: {self.status(name)}")
        if left < stage.least:
            return Result(NO_TIME, f"{max(0, left):.0f} s left, {stage.least} needed")
        folder, device = self.folder(stage.name), self.facts["device"]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.set(stage.name, Result(RUNNING))
        env = {"CHECK_OUT": str(folder), "COMMIT": self.facts["commit"]}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        begin, codes, cut_off = time.monotonic(), [], ""
        end = begin + (min(stage.seconds, left) if device == "cuda" else left)
        log = folder / "log.txt"
        try:
            for command in stage.commands(device, self.facts["is_quick"]):
                codes.append(run(command, log, end - time.monotonic(), env))
        except CannotRunError as error:
            return Result(NOT_RUN, str(error))
        except OSError as error:
            return Result(FAILED, str(error))
        except CutOffError as error:
            cut_off = f"after {end - begin:.0f} s; last: {error}"
        except KeyboardInterrupt as error:
            self.set(stage.name, Result(CUT_OFF, f"by {error}"))
            raise
        result = judge(codes, cut_off, lines_of(log), stage.refusal)
        return result._replace(when=f"{time.monotonic() - begin:.0f} s")

    def parts(self, name: str) -> dict[str, Any]:
        """The results that a stage has written, complete or not, by file names."""
        files = sorted(self.folder(name).glob("*.json"))
        return {file.name: json.loads(file.read_text()) for file in files}

    def lines(self, name: str) -> list[str]:
        """A line for a stage, and its first errors."""
        status, reason, when, errors = self.results[name]
        line = f"{status:8} {name:10} {when:>8}  {reason}"
        return [line, *(f"           {error}" for error in errors[:3])]

    def summary(self) -> list[str]:
        """At most 60 lines: the machine, each stage, key figures, what is missing."""
        on = ", ".join(f"{key} {value}" for key, value in self.facts.items() if value)
        lines = textwrap.wrap(on, MAX_COLUMNS)
        for name in self.results:
            lines += self.lines(name)
        for kind in ("headlines", "lacking"):
            for name in self.results:
                for part in self.parts(name).values():
                    lines += [f"{name}: {line}" for line in part.get(kind, [])]
        if len(lines) >= MAX_LINES:
            num_omitted = len(lines) - (MAX_LINES - 2)
            lines[MAX_LINES - 2 :] = [f"({num_omitted} more lines in the JSON file)"]
        lines.append(self.verdict())
        return [line[:MAX_COLUMNS] for line in lines]

    def verdict(self) -> str:
        said = []
        for word in (FAILED, CUT_OFF, NO_TIME, NOT_RUN, ""):
            if names := self.names(word):
                said.append(f"{word or 'not asked for'}: {', '.join(names)}")
        return "; ".join([*said, "--resume goes on"]) if said else "all stages passed"

    def publish(self) -> None:
        """Joins all results in three files, so that they travel, and copies them.

        To the folder that `OUT` names, if it is set, and to benchmarks/results once
        every stage has run to its end on a GPU.
        """
        report = ["# Check on a GPU", "", "```", *self.summary(), "```", ""]
        stages, logs = {}, []
        for name, result in self.results.items():
            stages[name] = result._asdict() | self.parts(name)
            report += [table.read_text() for table in self.folder(name).glob("*.md")]
            log, half = text_of(self.folder(name) / "log.txt"), LOG_BYTES // 2
            if len(log) > LOG_BYTES:
                log = f"{log[:half]}\n[...]\n{log[-half:]}"
            logs += [f"==== {name}", log]
        write_whole(self.out / f"{self.stem}.md", "\n".join(report))
        write_whole(self.out / f"{self.stem}.log.txt", "\n".join(logs))
        result = {"facts": self.facts, "stages": stages}
        write_json(self.out / f"{self.stem}.json", result)
        if out := os.environ.get("OUT"):
            self.copy_to(Path(out), "md", "log.txt", "json")
        is_whole = len(self.names(PASSED, FAILED, NOT_RUN)) == len(STAGES)
        if is_whole and self.facts["device"] == "cuda" and not self.facts["is_quick"]:
            self.copy_to(ROOT / "benchmarks/results", "md")
            self.copy_to(ROOT / "benchmarks/results/raw", "json")

    def copy_to(self, folder: Path, *kinds: str) -> None:
        try:
            for kind in kinds:
                shutil.copy(self.out / f"{self.stem}.{kind}", folder)
        except OSError as error:
            print(f"not copied: {error}", flush=True)


def collect_facts(device: str) -> dict[str, Any]:
    """The commit, the software and the device that all results belong to."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = {
        **facts.origin(),
        "device": device,
        "cores": os.cpu_count(),
        "missing": [name for name in PACKAGES if name not in versions],
    }
    if device == "cuda":
        nvcc = facts.output_of([find_nvcc() or "nvcc", "--version"])
        found |= facts.nvidia_smi()
        found["nvcc"] = ", ".join(re.findall(r"release ([\d.]+)", nvcc))
    return found | versions


def move_elsewhere() -> NoReturn:
    """Runs this check in a copy of the checkout, in the temporary folder."""
    mark = hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    copy = Path(tempfile.gettempdir()) / f"overflow_fast-{os.getuid()}-{mark}"
    copy.mkdir(mode=0o700, exist_ok=True)
    if copy.stat().st_uid != os.getuid():
        sys.exit(f"gpu_check: {copy} belongs to another user; set TMPDIR")
    os.environ["COMMIT"] = facts.commit()  # .git stays behind
    shutil.copytree(ROOT, copy, ignore=UNCOPIED, dirs_exist_ok=True)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    print(f"the checkout cannot be written to: working in {copy}", flush=True)
    os.execv(PYTHON, [PYTHON, str(copy / "benchmarks/gpu_check.py"), *sys.argv[1:]])


def interrupt(number: int, frame: object) -> NoReturn:
    """Lets the first signal end the running stage; the summary is still written."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    names = [stage.name for stage in STAGES]
    add("--minutes", type=float, default=9.0, help="the limit of the whole call")
    add("--only", nargs="+", choices=names, default=names, help="these stages")
    add("--resume", action="store_true", help="go on where an earlier call ended")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--quick", action="store_true", help="tiny sizes: only shows that all runs")
    add("--out", type=Path, default=ROOT / "build/check", help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the check.

    Returns:
        0 if nothing failed or was cut off (skipped stages do not count), else 1; 130
        after Ctrl-C or SIGTERM.
    """
    options = parse(arguments)
    end = time.monotonic() + options.minutes * 60 - GRACE - LAST_WORDS
    if not all(os.access(path, os.W_OK) for path in (ROOT, ROOT / "overflow_fast")):
        move_elsewhere()
    for each in SIGNALS:
        signal.signal(each, interrupt)
    found = collect_facts(options.device) | {"is_quick": options.quick}
    check = Check(options.out.resolve(), found, options.resume)
    was_interrupted = False
    try:
        for stage in check.chosen(options.only):
            print(f"== {stage.name}", flush=True)
            check.set(stage.name, check.run(stage, end - time.monotonic()))
            print(*check.lines(stage.name), sep="\n", flush=True)
    except KeyboardInterrupt:
        was_interrupted = True
    print(*check.summary(), sep="\n", flush=True)
    return 130 if was_interrupted else int(bool(check.names(FAILED, CUT_OFF)))


if __name__ == "__main__":
    sys.exit(main())
