"""Builds and runs the program that needs no torch: on a GPU, or in the emulation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from check.record import ROOT
from check.tools import (
    BUILD,
    capability,
    compile_all,
    nvcc_or_skip,
    options,
    save,
    targets,
)

MAIN = ROOT / "tests/cpp/cuda_kernel_test.cpp"
FLAGS = ["-std=c++20", "-O2"]
EMULATION = ["-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-psabi"]


def sources() -> list[Path]:
    return [MAIN, *sorted((ROOT / "csrc/scan/cuda").glob("*.cu"))]


def program(device: str) -> Path:
    return BUILD / ("cuda_kernel" if device == "cuda" else "cuda_kernel_emulated")


def is_built(path: Path) -> bool:
    """Whether the program is newer than all that it is made of."""
    folders = ("csrc/scan", "csrc/scan/cuda", "tests/cpp", "tests/cpp/cuda_emulation")
    made_of = [f for folder in folders for f in (ROOT / folder).glob("*.*")]
    return path.exists() and path.stat().st_mtime > max(
        file.stat().st_mtime for file in made_of
    )


def build(device: str) -> bool:
    """Compiles each source on its own, side by side, and links them."""
    target = program(device)
    target.parent.mkdir(parents=True, exist_ok=True)
    if device == "cuda":
        nvcc = nvcc_or_skip()
        compiler = [nvcc, *FLAGS, "-lineinfo", *targets(nvcc, capability()), "-x", "cu"]
    else:
        cxx = shlex.split(os.environ.get("CXX", "g++"))
        stand_in = f"-I{ROOT / 'tests/cpp/cuda_emulation'}"
        compiler = [*cxx, *FLAGS, *EMULATION, stand_in, "-x", "c++"]
    objects = [f"{target}-{source.stem}.o" for source in sources()]
    commands = [
        [*compiler, "-c", str(source), "-o", made]
        for source, made in zip(sources(), objects, strict=True)
    ]
    linker = compiler[:-2]
    return compile_all(commands) and compile_all(
        [[*linker, *objects, "-o", str(target)]]
    )


def main() -> int:
    chosen = options()
    path = program(chosen.device)
    begin = time.monotonic()
    is_ready = (chosen.device == "cpu" and is_built(path)) or build(chosen.device)
    part = {"build_seconds": time.monotonic() - begin, "is_complete": False}
    print(f"built in {part['build_seconds']:.1f} s", flush=True)
    save("kernel", part)
    if not is_ready:
        print("error: the kernels could not be compiled", flush=True)
        return 1
    begin = time.monotonic()
    done = subprocess.run(
        [path, *["few"] * chosen.quick], capture_output=True, text=True
    )
    print(done.stdout + done.stderr, flush=True)
    part |= {"run_seconds": time.monotonic() - begin, "code": done.returncode}
    part |= {"said": done.stdout.splitlines()[-4:], "is_complete": True}
    save("kernel", part)
    return 0 if done.returncode == 0 and "PASS" in done.stdout else 1


if __name__ == "__main__":
    sys.exit(main())
