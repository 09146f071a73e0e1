"""Counts what an addition takes: makes each in a copy of the tree, and runs its tests.

python tools/additions.py [NAME...]  # all but `dtype`, which compiles the extension

An addition is a row of `ADDITIONS`: the places to touch, as few as the goal, code that
shows that it is everywhere, and the tests that would name what was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """One place of a file that is written to.

    Attributes:
        path: The file.
        text: What is added.
        after: The line behind which it stands; "" for a new file.
    """

    path: str
    text: str
    after: str = ""

    def make(self, root: Path) -> None:
        """Writes it.

        Raises:
            ValueError: If the line is not there, or more than once.
        """
        path = root / self.path
        if not self.after:
            path.write_text(self.text)
            return
        before = path.read_text()
        if before.count(self.after) != 1:
            raise ValueError(f"{self.path} must have {self.after!r} once")
        path.write_text(before.replace(self.after, self.after + self.text))


@dataclass(frozen=True)
class Addition:
    """Something that is added.

    Attributes:
        goal: The most places that it may take.
        places: Those that it takes.
        shows: A program that fails where it is not seen.
        tests: The arguments of pytest for the tests that concern it.
        compiles: Whether the extension has to be compiled.
    """

    goal: int
    places: Sequence[Place]
    shows: str
    tests: Sequence[str] = field(default_factory=tuple)
    compiles: bool = False

    @property
    def files(self) -> int:
        """The number of files that it touches."""
        return len({place.path for place in self.places})


_PAGES = "tests/project/test_pages.py"

ADDITIONS = {
    "monitor": Addition(
        2,
        [
            Place(
                "overflow_fast/guard/monitors/dead_units.py",
                '''"""Units that are always 0."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kinds import whole
from ..options import option
from .monitor import Monitor, MonitoredStep


@dataclass(frozen=True)
class DeadUnits(Monitor):
    """Units whose output is always 0."""

    every: int = field(
        default=100,
        metadata=option("Look at the units in one step of this many.", whole(1)),
    )

    def look(self, step: MonitoredStep) -> str | list[str]:
        return "units are dead" if step.number % self.every == 0 else []
''',
            ),
            Place(
                "overflow_fast/monitors.py",
                "from .guard.monitors.dead_units import DeadUnits as DeadUnits\n",
                "from .guard.monitors.replicas import Replicas as Replicas\n",
            ),
        ],
        """
import contextlib, io, pathlib, tempfile
import torch, overflow_fast
from overflow_fast.__main__ import main
assert overflow_fast.monitors.DeadUnits().every == 100
assert "Attributes:" in overflow_fast.monitors.DeadUnits.__doc__
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(["run", "--help"])
assert "--dead-units-every" in out.getvalue()
assert "DeadUnits(every=100)" in pathlib.Path("docs/arguments.md").read_text()
folder = pathlib.Path(tempfile.mkdtemp())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitors = [overflow_fast.monitors.DeadUnits(every=1)]
with overflow_fast.OverflowGuard(model, optimizer, monitors=monitors, log=folder / "l"):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
assert '"monitor": "DeadUnits", "text": "units are dead"' in (folder / "l").read_text()
""",
        [_PAGES, "tests/guard/test_options.py", "tests/project/test_layers.py"],
    ),
    "option": Addition(
        1,
        [
            Place(
                "overflow_fast/guard/options.py",
                """    owner: str = field(
        default="",
        metadata=option("Whose log it is.", PATH),
    )
""",
                """            see="formats.md#log",
        )
    )
    _: KW_ONLY
""",
            ),
        ],
        """
import contextlib, io, pathlib, pytest
import overflow_fast
from overflow_fast.__main__ import main
assert "owner: Whose log it is." in overflow_fast.options.Log.__doc__
with pytest.raises(TypeError, match="log.owner must be a path, got int"):
    overflow_fast.options.Log("log", owner=3)
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(["run", "--help"])
assert "--log-owner PATH" in out.getvalue()
assert '`owner=""`' in pathlib.Path("docs/arguments.md").read_text()
""",
        [_PAGES, "tests/guard/test_options.py"],
    ),
    "field": Addition(
        2,
        [
            Place(
                "overflow_fast/guard/record/record_step.py",
                """    momentum: Annotated[
        Number | None,
        _of_step(
            "the momentum of the first group, or None",
            _most,
            since="1.1",
            drawn="momentum",
        ),
    ] = None
""",
                """    ] = field(name="skipped", default=0)
""",
            ),
            Place(
                "overflow_fast/guard/record/written_lines.py",
                """        momentum=(
            optimizers[0].param_groups[0].get("momentum") if optimizers else None
        ),
""",
                """        learning_rate=to_plain(_learning_rate(optimizers)),
""",
            ),
        ],
        """
import contextlib, io, pathlib, tempfile
import torch, overflow_fast
from overflow_fast.__main__ import main
from overflow_fast.guard.files.schema import decode
from overflow_fast.guard.record.folding import fold
from overflow_fast.guard.record.record_lines import StepsLine
folder = pathlib.Path(tempfile.mkdtemp())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
with overflow_fast.OverflowGuard(model, optimizer, record=folder / "run.ofr"):
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
record = overflow_fast.read_record(folder / "run.ofr")
assert [step.momentum for step in record.steps] == [0.5] * 3
assert "momentum: The momentum of the first group" in type(record.steps[0]).__doc__
lines = [line for line in open(folder / "run.ofr") if '"kind": "steps"' in line]
assert fold([decode(line, StepsLine) for line in lines], 1).momentum == 0.5
with contextlib.redirect_stdout(io.StringIO()):
    main(["report", str(folder / "run.ofr"), "-o", str(folder / "x.html")])
assert "momentum" in (folder / "x.html").read_text()
assert "| `momentum` | the momentum" in pathlib.Path("docs/formats.md").read_text()
old = overflow_fast.read_record("tests/files/1.0/run.ofr")
assert old.steps[0].momentum is None
""",
        [_PAGES, "tests/tools/files/test_formats.py", "tests/guard/record"],
    ),
    "trainer": Addition(
        2,
        [
            Place(
                "overflow_fast/integrations/looper.py",
                '''"""A guard for the loops of looper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .trainer_support import GuardOwner, has_owner


class LooperGuardCallback(GuardOwner):
    """Attaches an `OverflowGuard` while a Looper loops."""


def add_to(looper: Any, arguments: Mapping[str, Any]) -> LooperGuardCallback | None:
    """Gives a Looper the callback, unless it has one; returns it."""
    if has_owner(looper.callbacks):
        return None
    callback = LooperGuardCallback(**arguments)
    looper.callbacks.append(callback)
    return callback
''',
            ),
            Place(
                "overflow_fast/guard/libraries.py",
                '    "looper": Library(("looper",), "looper:Looper"),\n',
                '    "torchtitan": Library(),\n',
            ),
        ],
        """
