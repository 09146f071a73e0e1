"""Compiles the CUDA sources with nvcc alone: needs no GPU and no CUDA build of torch.

Prints each kernel's registers, spills and stack frame per architecture, and fails where
one is larger than in tests/support/cuda_kernels.txt, which `--write` renews. Other
releases of nvcc than the one that it names may need more or less: nothing is compared.
Then runs the PTX on the CPU (ptx_check.py), of each architecture in a share of the
test; with `--whole` in all of it, which takes three times as long.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests/cpp")]

import ptx_check  # noqa: E402
from facts import find_nvcc  # noqa: E402

KERNELS = sorted((ROOT / "csrc/scan/cuda").glob("*.cu"))
WITH_TORCH = ROOT / "csrc/scan/cuda/cuda_device.cpp"
OF_BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.cu"))
VERBOSE = ("-O3", "-Xptxas", "-v")
# Those of benchmarks need only compile: optimized, one of them takes 40 s.
UNOPTIMIZED = ("-O0", "-Xcicc", "-O0", "-Xptxas", "-O0")
TABLE = ROOT / "tests/support/cuda_kernels.txt"
MEMORY = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
COLUMNS = "registers", "bytes of stack", "bytes spilled"


def architectures(nvcc):
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    known = listed.stdout.split()
    return [
        arch for arch in ("75", "80", "90", "100", "120") if f"compute_{arch}" in known
    ]


def compile_kernels(nvcc, source, arch, folder, flags=VERBOSE, code=""):
    """Compiles for one architecture and returns what ptxas says.

    Object and PTX lie in a folder of their own: see `unit`. Code is of the architecture
    and PTX, if not named.
    """
    output, ptx = unit(source, arch, folder)
    ptx.parent.mkdir()
    code = code or f"[sm_{arch},compute_{arch}]"
    target = f"arch=compute_{arch},code={code}"
    flags = ["-std=c++20", "-Werror", "all-warnings", *flags, "-gencode", target]
    keep = ["--keep", "--keep-dir", ptx.parent]
    command = [nvcc, *flags, *keep, "-c", source, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stderr


def unit(source, arch, folder):
    """The paths of a source's object and of its PTX."""
    own = Path(folder) / f"{source.stem}.{arch}"
    return own / f"{source.stem}.o", own / f"{source.stem}.ptx"


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


def rows_of(arch, log):
    """The numbers of COLUMNS for each function, by architecture and name."""
    rows = {}
    for text in re.split(r"Function properties for ", log)[1:]:
        said = subprocess.run(
            ["c++filt", text.split()[0]], capture_output=True, text=True
        )
        name = said.stdout.strip().replace("overflow_fast::", "").replace("cuda::", "")
        name = name.removeprefix("void ").partition("(")[0].replace(" ", "")
        registers = re.search(r"Used (\d+) registers", text)
        stack, *spills = map(int, MEMORY.search(text).groups())
        used = int(registers[1]) if registers else 0  # of a kernel, with all it calls
        if used or stack or sum(spills):
            rows[f"sm_{arch}", name] = used, stack, sum(spills)
    return rows


def grown(rows, release):
    """What is larger than in the table, a line each."""
    first, *lines = TABLE.read_text().splitlines()
    if first != f"nvcc {release}":
        print(f"cuda-check: {TABLE.name} is of {first}: nothing is compared")
        return []
    known = {}
    for line in lines[1:]:
        arch, name, *numbers = line.split()
        known[arch, name] = tuple(map(int, numbers))
    return [
        f"{' '.join(key)}: {now} {what}, was {before}"
        for key, numbers in rows.items()
        for what, now, before in zip(
            COLUMNS, numbers, known.get(key, (0, 0, 0)), strict=True
        )
        if now > before
    ]


def write(rows, release):
    lines = [f"nvcc {release}", f"architecture, function, {', '.join(COLUMNS)}"]
    for (arch, name), numbers in rows.items():
        lines.append(f"{arch:7}{name:42}{''.join(f'{n:5}' for n in numbers)}")
    TABLE.write_text("\n".join(lines) + "\n")


def main():
    nvcc = find_nvcc()
    if nvcc is None:
        print("cuda-check: no nvcc was found, the CUDA sources are not compiled or run")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        targets = architectures(nvcc)
        others = [
            pool.submit(compile_kernels, nvcc, source, targets[-1], folder, UNOPTIMIZED)
            for source in OF_BENCHMARKS
        ]
        common = pool.submit(ptx_check.compile_common, nvcc, folder)
        jobs = [(s, arch) for arch in targets for s in KERNELS]
        logs = [pool.submit(compile_kernels, nvcc, *job, folder) for job in jobs]
        compile_with_torch(nvcc, folder)
        for other in others:
            other.result()
        rows = {}
        for (_, arch), log in zip(jobs, logs, strict=True):
            rows |= rows_of(arch, log.result())
        units = {arch: [unit(s, arch, folder) for s in KERNELS] for arch in targets}
        try:
            ran = ptx_check.check(pool, common.result(), units, "--whole" in sys.argv)
        except ptx_check.FailedError as error:
            sys.exit(f"cuda-check: the kernels' PTX, on the CPU: {error}")
    for key, numbers in rows.items():
        said = zip(numbers, COLUMNS, strict=True)
        print("{:7}{:42}".format(*key), ", ".join(f"{n} {what}" for n, what in said))
    print("\n".join(ran))
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", said)[1]
    if "--write" in sys.argv:
        write(rows, release)
    elif larger := grown(rows, release):
        sys.exit("\n".join(["cuda-check: kernels have grown", *larger]))


if __name__ == "__main__":
    main()
