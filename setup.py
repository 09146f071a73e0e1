"""Builds the extension overflow_fast._C against the torch that is installed."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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


def why_no_cuda() -> str | None:
    """Why the CUDA part is not built; None to build it, which needs no GPU.

    Empty where it was not asked for, or torch has no CUDA either.
    """
    import torch

    wish = os.environ.get("OVERFLOW_FAST_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        stop(f"OVERFLOW_FAST_CUDA must be auto, 0 or 1, got {wish!r}.")
    if wish == "0":
        return ""
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} was built without CUDA"
    else:
        lacking = lacking_for_cuda(torch.version.cuda)
    if lacking and wish == "1":
        stop(f"OVERFLOW_FAST_CUDA=1 asks for the CUDA part, but {lacking}.")
    if lacking and torch.version.cuda is None:
        return ""
    return lacking and f"building without CUDA kernels: {lacking}."


def lacking_for_cuda(wanted: str) -> str | None:
    """What is missing to compile and link for this release of CUDA, or None."""
    home = choose_toolkit(wanted)
    if home is None:
        return (
            f"no CUDA toolkit {wanted} was found (set CUDA_HOME, or get its compiler: "
            "docs/guides/installing.md)"
        )
    found = toolkit_version(home)
    if found.split(".")[0] != wanted.split(".")[0]:
        return (
            f"the toolkit in {home} is {found} and torch was built with "
            f"CUDA {wanted} (set CUDA_HOME to such a toolkit)"
        )
    if header := missing_header(home):
        return (
            f"the compiler does not find {header}, which belongs to the CUDA toolkit "
            f"{found} (install its headers, or set CUDA_HOME to a whole toolkit)"
        )
    if refusal := refusal_of_nvcc(home):
        return f"nvcc {found} cannot compile ({refusal}); CC names its host compiler"
    if not runtime_folders(home):
        return (
            f"the linker does not find libcudart, which belongs to the CUDA toolkit "
            f"{found} (install it, or set CUDA_HOME to a whole toolkit)"
        )
    return None


def choose_toolkit(wanted: str) -> str | None:
    """The folder of CUDA_HOME, else torch's choice, or pip's if its release fits."""
    from torch.utils import cpp_extension

    first = cpp_extension.CUDA_HOME
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return first
    major = wanted.split(".")[0]
    folders = [Path(each or ".") / "nvidia" / f"cu{major}" for each in sys.path]
    of_pip = [str(each) for each in folders if (each / "bin" / "nvcc").is_file()]
    homes = [*([first] if first else []), *of_pip]
    fitting = (h for h in homes if toolkit_version(h).split(".")[0] == major)
    home = next(fitting, first)
    cpp_extension.CUDA_HOME = home  # what torch's own part of the build asks
    return home


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
    command = [*host_compiler(), *(f"-I{p}" for p in paths)]
    said = subprocess.run(
        [*command, f"-I{ROOT}", *options], input=source, capture_output=True, text=True
    ).stderr
    missing = re.search(r"fatal error: '?([^\s':/]+)'?:? (No such|file not)", said)
    return missing[1] if missing else None


def host_compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def refusal_of_nvcc(cuda_home: str) -> str | None:
    """The first line of what nvcc says against its host compiler, if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cu"
        source.touch()
        nvcc = f"{cuda_home}/bin/nvcc"
        command = [nvcc, "-std=c++20", "-E", source, "-o", os.devnull]
        if "CC" in os.environ:  # as torch calls it
            command += ["-ccbin", os.environ["CC"]]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [*done.stderr.splitlines(), *done.stdout.splitlines(), "it failed"]
    errors = (
        re.split(r"error:? *(?:-- )?", line)[-1] for line in lines if "error" in line
    )
    return next(errors, lines[0]).strip()


def runtime_folders(cuda_home: str) -> list[str]:
    """Folders in which the linker finds libcudart; empty if it finds none.

    pip's package has the library without the name that linkers look for, which it
    gets in the folder of the build.
    """
    folders = [f"{cuda_home}/lib64", f"{cuda_home}/lib"]
    if links_cudart(folders):
        return folders
    for library in sorted(Path(cuda_home, "lib").glob("libcudart.so.*")):
        named = BUILD / "cudart" / "libcudart.so"
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)
        named.symlink_to(library)
        if links_cudart([str(named.parent)]):
            return [str(named.parent)]
    return []


def links_cudart(folders: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        options = ["-shared", "-x", "c++", os.devnull, "-o", f"{folder}/linked.so"]
        paths = [f"-L{each}" for each in folders]
        command = [*host_compiler(), *options, *paths, "-lcudart"]
        return subprocess.run(command, capture_output=True).returncode == 0


def default_architectures() -> str:
    """Those of torch: code for the first of each generation; newer GPUs by PTX.

    Code for 8.0 runs on 8.6 and 8.9 too. The kernels need 7.0 or newer.
    """
    import torch

    named = re.findall(r"sm_(\d+)(\d)\b", " ".join(torch.cuda.get_arch_list()))
    known = {(int(major), int(minor)) for major, minor in named}
    if not known:
        known = {(7, 5), (8, 0), (9, 0)}
        if tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 8):
            known |= {(10, 0), (12, 0)}
    first = {major: (major, minor) for major, minor in sorted(known, reverse=True)}
    chosen = sorted(each for each in first.values() if each >= (7, 0))
    return ";".join(f"{major}.{minor}" for major, minor in chosen) + "+PTX"


def sources(*folders: str) -> list[str]:
    """The source files that lie directly in these folders of csrc."""
    found = []
    for folder in folders:
        for pattern in ("*.cpp", "*.cu"):
            found += (ROOT / "csrc" / folder).glob(pattern)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(with_cuda: bool) -> object:
    import torch
    from torch.utils import cpp_extension

    folders = [*(folder for unit in UNITS.values() for folder in unit), *KERNELS]
    if with_cuda:
        folders.append("scan/cuda")
    compile_args = {"cxx": CXX_FLAGS}
    kind, library_dirs = cpp_extension.CppExtension, list[str]()
    if with_cuda:
        kind = cpp_extension.CUDAExtension
        compile_args["nvcc"] = ["-std=c++20", "-O3"]
        library_dirs = runtime_folders(cpp_extension.CUDA_HOME)
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures())
        # nvcc has taken its host compiler: torch's own table of compilers need not.
        os.environ.setdefault("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    return kind(
        # Imported as overflow_fast._C: see overflow_fast/binaries.
        f"overflow_fast.binaries.{binary_folder(torch.__version__)}._C",
        sources(*folders),
        library_dirs=library_dirs,
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
    without_cuda = why_no_cuda()
    if without_cuda:
        print(f"overflow_fast: {without_cuda}")
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
            terminal = open_terminal()
            if without_cuda and terminal is not None:  # pip hides what is printed
                print(f"overflow_fast: {without_cuda}", file=terminal, flush=True)
            with progress(terminal):
                super().build_extensions()

        def copy_extensions_to_source(self) -> None:
            for each in self.extensions:
                folder = ROOT.joinpath(*each.name.split(".")[:-1])
                folder.mkdir(parents=True, exist_ok=True)
            super().copy_extensions_to_source()

    setup(ext_modules=[extension(without_cuda is None)], cmdclass={"build_ext": Build})


if __name__ == "__main__":
    main()
