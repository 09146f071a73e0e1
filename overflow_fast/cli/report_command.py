"""The command `report`."""

from __future__ import annotations

import argparse
import json

from ..core.strict_json import to_plain
from .adding import (
    Commands,
    add_command,
    fail,
    reason,
    require_content,
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
        page = write_page(parsed.output, sources.records, sources.incidents)
    except (OSError, ValueError) as error:
        return fail(f"The page cannot be written: {reason(error)}")
    if parsed.json:
        print(json.dumps(to_plain({**sources.to_dict(), "path": str(page)})))
    else:
        print(page)
    return 0