import pathlib, sys, types
class Looper:
    def __init__(self):
        self.callbacks = []
    def loop(self):
        return trainer_on_stack()
sys.modules["looper"] = types.SimpleNamespace(Looper=Looper)
from overflow_fast.guard.undo.kept_objects import is_state
from overflow_fast.integrations.script_guard import add_callback, trainer_on_stack
looper = Looper()
assert looper.loop() is looper
assert add_callback(looper, {}) is looper.callbacks[0]
assert add_callback(looper, {}) is None
Looper.__module__ = "looper"
assert not is_state(looper)
assert "integrations.looper" in pathlib.Path("docs/works-with.md").read_text()
""",
        [
            _PAGES,
            "tests/integrations/test_integrations.py",
            "tests/project/test_layers.py",
        ],
    ),
    "command": Addition(
        1,
        [
            Place(
                "overflow_fast/tools/cli/count_command.py",
                '''"""The command `count`: the steps of a flight record."""

from __future__ import annotations

import argparse

from .subcommand import Commands, add_command, command


@command(after="doctor")
def add_count(commands: Commands) -> None:
    """Adds the command `count`."""
    parser = add_command(
        commands, "count", _run, "count the steps of a record", "count run.ofr"
    )
    parser.add_argument("path", help="a flight record")


def _run(parsed: argparse.Namespace) -> int:
    from ..record.reading import read_record

    print(len(read_record(parsed.path)))
    return 0
''',
            ),
        ],
        """
import contextlib, io, pathlib
from overflow_fast.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main(["count", "tests/files/1.0/run.ofr"]) == 0
assert out.getvalue() == "35\\n"
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(["--help"])
assert "count the steps of a record" in out.getvalue()
text = pathlib.Path("docs/guides/command-line.md").read_text()
assert "| `count` | Count the steps of a record |" in text
""",
        [_PAGES, "tests/tools/cli/test_command_line.py"],
    ),
    "cause": Addition(
        2,
        [
            Place(
                "overflow_fast/guard/report/causes.py",
                """LONG_PRODUCT = Cause(
    "long product",
    "a product of many numbers is beyond the dtype's maximum",
    "Add logarithms instead.",
    sections=("It does not happen again",),
    gist="{call} has too many factors{reason}",
    remedies=("calls",),
    is_overflow=True,
    translations={"zh": "x", "ko": "y"},
)
""",
                """    sections=("If none of this is yours",),
    may_be_intended=True,
    names_maker=False,
    translations={"zh": "\u672a\u77e5", "ko": "\uc54c \uc218 \uc5c6\uc74c"},
)
""",
            ),
            Place(
                "overflow_fast/explainer/explain_origin.py",
                """        if "cumprod" in op.name and details.is_overflow:
            found.cause = causes.LONG_PRODUCT.name
""",
                "        found.reason = details.reason or found.reason\n",
            ),
        ],
        """
