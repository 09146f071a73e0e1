"""Builds the extension overflow_fast._C against the torch that is installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

MIN_TORCH = (2, 10)
ROOT = Path(__file__).parent
# No fast-math, ever: it turns isnan into false.
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wno-psabi", "-fvisibility=hidden"]


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
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    folders = ["torch_internals", "scan", "scan/cpu", "record", "python"]
    if with_cuda:
        folders.append("scan/cuda")
    compile_args = {"cxx": CXX_FLAGS}
    if with_cuda:
        compile_args["nvcc"] = ["-std=c++20", "-O3"]
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures())
    kind = CUDAExtension if with_cuda else CppExtension
    return kind(
        "overflow_fast._C",
        sources(*folders),
        extra_compile_args=compile_args,
        extra_link_args=["-Wl,--as-needed"] if sys.platform == "linux" else [],
    )


def main() -> None:
    check_torch()
    check_compiler()
    from torch.utils.cpp_extension import BuildExtension

    setup(
        ext_modules=[extension(choose_cuda())],
        cmdclass={"build_ext": BuildExtension},
    )


main()
