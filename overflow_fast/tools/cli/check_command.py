"""The command `check`: if saved checkpoints are finite, and which tensors are not."""

from __future__ import annotations

import argparse

from ...guard.files.json_text import dumps
from .subcommand import Commands, add_command, command, fail, reason

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
    from ...guard.saved_state import check_saved
    from ...guard.verdict.rules import Rules

    status = _FINITE
    try:
        rules = Rules(dict(map(_rule_of, parsed.allow)))
        for path in parsed.paths:
            found = check_saved(path, rules)
            print(dumps(found.to_dict()) if parsed.json else found)
            own = {True: _FINITE, False: _BAD, None: _UNKNOWN}[found.is_finite]
            status = own if status == _FINITE or own == _BAD else status
    except (OSError, ValueError) as error:
        return fail(f"The checkpoint cannot be checked: {reason(error)}")
    return status


def _rule_of(text: str) -> tuple[str, list[str]]:
    place, found, kinds = text.rpartition("=")
    if not found:
        raise ValueError(f"--allow must be such as '*:buffer.mask=-inf', got {text!r}")
    return place, kinds.split(",")
