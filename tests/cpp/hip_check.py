"""Compiles the kernels for AMD's GPUs with clang alone, where one is found that can.

Needs neither ROCm nor a GPU: hip_device/cuda_runtime.h stands for HIP's headers. Fails
where a lane has more scratch than for a call: an array in a kernel's parameter would be
copied there. `pip install ziglang` has such a clang.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "csrc/scan/cuda").glob("*.cu"))
HEADERS = Path(__file__).parent / "hip_device"
MOST_SCRATCH = 64  # bytes of a lane; a list of 88 tensors has 4,064


def find_clang():
    """The command of a clang; None where there is none."""
    if found := shutil.which("clang++"):
        return [found]
    if zig := importlib.util.find_spec("ziglang"):
        own = f"{Path(zig.origin).parent}/lib/include"  # which it leaves out
        return [sys.executable, "-m", "ziglang", "clang", "-isystem", own]
    return None


def compile_kernel(clang, source, folder):
    """Compiles for gfx90a and returns the bytes of scratch of each kernel."""
    output = Path(folder) / f"{source.stem}.s"
    flags = "-x hip --offload-arch=gfx90a -nogpuinc -nogpulib --cuda-device-only"
    command = [*clang, *flags.split(), "-std=c++20", "-O3", f"-I{HEADERS}", "-S"]
    done = subprocess.run(
        [*command, source, "-o", output], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    sizes = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", output.read_text())
    return [int(each) for each in sizes]


def main():
    clang = find_clang()
    if clang is None:
        print("hip-check: no clang was found, nothing is compiled for AMD's GPUs")
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = {e.name: compile_kernel(clang, e, folder) for e in KERNELS}
    for name, each in sizes.items():
        print(f"gfx90a {name}: {each} bytes of scratch")
    if max(max(each) for each in sizes.values()) > MOST_SCRATCH:
        sys.exit("hip-check: a kernel copies its parameter to scratch")


if __name__ == "__main__":
    main()
