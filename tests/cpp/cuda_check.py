"""Compiles the CUDA sources with nvcc alone: needs no GPU and no CUDA build of torch.

Prints each kernel's registers per architecture, and fails on a spill.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from facts import find_nvcc  # noqa: E402

KERNELS = sorted((ROOT / "csrc/scan/cuda").glob("*.cu"))
WITH_TORCH = ROOT / "csrc/scan/cuda/cuda_device.cpp"
OF_BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.cu"))
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def architectures(nvcc):
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    known = listed.stdout.split()
    return [arch for arch in ("80", "90", "100") if f"compute_{arch}" in known]


def compile_kernels(nvcc, source, arch, folder):
    """Compiles for one architecture and returns what ptxas says."""
    output = Path(folder) / f"{source.stem}.{arch}.o"
    target = f"arch=compute_{arch},code=[sm_{arch},compute_{arch}]"
    flags = ["-std=c++20", "-O3", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command = [nvcc, *flags, "-gencode", target, "-c", source, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stderr


def compile_with_torch(nvcc, folder):
    """Compiles the part that sees torch, against headers that CPU builds have too."""
    from torch.utils.cpp_extension import include_paths

    stand_in = Path(folder) / "c10/cuda/impl/cuda_cmake_macros.h"  # made by CUDA builds
    stand_in.parent.mkdir(parents=True)
    stand_in.touch()
    paths = [folder, *include_paths(), sysconfig.get_paths()["include"]]
    output = Path(folder) / "with_torch.o"
    command = [
        nvcc,
        "-std=c++20",
        "-Xcompiler",
        "-Wall",
        "-c",
        WITH_TORCH,
        "-o",
        output,
    ]
    subprocess.run([*command, *(f"-I{path}" for path in paths)], check=True)


def report(source, arch, log):
    """Prints a line for each function; returns how many spill."""
    num_spills = 0
    functions = re.split(r"Function properties for ", log)[1:]
    for text in functions:
        name = subprocess.run(
            ["c++filt", text.split()[0]], capture_output=True, text=True
        )
        label = name.stdout.strip().split("(overflow_fast")[0].removeprefix("void ")
        registers = re.search(r"Used (\d+) registers", text)
        spill = sum(map(int, SPILL.search(text).groups()))
        num_spills += spill > 0
        if registers or spill:
            label = label.replace("overflow_fast::cuda::", "")
            used = f"{registers[1]} registers" if registers else ""
            print(f"sm_{arch:4} {label:40} {used:14} {spill} bytes spilled")
    return num_spills


def main():
    nvcc = find_nvcc()
    if nvcc is None:
        print("cuda-check: no nvcc was found, the CUDA sources are not compiled")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        targets = architectures(nvcc)
        others = [
            pool.submit(compile_kernels, nvcc, source, targets[0], folder)
            for source in OF_BENCHMARKS
        ]
        jobs = [(s, arch) for arch in targets for s in KERNELS]
        logs = [pool.submit(compile_kernels, nvcc, *job, folder) for job in jobs]
        compile_with_torch(nvcc, folder)
        for other in others:
            other.result()
        spills = [
            report(*job, log.result()) for job, log in zip(jobs, logs, strict=True)
        ]
    if sum(spills):
        sys.exit("cuda-check: kernels spill registers")


if __name__ == "__main__":
    main()
