"""Builds the extension overflow_fast._C against the torch that is installed."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from setuptools import setup

MIN_TORCH = (2, 10)
ROOT = Path(__file__).parent
# No fast-math, ever: it turns isnan into false.
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wno-psabi", "-fvisibility=hidden"]
BUILD = ROOT / "build"
# The files of each are compiled as one: reading torch's headers takes 5 to 10 seconds,
# compiling what a file itself says one second.
UNITS = {
    "scan": ("torch_internals", "scan"),
    "record": ("record",),
    "seam": ("python",),
}
KERNELS = ("scan/cpu",)  # a file for each instruction set


def stop(message: str) -> None:
    sys.exit(f"overflow_fast: {message}")


def check_torch() -> None:
    try:
        import torch
        import torch.utils.cpp_extension
    except ImportError as error:
        stop(
            f"torch is not importable while building ({error}). Install torch >= 2.10 "
            "first, then run `pip install --no-build-isolation .`"
        )
    release = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(int(part) for part in release) < MIN_TORCH:
        stop(
            f"torch >= 2.10 is needed, found {torch.__version__}. "
            "Run `pip install 'torch>=2.10'`."
        )


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        stop(
            f"no C++ compiler: `{compiler}` was not found. Install g++ 10 or newer "
            "(Debian: `apt install g++`) or set CXX."
        )


def choose_cuda() -> bool:
    """Whether to build the CUDA part; a GPU need not be visible while building."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    wish = os.environ.get("OVERFLOW_FAST_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        stop(f"OVERFLOW_FAST_CUDA must be auto, 0 or 1, got {wish!r}.")
    if wish == "0":
        return False
    lacking = None
    found = None if CUDA_HOME is None else toolkit_version(CUDA_HOME)
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} was built without CUDA"
    elif found is None:
        lacking = f"no CUDA toolkit {torch.version.cuda} was found (set CUDA_HOME)"
    elif found.split(".")[0] != torch.version.cuda.split(".")[0]:
        lacking = (
            f"the toolkit in {CUDA_HOME} is {found} and torch was built with "
            f"CUDA {torch.version.cuda} (set CUDA_HOME to such a toolkit)"
        )
    elif header := missing_header(CUDA_HOME):
        lacking = (
            f"the compiler does not find {header}, which belongs to the CUDA toolkit "
            f"{found} (install its headers, or set CUDA_HOME to a whole toolkit)"
        )
    if lacking and wish == "1":
        stop(f"OVERFLOW_FAST_CUDA=1 asks for the CUDA part, but {lacking}.")
    if lacking and torch.version.cuda is not None:
        print(f"overflow_fast: building without CUDA kernels: {lacking}.")
    return lacking is None


def toolkit_version(cuda_home: str) -> str:
    """The release of a toolkit's compiler, such as 13.0."""
    nvcc = Path(cuda_home) / "bin" / "nvcc"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    except OSError:
        return "without nvcc"
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    return release[1] if release else "of an unknown version"


def missing_header(cuda_home: str) -> str | None:
    """The first header of the toolkit that the CUDA part needs and nobody has."""
    from torch.utils import cpp_extension

    paths = [f"{cuda_home}/include", sysconfig.get_path("include")]
    if hasattr(cpp_extension, "include_paths"):
        paths += cpp_extension.include_paths("cuda")
    source = '#include <cuda_runtime.h>\n#include "csrc/scan/cuda/cuda_device.cpp"\n'
    options = ["-std=c++20", "-E", "-x", "c++", "-o", os.devnull, "-"]
    command = [*os.environ.get("CXX", "g++").split(), *(f"-I{p}" for p in paths)]
    said = subprocess.run(
        [*command, f"-I{ROOT}", *options], input=source, capture_output=True, text=True
    ).stderr
    missing = re.search(r"fatal error: '?([^\s':/]+)'?:? (No such|file not)", said)
    return missing[1] if missing else None


def default_architectures() -> str:
    """Ampere, Hopper and, where the compiler knows it, Blackwell; newer ones by PTX."""
    import torch

    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    return "8.0;9.0;10.0+PTX" if (major, minor) >= (12, 8) else "8.0;9.0+PTX"


