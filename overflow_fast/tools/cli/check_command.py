"""The command `check`: if saved checkpoints are finite, and which tensors are not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...guard.files.json_text import dumps
from ...guard.files.reading import why_unreadable
from .subcommand import Commands, add_command, command, fail

if TYPE_CHECKING:
    from ...guard.saved_state import SavedState
    from ...guard.verdict.rules import Rules

_FINITE, _BAD, _UNKNOWN = 0, 1, 2  # exit statuses; of several paths 1 goes first


@command(after="doctor")
def add_check(commands: Commands) -> None:
    """Adds the command `check`."""
    parser = add_command(
        commands,
        "check",
        _run_check,
        "check if saved checkpoints are finite, and name the tensors that are not",
        """
        check model.safetensors
        check checkpoint-500/ --json
        """,
        more=": [what it reads](production.md#before-you-save)",
    )
    parser.description = (
        "Check if saved checkpoints are finite, and name the tensors that are not: "
        "files of safetensors and of torch.save, and folders of them or of "
        "torch.distributed.checkpoint. Nothing in them is executed. Exit status: 0 "
        "finite, 1 a tensor is not, 2 not all could be checked."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file or a folder")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="RULE",
        help="an intended value, such as '*:buffer.mask=-inf'; can be given again",
    )
    parser.add_argument("--json", action="store_true", help="print a line for each")


def _run_check(parsed: argparse.Namespace) -> int:
    from ...guard.verdict.rules import Rules

    try:
        rules = Rules(_allowed(parsed.allow))
    except ValueError as error:
        return fail(f"overflow_fast check: {error}")
    status = _FINITE
    for path in parsed.paths:
        found = _checked(path, rules)
        if parsed.json:
            print(dumps(found.to_dict()))
        else:
            print(found, file=sys.stdout if found.num_tensors else sys.stderr)
        own = {True: _FINITE, False: _BAD, None: _UNKNOWN}[found.is_finite]
        status = own if status == _FINITE or own == _BAD else status
    return status


def _checked(path: str, rules: Rules) -> SavedState:
    from ...guard.saved_state import SavedState, check_saved

    try:
        return check_saved(path, rules)
    except (OSError, ValueError) as error:  # the other paths are checked all the same
        return SavedState(path, not_checked=[why_unreadable(error)])


def _allowed(typed: Iterable[str]) -> dict[str, list[str]]:
    """The rules of all `--allow`; several for one place count together."""
    allowed: dict[str, list[str]] = {}
    for text in typed:
        place, found, kinds = text.rpartition("=")
        if not found:
            raise ValueError(
                f"--allow must be such as '*:buffer.mask=-inf', got {text!r}"
            )
        allowed.setdefault(place, []).extend(kinds.split(","))
    return allowed
