"""The command `doctor`: the machine, checked before a run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ...guard.files.json_text import dumps
from .subcommand import Commands, add_command, command, fail

if TYPE_CHECKING:
    from ..doctor.diagnosis import Diagnosis


@command(after="compare")
def add_doctor(commands: Commands) -> None:
    """Adds the command `doctor`."""
    parser = add_command(
        commands,
        "doctor",
        _run_doctor,
        "check ranks, collectives and arithmetic before a run",
        """
        doctor
        doctor --seconds 60 --json
        """,
        more=": [how](doctor.md#before-a-run-the-doctor)",
    )
    parser.description = (
        "Check ranks, collectives and arithmetic before a run. For several "
        "ranks: `torchrun --nproc-per-node 8 -m overflow_fast doctor`. Exit status: 0 "
        "fine, 1 a warning, 2 broken."
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="the limit of a stage (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--backend", help="of the collectives (default: nccl or gloo)")


def _run_doctor(parsed: argparse.Namespace) -> int:
    from ..doctor.examination import Examination
    from ..doctor.rendezvous import Address
    from ..doctor.stage import ExaminationSettings

    if not parsed.seconds > 0:
        return fail(f"--seconds must be greater than 0, got {parsed.seconds:g}")
    settings = ExaminationSettings(limit=parsed.seconds, backend=parsed.backend)
    try:
        examination = Examination(Address.from_environment(), settings)
    except ValueError as error:
        return fail(f"The ranks cannot meet: {error}")
    diagnosis = examination.run()
    if examination.is_leader:
        _tell(diagnosis, parsed.json)
    examination.part()
    return diagnosis.status


def _tell(diagnosis: Diagnosis, as_json: bool) -> None:
    from .terminal import shown

    if as_json:
        print(dumps(diagnosis.to_dict(), indent=1))
    else:
        print(shown(str(diagnosis)))
    sys.stdout.flush()
