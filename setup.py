"""Builds the extension overflow_fast._C against the torch that is installed."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

MIN_TORCH = (2, 10)
ROOT = Path(__file__).parent


def stop(message: str) -> None:
    sys.exit(f"overflow_fast: {message}")


try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    stop(
        "torch is not importable while building. Install torch >= 2.10 first, then run "
        "`pip install --no-build-isolation .`"
    )

version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < MIN_TORCH:
    stop(
        f"torch >= 2.10 is needed, found {torch.__version__}. "
        "Run `pip install 'torch>=2.10'`."
    )

compiler = os.environ.get("CXX", "g++")
if shutil.which(compiler.split()[0]) is None:
    stop(
        f"no C++ compiler: `{compiler}` was not found. Install g++ 10 or newer "
        "(Debian: `apt install g++`) or set CXX."
    )

setup(
    ext_modules=[
        CppExtension(
            "overflow_fast._C",
            sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp")),
            # No fast-math, ever: it turns isnan into false.
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-Wall",
                "-Wno-psabi",
                "-fvisibility=hidden",
            ],
            extra_link_args=["-Wl,--as-needed"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
