"""The command `report`."""

from __future__ import annotations

import argparse

from .adding import Commands, add_command, fail, require_content, with_progress


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "report",
        _run,
        "write a page of flight records and evidence",
        "report run.ofr evidence/ -o run.html",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a flight record (one of each rank), or a folder of evidence",
    )
    parser.add_argument(
        "-o", dest="output", default="run.html", help="the page (default: run.html)"
    )


def _run(parsed: argparse.Namespace) -> int:
    from ..page.sources import write_report

    try:
        require_content(parsed.paths)
        paths = with_progress(parsed.paths, "files", len(parsed.paths))
        print(write_report(paths, parsed.output))
    except (OSError, ValueError) as error:
        return fail(f"The page cannot be written: {error}")
    return 0
