"""What became of each stage, kept on disk after every change."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from check.process import Ended
from check.record import read_json, write_json
from check.stages import SKIPPED, STAGES, Stage

PASSED, FAILED, CUT_OFF, NOT_RUN = "passed", "FAILED", "CUT OFF", "skipped"
ERROR = re.compile(r"^(FAILED|ERROR|FAIL\b)|\berror:|^\w*(Error|Exception)\b|Error: ")
# What must be the same for a stage that passed not to be repeated.
KEY = ("commit", "sources", "device", "gpu", "name", "torch", "cuda", "is_quick")


@dataclass
class Result:
    """How a stage ended.

    Attributes:
        status: One of the four words above, or "running".
        reason: Why it was skipped or cut off, else its last line.
        seconds: How long it took.
        errors: The first error lines of its log.
        is_earlier: An earlier call ran it.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    is_earlier: bool = False


class State:
    """The results of a check in a folder."""

    def __init__(self, out: Path, facts: dict[str, Any], resumes: bool) -> None:
        self.out, self.facts = out, facts
        self.results: dict[str, Result] = {}
        kept = read_json(out / "state.json")
        is_same = kept is not None and all(
            kept["facts"].get(name) == facts.get(name) for name in KEY
        )
        self.could_not_resume = resumes and kept is not None and not is_same
        if resumes and is_same:
            for name, values in kept["stages"].items():
                self.results[name] = Result(**values)
                self.results[name].is_earlier = True
        elif kept is not None:
            shutil.rmtree(out / "stages", ignore_errors=True)  # made by an earlier call
        self.save()

    def folder(self, name: str) -> Path:
        return self.out / "stages" / name

    def log(self, name: str) -> Path:
        return self.folder(name) / "log.txt"

    def begin(self, stage: Stage) -> None:
        """Empties the stage's folder and notes that it runs."""
        shutil.rmtree(self.folder(stage.name), ignore_errors=True)
        self.folder(stage.name).mkdir(parents=True)
        self.set(stage.name, Result("running"))

    def set(self, name: str, result: Result) -> None:
        self.results[name] = result
        self.save()

    def save(self) -> None:
        stages = {name: asdict(result) for name, result in self.results.items()}
        write_json(self.out / "state.json", {"facts": self.facts, "stages": stages})

    def status(self, name: str) -> str:
        return self.results[name].status if name in self.results else ""

    def chosen(self, only: list[str], resumes: bool) -> list[Stage]:
        """The stages to run: what failed before and holds up no other comes last."""
        wanted = [s for s in STAGES if not only or s.name in only]
        if resumes:
            wanted = [s for s in wanted if self.status(s.name) != PASSED]
        needed = {name for stage in wanted for name in stage.needs}
        return sorted(
            wanted,
            key=lambda s: self.status(s.name) == FAILED and s.name not in needed,
        )

    def lacking(self, stage: Stage) -> str:
        """Why a stage cannot run: what it needs has not passed."""
        for name in stage.needs:
            if self.status(name) not in ("", PASSED):
                return f"{name}: {self.status(name)}"
        return ""


def judge(endings: list[Ended], log: str) -> Result:
    """One result of the commands of a stage."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else ""
    result = Result(PASSED, last, sum(each.seconds for each in endings))
    codes = [each.code for each in endings if not each.was_cut_off]
    bad = [code for code in codes if code not in (0, SKIPPED)]
    if bad:
        result.status = FAILED
        result.reason = f"exit status {bad[0]}" if bad[0] > 0 else f"signal {-bad[0]}"
        result.errors = [line[:300] for line in lines if ERROR.search(line)][:20]
        result.errors = result.errors or lines[-1:]
    elif any(each.was_cut_off for each in endings):
        result.status = CUT_OFF
        result.reason = f"after {result.seconds:.0f} s; last: {last}"
    elif all(code == SKIPPED for code in codes):
        result.status = NOT_RUN
    return result
