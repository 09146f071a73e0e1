"""The command `compare`: two recordings, layer by layer."""

from __future__ import annotations

import argparse

from ...base.text import printable
from .subcommand import Commands, add_command, command, fail, reason

NOTHING_COMPUTED = 3  # the exit status where only weights or batches were compared


@command(after="explain")
def add_compare(commands: Commands) -> None:
    """Adds the command `compare`."""
    parser = add_command(
        commands,
        "compare",
        _run_compare,
        "compare two recordings layer by layer, and name the first that differs",
        """
        compare run_a run_b
        compare run_a run_b --map '^layer\\.=blocks.' -o diff.html
        """,
        more=": [how](compare.md#two-runs-compared)",
    )
    parser.add_argument("recording", help="the folder of a recording")
    parser.add_argument("reference", help="the folder of the one to compare it with")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a regular expression in its module names, and its replacement",
    )
    parser.add_argument(
        *("-o", "--output"),
        metavar="FILE.html",
        help="also write the comparison as a page",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_compare(parsed: argparse.Namespace) -> int:
    """Returns the exit status: see docs/guides/command-line.md."""
    from ..compare.compare_runs import compare
    from .terminal import shown

    output: str = parsed.output or ""
    if output and not output.endswith(".html"):
        return fail(f"FILE must end with .html, got {output}")
    pairs = [each.partition("=") for each in parsed.map]
    if not all(sign for _, sign, _ in pairs):
        return fail(f"--map must be OLD=NEW, got {' '.join(parsed.map)}")
    try:
        found = compare(
            parsed.recording,
            parsed.reference,
            names={old: new for old, _, new in pairs},
        )
        if output:
            found.to_html(output)
    except (ImportError, OSError, ValueError) as error:
        return fail(f"The runs cannot be compared: {reason(error)}")
    print(found.to_json() if parsed.json else shown(str(found)))
    if output and not parsed.json:
        print(printable(output))
    if not found.num_compared:
        return 2
    if not found.differs and not found.num_computed:
        return NOTHING_COMPUTED
    return int(found.differs)
