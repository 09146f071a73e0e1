"""The command `doctor`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ..files.json_text import dumps
from .subcommand import Commands, add_command, fail

if TYPE_CHECKING:
    from ..doctor.diagnosis import Diagnosis


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "doctor",
        _run,
        "check ranks, links, collectives and arithmetic before a run",
        """
        doctor
        doctor --seconds 30 --folder checkpoints/ -o doctor.html
        """,
    )
    parser.description = (
        "Check ranks, links, collectives and arithmetic before a run. For several "
        "ranks: `torchrun --nproc-per-node 8 -m overflow_fast doctor`. Exit status: 0 "
        "fine, 1 a warning, 2 broken."
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="the limit of a stage (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--folder", help="a folder of checkpoints to write to and read")
    parser.add_argument("--backend", help="of the collectives (default: nccl or gloo)")
    parser.add_argument("-o", "--output", help="a page with a heatmap of the links")


def _run(parsed: argparse.Namespace) -> int:
    from ..doctor.examination import Examination
    from ..doctor.rendezvous import Address
    from ..doctor.stage import ExaminationSettings

    if not parsed.seconds > 0:
        return fail(f"--seconds must be greater than 0, got {parsed.seconds:g}")
    settings = ExaminationSettings(
        limit=parsed.seconds, folder=parsed.folder, backend=parsed.backend
    )
    try:
        examination = Examination(Address.from_environment(), settings)
    except ValueError as error:
        return fail(f"The ranks cannot meet: {error}")
    diagnosis = examination.run()
    status: int = diagnosis.status
    if examination.leads:
        status = max(status, _tell(diagnosis, parsed.json, parsed.output))
    examination.part()
    return status


def _tell(diagnosis: Diagnosis, as_json: bool, output: str | None) -> int:
    """Prints it and writes its page; returns 2 if the page cannot be written."""
    status = 0
    if as_json:
        print(dumps(diagnosis.to_dict(), indent=1))
    else:
        print(diagnosis)
    if output is not None:
        from ..doctor.diagnosis import save_diagnosis

        try:
            print(save_diagnosis(output, diagnosis), file=sys.stderr)
        except (OSError, ImportError) as error:
            status = fail(f"The page cannot be written: {error}")
    sys.stdout.flush()
    return status
