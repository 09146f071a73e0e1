"""The command `report`."""

from __future__ import annotations

import argparse

from ..files.json_text import dumps
from ..text import printable
from .subcommand import (
    Commands,
    add_command,
    fail,
    reason,
    require_content,
    warn,
    with_progress,
)


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
        *("-o", "--output"), default="run.html", help="the page (default: run.html)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what is in the page as JSON"
    )


def _run(parsed: argparse.Namespace) -> int:
    from ..page.render import write_page
    from ..page.sources import read_sources

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
    if parsed.json:
        print(dumps({**sources.to_dict(), "path": str(page)}))
    else:
        print(printable(str(page)))
    return 0
