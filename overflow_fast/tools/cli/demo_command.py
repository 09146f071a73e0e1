"""The command `demo`: a step that is nan."""

from __future__ import annotations

import argparse
import os

from .subcommand import Commands, add_command, command, fail, reason


@command(after="")
def add_demo(commands: Commands) -> None:
    """Adds the command `demo`."""
    parser = add_command(
        commands,
        "demo",
        _run_demo,
        "train a small model until a step is nan",
        "demo --page demo.html",
        more=", with report and page",
        needs_extension=True,
    )
    parser.add_argument(
        "--page",
        default="overflow_fast_demo.html",
        metavar="FILE",
        help="where the page of the run is written (default: %(default)s)",
    )


def _run_demo(parsed: argparse.Namespace) -> int:
    from ..demo import train
    from .terminal import shown

    try:
        raised = train(parsed.page)
    except OSError as failure:
        return fail(f"overflow_fast demo: {reason(failure)}")
    print(f"\n{shown(f'NonFiniteError: {raised}')}\n")
    print(f"The page of this run: {os.path.abspath(parsed.page)}")
    return 0 if raised is not None else 1