def sources(*folders: str) -> list[str]:
    """The source files that lie directly in these folders of csrc."""
    found = []
    for folder in folders:
        for pattern in ("*.cpp", "*.cu"):
            found += (ROOT / "csrc" / folder).glob(pattern)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(with_cuda: bool) -> object:
    import torch
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    folders = [*(folder for unit in UNITS.values() for folder in unit), *KERNELS]
    if with_cuda:
        folders.append("scan/cuda")
    compile_args = {"cxx": CXX_FLAGS}
    if with_cuda:
        compile_args["nvcc"] = ["-std=c++20", "-O3"]
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures())
    kind = CUDAExtension if with_cuda else CppExtension
    return kind(
        # Imported as overflow_fast._C: see overflow_fast/binaries.
        f"overflow_fast.binaries.{binary_folder(torch.__version__)}._C",
        sources(*folders),
        extra_compile_args=compile_args,
        extra_link_args=["-Wl,--as-needed"] if sys.platform == "linux" else [],
    )


def binary_folder(torch_version: str) -> str:
    """The folder for a release of torch, as overflow_fast.binaries looks for it."""
    return "torch" + "_".join(torch_version.split("+")[0].split(".")[:2])


def join_units(files: list[str]) -> list[str]:
    """What to compile for these sources: files in the build's folder that include them.

    All that is compiled lies there: ccache knows it again in another checkout.
    """
    units = {folder: name for name, folders in UNITS.items() for folder in folders}
    # The largest first, so that no core waits for it alone at the end.
    includes: dict[str, list[str]] = {name: [] for name in reversed(UNITS)}
    others = []
    for file in files:
        path = Path(file)
        if path.suffix == ".cu":
            others.append(file)
            continue
        unit = units.get(path.parent.relative_to("csrc").as_posix(), path.stem)
        includes.setdefault(unit, []).append(file)
    made = BUILD / "units"
    made.mkdir(parents=True, exist_ok=True)
    for name, included in includes.items():
        path = made / f"{name}.cpp"
        lines = [f'#include "../../{Path(file).as_posix()}"\n' for file in included]
        if not path.exists() or path.read_text() != "".join(lines):
            path.write_text("".join(lines))  # only then: ninja looks at the time
    return [*(f"build/units/{name}.cpp" for name in includes), *others]


@contextlib.contextmanager
def progress(terminal: TextIO | None) -> Iterator[None]:
    """Shows on a terminal how many files ninja has compiled, which pip hides.

    Ninja writes to descriptor 1, whatever sys.stdout is; all of it still goes there.
    """
    if terminal is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    read_end, write_end = os.pipe()
    reader = threading.Thread(target=show_progress, args=(read_end, kept, terminal))
    os.dup2(write_end, 1)
    os.close(write_end)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        reader.join()
        os.close(kept)


def show_progress(read_end: int, output: int, terminal: TextIO) -> None:
    with open(read_end, "rb") as lines:
        for line in lines:
            os.write(output, line)
            if found := re.match(rb"\[(\d+)/(\d+)\] ", line):
                done, total = (int(number) for number in found.groups())
                print(f"overflow_fast: compiled {done} of {total}", file=terminal)
                terminal.flush()


def open_terminal() -> TextIO | None:
    """The terminal of whoever builds; None where there is none, as in CI."""
    try:
        return open("/dev/tty", "w")
    except OSError:
        return None


def wants_extension() -> bool:
    """False where the package is to scan by torch operations alone, as on Windows."""
    wish = os.environ.get("OVERFLOW_FAST_EXTENSION", "auto")
    if wish not in ("auto", "0", "1"):
        stop(f"OVERFLOW_FAST_EXTENSION must be auto, 0 or 1, got {wish!r}.")
    if wish == "auto" and sys.platform == "win32":
        print("overflow_fast: building without the extension: MSVC cannot compile it.")
        return False
    return wish != "0"


def main() -> None:
    if not wants_extension():
        setup()
        return
    check_torch()
    check_compiler()
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(BUILD / "objects")  # kept, also by `pip install -e`

        def build_extensions(self) -> None:
            for each in self.extensions:
                each.sources = join_units(each.sources)
            print("overflow_fast: compiling the extension takes about a minute")
            # Where torch finds ccache, checkouts and unpacked sources share it.
            os.environ.setdefault("CCACHE_BASEDIR", str(BUILD.resolve()))
            os.environ.setdefault("CCACHE_NOHASHDIR", "1")
            with progress(open_terminal()):
                super().build_extensions()

        def copy_extensions_to_source(self) -> None:
            for each in self.extensions:
                folder = ROOT.joinpath(*each.name.split(".")[:-1])
                folder.mkdir(parents=True, exist_ok=True)
            super().copy_extensions_to_source()

    setup(ext_modules=[extension(choose_cuda())], cmdclass={"build_ext": Build})


if __name__ == "__main__":
    main()
