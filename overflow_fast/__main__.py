"""Runs the command line: `python -m overflow_fast` and `overflow-fast`."""

import sys

from .tools.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
