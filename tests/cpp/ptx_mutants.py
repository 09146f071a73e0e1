"""Breaks the CUDA kernels, one line at a time: their PTX, run on the CPU, must fail.

Each mutant is compiled for one architecture from a copy of the sources, and runs a part
of cuda_kernel_test.cpp. Prints a line for each; ends with an error where one passes, or
fails for another reason than it should. Each takes some 10 s of CPU time. An argument
is a part of the names of those that run.
"""

import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cuda_check
import ptx_check

ARCH = "90"
ONLY_PTX = {"flags": ("-O3",), "code": f"compute_{ARCH}"}


class Mutant(NamedTuple):
    """A line that is broken, and what is said then, as a regular expression."""

    name: str
    source: str  # the file that is compiled
    file: str
    old: str
    new: str
    why: str


SCAN, END = "scan_kernel.cu", "step_end_kernel.cu"
MUTANTS = [
    Mutant(
        "the end of a step without its barrier",
        END,
        "step_end_kernel.cu",
        "  __syncthreads();\n  if (threadIdx.x == 0) {\n    __threadfence",
        "  if (threadIdx.x == 0) {\n    __threadfence",
        "fence for the host",
    ),
    Mutant(
        "no barrier before the next item",
        SCAN,
        "scan_kernel.cuh",
        "  __syncthreads();  // of_warps is free for the next item\n",
        "",
        "a race on shared memory",
    ),
    Mutant(
        "no barrier before the extremes of warps are read",
        SCAN,
        "scan_kernel.cuh",
        "__syncthreads_or(is_nonfinite);",
        "is_nonfinite;",
        "a race on shared memory",
    ),
    Mutant(
        "a barrier that some warps leave out",
        SCAN,
        "scan_kernel.cuh",
        "  __syncthreads();  // of_warps is free for the next item\n",
        "  __syncthreads();\n  if (threadIdx.x < 128) __syncthreads();\n",
        "barriers in two places|a barrier that not all threads reach",
    ),
    Mutant(
        "a store in place of an atomic",
        SCAN,
        "scan_kernel.cuh",
        "atomicMin(reinterpret_cast<unsigned long long*>(&slot->min_key), all.low);",
        "if (all.low < slot->min_key) slot->min_key = all.low;",
        "a race on global memory",
    ),
    Mutant(
        "a vector past the end",
        SCAN,
        "scan_units.cuh",
        "data + (unit < end ? unit : end - 1) * kVectorBytes);",
        "data + unit * kVectorBytes);",
        "a load outside of all memory",
    ),
    Mutant(
        "<= for < at the end of a run",
        SCAN,
        "scan_units.cuh",
        "i + (kUnroll - 1) * kThreads < end;",
        "i + (kUnroll - 1) * kThreads <= end;",
        "a load outside of all memory",
    ),
    Mutant(
        "the tail left out",
        SCAN,
        "scan_units.cuh",
        "  if (lane >= item.head + item.tail) return nullptr;",
        "  if (lane >= item.head) return nullptr;",
        "expected: min key",
    ),
    Mutant(
        "vectors at any address",
        SCAN,
        "work_list.h",
        "address % itemsize == 0;",
        "address % 1 == 0;",
        "a misaligned access",
    ),
]


def prepare(nvcc, folder):
    """Compiles what mutants are linked to.

    Returns:
        The objects of the machine and the test; by its name that of each source; and
        the PTX of those whose kernels run, which lists of 984 do not.
    """
    compiled, ptx = {}, {}
    for source in cuda_check.KERNELS:
        cuda_check.compile_kernels(nvcc, source, ARCH, folder, **ONLY_PTX)
        compiled[source.name], ptx[source.name] = cuda_check.unit(source, ARCH, folder)
    del ptx["scan_kernel_large.cu"]
    return ptx_check.compile_common(nvcc, folder), compiled, ptx


def outcome(mutant, nvcc, prepared, folder):
    """Compiles and runs a mutant; what it said, and whether that is right."""
    common, compiled, ptx = prepared
    shutil.copytree(ptx_check.ROOT / "csrc/scan", folder / "csrc/scan")
    sources = folder / "csrc/scan/cuda"
    text = (sources / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        return f"{mutant.file} has this line {text.count(mutant.old)} times", False
    (sources / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    source = sources / mutant.source
    cuda_check.compile_kernels(nvcc, source, ARCH, folder, **ONLY_PTX)
    broken, its_ptx = cuda_check.unit(source, ARCH, folder)
    objects = (compiled | {mutant.source: broken}).values()
    ptx = (ptx | {mutant.source: its_ptx}).values()
    try:
        program = ptx_check.build(ARCH, [*common, *objects], ptx, folder, "-O0")
        said = ptx_check.run(program, "few")
    except ptx_check.FailedError as error:
        said = str(error)
    return said, re.search(mutant.why, said) is not None


def main(part=""):
    mutants = [mutant for mutant in MUTANTS if part in mutant.name]
    nvcc = cuda_check.find_nvcc()
    if nvcc is None:
        print("ptx-mutants: no nvcc was found, no mutant is compiled")
        return
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        prepared = prepare(nvcc, folder)

        def run(number, mutant):
            own = folder / str(number)
            own.mkdir()
            return outcome(mutant, nvcc, prepared, own)

        outcomes = list(pool.map(run, range(len(mutants)), mutants))
    for mutant, (said, is_right) in zip(mutants, outcomes, strict=True):
        seen = "seen" if is_right else "NOT SEEN"
        print(f"{seen}: {mutant.name}: {said.splitlines()[-1]}")
    if not all(is_right for _, is_right in outcomes):
        sys.exit("ptx-mutants: a broken kernel does not fail as it should")


if __name__ == "__main__":
    main(*sys.argv[1:])