import json, logging, pathlib, tempfile
import torch, overflow_fast
class Product(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).half().cumprod(-1).float().mean()
folder = pathlib.Path(tempfile.mkdtemp())
model = Product(4, 20)
torch.nn.init.constant_(model.weight, 10.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logged = []
logging.getLogger("overflow_fast").addHandler(logging.Handler())
logging.getLogger("overflow_fast").handlers[-1].emit = logged.append
with overflow_fast.OverflowGuard(
    model, optimizer, "skip", log=folder / "log.jsonl", evidence=folder
) as guard:
    model(torch.ones(2, 4)).backward()
    optimizer.step()
text, page = str(guard.last_report), next(folder.rglob("page.html")).read_text()
assert "cumprod" in text and "has too many factors" in text, text
assert "cause     long product (float16)" in text, text
assert any("long product" in each.getMessage() for each in logged)
assert "long product" in page and "has too many factors" in page
assert '"cause": "long product"' in (folder / "log.jsonl").read_text()
found = json.loads(next(folder.rglob("explanation.json")).read_text())
assert found["cause"] == "long product" and found["remedies"], found
for page in ("reading-a-report.md", "my-run-is-nan.md", "zh/my-run-is-nan.md"):
    assert "long product" in pathlib.Path("docs", page).read_text()
assert "## Long product\\n\\nAdd" in pathlib.Path("docs/causes.md").read_text()
""",
        [_PAGES, "tests/project/test_causes.py", "tests/project/test_answers.py"],
    ),
    "remedy": Addition(
        1,
        [
            Place(
                "overflow_fast/explainer/remedies/rules.py",
                """    ("digamma(y)", "CALL_ON(y.clamp(min=WIDE))",
     "clamp the argument of digamma to at least WIDE"),
""",
                """    ("acosh(y)", "CALL_ON(y.clamp(min=1 + WIDE))",
     "clamp the argument of {} to at least 1 + WIDE"),
""",
            ),
        ],
        """
import pathlib, runpy, sys, tempfile
path = pathlib.Path(tempfile.mkdtemp(), "program.py")
path.write_text('''
import torch, overflow_fast
class Psi(torch.nn.Module):
    def forward(self, x):
        return x.digamma().mean()
found = overflow_fast.explain(Psi(), torch.zeros(2, 4, requires_grad=True))
''')
found = runpy.run_path(str(path))["found"]
(helps,) = [each for each in found.remedies if each.is_recommended]
assert helps.text == "clamp the argument of digamma to at least 1e-6", found
assert helps.code == "return x.clamp(min=1e-6).digamma().mean()", found
""",
        ["tests/explainer/test_rules.py"],
    ),
    # One that torch has, and that nothing needs.
    "dtype": Addition(
        4,
        [
            Place(
                "csrc/scan/dtype.h",
                '  ROW(kBits8, Bits8, "bits8", '
                "kUnsigned, 1, 1, kNoKey, kNoKey, -1, 0, false) \\\n",
                "#define OVERFLOW_FAST_DTYPES(ROW) \\\n",
            ),
            Place(
                "overflow_fast/scanner/fallback.py",
                "_UNSIGNED[torch.bits8] = 8\n",
                "_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)\n",
            ),
        ],
        """
import torch, overflow_fast
from overflow_fast.scanner import fallback
x = torch.tensor([3, 200], dtype=torch.uint8).view(torch.bits8)
stat = overflow_fast.scan([x])[0]
assert (stat.abs_min, stat.abs_max) == (3, 200), stat
assert fallback.readability(x) is fallback.Readability.READABLE
""",
        ["tests/scanner/test_scan.py"],
        compiles=True,
    ),
}


def copied(folder: Path) -> None:
    """Copies the tree, with the extension that is compiled for it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    binaries = Path("overflow_fast", "binaries")
    for path in (ROOT / binaries).glob("torch*"):
        shutil.copytree(path, folder / binaries / path.name)


def tried(addition: Addition, folder: Path) -> str:
    """Makes an addition in a copy of the tree.

    Returns:
        What went wrong; "" if it is seen everywhere, and no test fails.
    """
    copied(folder)
    for place in addition.places:
        place.make(folder)
    commands = [[sys.executable, f"docs/tools/{n}.py"] for n in ("tables", "causes")]
    if addition.compiles:
        commands.insert(0, [sys.executable, "setup.py", "build_ext", "--inplace"])
    commands.append([sys.executable, "-c", addition.shows])
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--disable-warnings"]
    commands.append([*pytest, "-p", "no:cacheprovider", *addition.tests])
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env=environment
        )
        if done.returncode:
            what = "what shows it" if command[1] == "-c" else " ".join(command[1:4])
            return f"{what}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return ""


def main() -> int:
    """Tries additions, and returns 1 if one fails or takes more than its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them")
    names = parser.parse_args().names
    names = names or [n for n, each in ADDITIONS.items() if not each.compiles]
    status = 0
    print("| to add | files | places | goal | |\n|---|---|---|---|---|")
    for name in names:
        addition = ADDITIONS[name]
        with tempfile.TemporaryDirectory() as folder:
            wrong = tried(addition, Path(folder))
        found = f"| {name} | {addition.files} | {len(addition.places)}"
        print(f"{found} | {addition.goal} | {wrong or 'seen'} |", flush=True)
        status |= bool(wrong) or len(addition.places) > addition.goal
    return status


if __name__ == "__main__":
    sys.exit(main())
