"""`python benchmarks/check`: see `--help`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from check.command import main  # noqa: E402

sys.exit(main())
