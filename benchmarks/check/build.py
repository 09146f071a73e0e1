"""Builds the extension in place, for the GPU that is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from check.record import ROOT, find_nvcc, said
from check.tools import capability, options, save, skip, targets

IS_CURRENT = """
import pathlib, overflow_fast._C as module
built = pathlib.Path(module.__file__).stat().st_mtime
sources = pathlib.Path("csrc").rglob("*.*")
files = [p for p in sources if "cuda" not in p.parts and "mps" not in p.parts]
print(built > max(p.stat().st_mtime for p in files))
"""
HAS_KERNELS = """
import torch
from overflow_fast import _C
print(_C.has_kernels("cuda"))
"""


def environment(device: str) -> dict[str, str]:
    """Asks for the GPU's own architecture only, if nvcc knows it: the time is short."""
    settings = os.environ | {"OVERFLOW_FAST_CUDA": "1" if device == "cuda" else "0"}
    nvcc = find_nvcc() if device == "cuda" else None
    found = capability() if nvcc else None
    if nvcc and found and f"sm_{found.replace('.', '')}" in targets(nvcc, found)[-1]:
        settings.setdefault("TORCH_CUDA_ARCH_LIST", f"{found}+PTX")
    return settings


def main() -> int:
    device = options().device
    python = sys.executable
    if not said([python, "-c", "import torch; print(torch.__version__)"], 90):
        skip("torch cannot be imported")
    if device == "cpu" and said([python, "-c", IS_CURRENT], 90) == "True":
        print("the extension is newer than its sources")
        return 0
    begin = time.monotonic()
    command = [python, "setup.py", "-q", "build_ext", "--inplace"]
    code = subprocess.run(command, cwd=ROOT, env=environment(device)).returncode
    seconds = time.monotonic() - begin
    save("build", {"seconds": seconds, "code": code})
    is_for_gpu = code == 0 and device == "cuda"
    if is_for_gpu and said([python, "-c", HAS_KERNELS], 90) != "True":
        print("error: the built extension has no CUDA kernels", flush=True)
        return 1
    print(f"built in {seconds:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
