"""Runs the CUDA kernels' PTX on the CPU, under the code of the host that nvcc compiles.

1. cuda_check.py compiles the sources, and keeps the PTX of each architecture.
2. ptx/translate.py makes C++ of that PTX.
3. It is linked to nvcc's objects, with ptx/cudart.cpp in libcudart's place, and to
   cuda_kernel_test.cpp, as that runs on a GPU.

Threads run in a random order, several blocks at once. What fails: a wrong result; an
access out of bounds or misaligned; a race on shared memory, or of plain stores on
global memory; a barrier that not all threads reach. ptx/memory.cpp and
ptx/scheduler.cpp have the rules, and what they do not see. What ptxas makes of the PTX
is not run here.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/cpp/ptx"
MACHINE = [FOLDER / f"{name}.cpp" for name in ("memory", "scheduler", "cudart")]
TEST = ROOT / "tests/cpp/cuda_kernel_test.cpp"
CXX = shlex.split(os.environ.get("CXX", "g++"))
# Translated code does with integers and with memory what PTX does.
OF_PTX = ("-std=c++20", "-fwrapv", "-fno-strict-aliasing", "-w", f"-I{FOLDER}")

sys.path.append(str(FOLDER))

from translate import Untranslated, translated  # noqa: E402


class FailedError(Exception):
    """A command has ended with an error; its text is what it printed."""


def run(*command):
    """What a command prints."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise FailedError((done.stdout + done.stderr).strip())
    return done.stdout.strip()


def compile_common(nvcc, folder):
    """The objects that do not depend on an architecture: the machine and the test."""
    objects = [Path(folder) / f"{source.stem}.o" for source in (*MACHINE, TEST)]
    flags = ["-std=c++20", "-O2", f"-I{FOLDER}", "-c"]
    for source, output in zip(MACHINE, objects, strict=False):
        run(nvcc, *flags, source, "-o", output)
    # As CUDA, which is what its memory is then; it has no kernel.
    run(nvcc, *flags, "-arch=compute_75", "-x", "cu", TEST, "-o", objects[-1])
    return objects


def build(arch, objects, ptx, folder, optimized="-O1"):
    """A program whose kernels are those of PTX files; returns its path."""
    stem = Path(folder) / f"kernels.{arch}"
    source, output, program = (
        stem.with_suffix(f".{arch}{e}") for e in (".cpp", ".o", "")
    )
    try:
        source.write_text("\n".join(translated(arch, ptx)) + "\n")
    except Untranslated as error:
        raise FailedError(f"ptx/translate.py does not know: {error}") from None
    run(*CXX, *OF_PTX, optimized, "-c", source, "-o", output)
    run(*CXX, "-o", program, *objects, output)
    return program


def build_without_cuda(arch, ptx, folder):
    """A program that launches one kernel (ptx/one_launch.cpp); returns its path."""
    objects = []
    for source in (*MACHINE[:2], FOLDER / "one_launch.cpp"):
        objects.append(Path(folder) / f"{source.stem}.o")
        run(*CXX, *OF_PTX, "-O0", "-c", source, "-o", objects[-1])
    return build(arch, objects, [ptx], folder, "-O0")


def same_code(ptx):
    """What is equal for architectures whose PTX is."""
    return [re.sub(r"^(//.*|\.target .*)$", "", p.read_text(), flags=re.M) for p in ptx]


def check(pool, common, units, whole=False):
    """Runs the test for each architecture whose PTX is not that of one before.

    Args:
        pool: Runs them.
        common: The objects of `compile_common`.
        units: By architecture, for each source its object and its PTX.
        whole: Whether each runs the whole test; else they share it out.

    Returns:
        For each a line of what it printed.
    """
    distinct, said = {}, []
    for arch, pairs in units.items():
        code = same_code([ptx for _, ptx in pairs])
        if code in distinct.values():
            same = next(a for a, c in distinct.items() if c == code)
            said.append(f"sm_{arch}: the PTX of sm_{same}")
        else:
            distinct[arch] = code

    def one(share, arch):
        objects, ptx = zip(*units[arch], strict=True)
        program = build(arch, [*common, *objects], ptx, ptx[0].parent)
        arguments = () if whole else ("share", share, len(distinct))
        return run(program, *arguments).splitlines()[-1]

    running = [pool.submit(one, *each) for each in enumerate(distinct)]
    return [each.result() for each in running] + said
