"""Merges wheels that were built for several releases of torch into one.

Each holds the same package and its own folder in `overflow_fast/binaries`:

    python tools/merge_wheels.py --into wheelhouse wheels/*/overflow_fast-*-cp311-*.whl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from wheel.wheelfile import WheelFile


def collect(wheels: list[Path]) -> dict[str, tuple[ZipInfo, bytes]]:
    """Returns the files of all wheels by name, with the metadata of the last.

    Other files that several have must be the same in all of them. The metadata is not
    where releases of setuptools, of which some torches need an old one, have made it.
    """
    found: dict[str, tuple[ZipInfo, bytes]] = {}
    for path in wheels:
        with ZipFile(path) as wheel:
            for info in wheel.infolist():
                is_metadata = ".dist-info/" in info.filename
                is_left_out = is_metadata and path != wheels[-1]
                if info.is_dir() or is_left_out or info.filename.endswith("/RECORD"):
                    continue
                content = wheel.read(info)
                _, first = found.setdefault(info.filename, (info, content))
                if first != content:
                    sys.exit(
                        f"error: {info.filename} of {path} differs from the others"
                    )
    return found


def merge(wheels: list[Path], into: Path) -> Path:
    """Writes one wheel with the files of all, and returns its path."""
    names = {path.name for path in wheels}
    if len(names) != 1:
        sys.exit(f"error: the wheels must have one name, got {sorted(names)}")
    files = collect(wheels)
    into.mkdir(parents=True, exist_ok=True)
    merged = into / names.pop()
    with WheelFile(merged, "w") as wheel:  # writes RECORD
        for info, content in files.values():
            wheel.writestr(info, content)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="a folder")
    parser.add_argument("wheels", type=Path, nargs="+")
    options = parser.parse_args()
    merged = merge(options.wheels, options.into)
    folders = {
        name.split("/")[2]
        for name in ZipFile(merged).namelist()
        if name.startswith("overflow_fast/binaries/torch")
    }
    print(
        f"{merged}: {', '.join(sorted(folders))}, {merged.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
