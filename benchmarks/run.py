"""Runs every benchmark, each in a process of its own: `make bench`."""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="write no result")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    given = ["--device", options.device, *(["--quick"] if options.quick else [])]
    failed = []
    for script in sorted(HERE.glob("bench_*.py")):
        print(f"\n{script.name}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, str(script), *given], cwd=HERE)
        if done.returncode:
            failed.append(script.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
