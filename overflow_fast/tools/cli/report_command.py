"""The command `report`: a page of flight records and evidence."""

from __future__ import annotations

import argparse

from ...base.text import printable, with_progress
from .subcommand import (
    Commands,
    add_command,
    command,
    fail,
    reason,
    require_content,
    warn,
)


@command(after="run")
def add_report(commands: Commands) -> None:
    """Adds the command `report`."""
    parser = add_command(
        commands,
        "report",
        _run_report,
        "write a page of flight records and evidence",
        "report run.ofr evidence/ -o run.html",
        more=": [what it shows](observing.md#a-page)",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a flight record (one of each rank), or a folder of evidence",
    )
    parser.add_argument(
        *("-o", "--output"), default="run.html", help="the page (default: run.html)"
    )


def _run_report(parsed: argparse.Namespace) -> int:
    from ..page.render import read_sources, write_page

    try:
        require_content(parsed.paths)
        paths = with_progress(parsed.paths, "files", len(parsed.paths))
        sources = read_sources(paths)
        page = write_page(
            parsed.output, sources.records, sources.incidents, sources.damaged
        )
    except (OSError, ValueError, ImportError) as error:
        return fail(f"The page cannot be written: {reason(error)}")
    for sentence in sources.damaged:
        warn(sentence)
    if sources.older:
        names = ", ".join(record.path.name for record in sources.older)
        warn(f"The page is of the newest run; left out, of earlier ones: {names}.")
    print(printable(str(page)))
    return 0
