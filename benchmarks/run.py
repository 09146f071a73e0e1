"""Runs every benchmark, each in a process of its own: `make bench`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    failed = []
    for script in sorted(HERE.glob("bench_*.py")):
        print(f"\n{script.name}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, str(script), *sys.argv[1:]], cwd=HERE)
        if done.returncode:
            failed.append(script.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
