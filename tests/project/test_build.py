"""What setup.py says before it builds anything."""

import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from processes import python

from overflow_fast.binaries import folder_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
NO_TORCH = "raise ImportError('no libtorch.so')"


def setup_py(*, cxx=None, cuda=None):
    """Exit status and last line of `setup.py --version`, which checks everything."""
    environment = {k: v for k, v in os.environ.items() if k != "OVERFLOW_FAST_CUDA"}
    if cxx is not None:
        environment["CXX"] = cxx
    if cuda is not None:
        environment["OVERFLOW_FAST_CUDA"] = cuda
    done = python("setup.py", "--version", cwd=ROOT, environment=environment)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("cuda", [None, "auto", "0"])
def test_builds_without_cuda_where_torch_has_none(cuda):
    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA")
    assert setup_py(cuda=cuda)[0] == 0


def test_cuda_asked_for_in_vain(as_kept):
    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA")
    status, message = setup_py(cuda="1")
    assert status == 1
    as_kept(message)


@pytest.mark.day
def test_unknown_wish(as_kept):
    status, message = setup_py(cuda="yes")
    assert status == 1
    as_kept(message)


def test_without_the_extension_nothing_is_asked_for(tmp_path):
    wish = {"OVERFLOW_FAST_EXTENSION": "0"}
    assert setup_py_with_torch(tmp_path, NO_TORCH, **wish)[0] == 0


MAKE_EDITABLE = """
from setuptools.build_meta import build_editable
build_editable("..")
"""
FIND_IT = """
import importlib.util, site
site.addsitedir("site")
print(importlib.util.find_spec("overflow_fast").origin)
"""


def test_an_editable_install_is_found_from_the_folder_above(tmp_path):
    checkout = tmp_path / "overflow_fast"
    (checkout / "overflow_fast").mkdir(parents=True)
    names = "pyproject.toml", "setup.py", "README.md", "overflow_fast/__init__.py"
    for name in names:
        shutil.copy(ROOT / name, checkout / name)
    variables = {"PYTHONPATH": "", "OVERFLOW_FAST_EXTENSION": "0"}
    run = {"env": {**os.environ, **variables}, "check": True, "capture_output": True}
    subprocess.run([sys.executable, "-c", MAKE_EDITABLE], cwd=checkout, **run)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    alone = [sys.executable, "-S", "-c", FIND_IT]  # beside nothing that is installed
    found = subprocess.run(alone, cwd=tmp_path, text=True, **run).stdout.strip()
    assert found == str(checkout / "overflow_fast" / "__init__.py")


def test_no_compiler(as_kept):
    status, message = setup_py(cxx="no-such-compiler -m64")
    assert status == 1
    as_kept(message)


def setup_py_with_torch(tmp_path, torch, cpp_extension="", **variables):
    """Exit status and lines of `setup.py --version`, run with this as torch."""
    utils = tmp_path / "torch" / "utils"
    utils.mkdir(parents=True, exist_ok=True)
    (utils.parent / "__init__.py").write_text(torch)
    (utils / "__init__.py").write_text("")
    (utils / "cpp_extension.py").write_text(cpp_extension)
    names = ("TORCH_CUDA_ARCH_LIST", "OVERFLOW_FAST_CUDA", "CUDA_HOME", "CUDA_PATH")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(tmp_path)} | variables,
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


@pytest.mark.parametrize(
    "torch, variables",
    [
        ("__version__ = '2.9.1+cu128'", {}),
        (NO_TORCH, {}),
        ("", {"OVERFLOW_FAST_EXTENSION": "no"}),
    ],
    ids=["too old", "missing", "unknown wish"],
)
def test_a_torch_or_a_wish_that_cannot_be_used(tmp_path, torch, variables, as_kept):
    status, lines = setup_py_with_torch(tmp_path, torch, **variables)
    assert status == 1
    as_kept(lines[-1])


HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h")
CUDA_TORCH = """
import types
__version__ = "2.11.0+cu{0}"
version = types.SimpleNamespace(cuda="{0[0]}{0[1]}.{0[2]}")
cuda = types.SimpleNamespace(get_arch_list=lambda: "{1}".split())
"""
CUDA_EXTENSION = """
import os
import setuptools
from setuptools.command.build_ext import build_ext as BuildExtension
CUDA_HOME = os.environ.get("CUDA_HOME") or {0}
def CppExtension(name, sources, **options):
    return setuptools.Extension(name, [])
def CUDAExtension(name, sources, **options):
    print(os.environ["TORCH_CUDA_ARCH_LIST"], *options["library_dirs"], *sources)
    return setuptools.Extension(name, [])
"""
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then
  echo 'Cuda compilation tools, release {0}, V1'
elif [ -n "{1}" ]; then
  echo 'host_config.h:143:2: error: #error -- {1}' >&2
  exit 1
fi
"""
REFUSAL = "unsupported GNU version! gcc versions later than 13 are not supported!"
LIBRARY = "lib64/libcudart.so"


@pytest.fixture(scope="session")
def cudart(tmp_path_factory):
    """A library that a linker takes."""
    path = tmp_path_factory.mktemp("cudart") / "libcudart.so"
    subprocess.run(["g++", "-shared", "-o", path, "-x", "c++", os.devnull], check=True)
    return path


def make_toolkit(home, release, cudart, headers=HEADERS, says="", library=LIBRARY):
    """Makes a folder like a toolkit, whose nvcc refuses its host compiler or not."""
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(release, says))
    nvcc.chmod(0o755)
    (home / "include").mkdir()
    for header in headers:
        (home / "include" / header).write_text("")
    if library:
        (home / library).parent.mkdir()
        shutil.copy(cudart, home / library)


def setup_py_with_cuda(tmp_path, torch_cuda, home, arches="", **variables):
    """Exit status and lines of setup.py with a torch that finds this toolkit."""
    extension = CUDA_EXTENSION.replace("{0}", repr(home and str(home)))
    torch = CUDA_TORCH.format(torch_cuda, arches)
    return setup_py_with_torch(tmp_path, torch, extension, **variables)


@pytest.fixture
def setup_with_cuda(cudart):
    """Exit status and lines of setup.py with a torch and a toolkit for CUDA."""

    def run(tmp_path, torch_cuda, toolkit, headers=HEADERS, arches="", **variables):
        home = tmp_path / "torch" / "utils"
        make_toolkit(home, toolkit, cudart, headers)
        return setup_py_with_cuda(tmp_path, torch_cuda, home, arches, **variables)

    return run


CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"


@pytest.mark.parametrize(
    "torch_cuda, arches, variables, expected",
    [
        ("130", CU130, {}, "7.5;8.0;9.0;10.0;12.0+PTX"),
        ("126", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", {}, "7.0;8.0;9.0+PTX"),
        ("130", "sm_87 sm_110", {}, "8.7;11.0+PTX"),
        ("124", "", {}, "7.5;8.0;9.0+PTX"),
        ("130", CU130, {"TORCH_CUDA_ARCH_LIST": "8.6"}, "8.6"),
    ],
)
def test_the_architectures_cuda_is_built_for(
    setup_with_cuda, tmp_path, torch_cuda, arches, variables, expected
):
    toolkit = f"{torch_cuda[:2]}.{torch_cuda[2]}"
    variables = {"arches": arches, **variables}
    status, lines = setup_with_cuda(tmp_path, torch_cuda, toolkit, **variables)
    found, *sources = lines[0].split()
    assert (status, found) == (0, expected)
    assert "csrc/scan/cuda/scan_kernel.cu" in sources
    assert "csrc/scan/cuda/cuda_device.cpp" in sources


@pytest.mark.parametrize(
    "torch_cuda, toolkit",
    [
        *(("124", "12.4"), ("126", "12.4"), ("124", "13.0")),
        *(("130", "13.0"), ("130", "12.6"), ("130", None)),
    ],
)
def test_a_toolkit_is_taken_if_its_major_release_is_torchs(
    cudart, tmp_path, torch_cuda, toolkit
):
    home = tmp_path / "cuda" if toolkit else None
    if home:
        make_toolkit(home, toolkit, cudart)
    status, (first, *_) = setup_py_with_cuda(tmp_path, torch_cuda, home)
    is_taken = toolkit is not None and toolkit[:2] == torch_cuda[:2]
    assert status == 0
    assert first.startswith("overflow_fast: building without CUDA") != is_taken
    if toolkit is None:
        assert f"no CUDA toolkit {torch_cuda[:2]}.{torch_cuda[2]} was found" in first


def test_the_toolkit_of_pip_is_found(cudart, tmp_path):
    """Its library has no name that a linker looks for."""
    home, other = tmp_path / "nvidia" / "cu13", tmp_path / "other"
    make_toolkit(home, "13.0", cudart, library="lib/libcudart.so.13")
    make_toolkit(other, "12.4", cudart)
    _, (first, *_) = setup_py_with_cuda(tmp_path, "130", other)
    assert first.split()[1] == str(ROOT / "build" / "cudart")
    assert (ROOT / "build/cudart/libcudart.so").samefile(home / "lib/libcudart.so.13")


def test_a_named_toolkit_is_not_replaced(cudart, tmp_path):
    make_toolkit(tmp_path / "nvidia" / "cu13", "13.0", cudart)
    make_toolkit(tmp_path / "other", "12.4", cudart)
    variables = {"CUDA_HOME": str(tmp_path / "other")}
    _, (first, *_) = setup_py_with_cuda(tmp_path, "130", None, **variables)
    assert "is 12.4 and torch was built with CUDA 13.0" in first


@pytest.mark.parametrize("wish", ["auto", "1"])
def test_a_compiler_that_nvcc_refuses(cudart, tmp_path, wish, as_kept):
    make_toolkit(tmp_path / "cuda", "12.4", cudart, says=REFUSAL)
    variables = {"OVERFLOW_FAST_CUDA": wish}
    status, lines = setup_py_with_cuda(tmp_path, "124", tmp_path / "cuda", **variables)
    assert status == (wish == "1")
    as_kept(lines[0])


def test_a_toolkit_without_its_library(cudart, tmp_path, as_kept):
    make_toolkit(tmp_path / "cuda", "13.0", cudart, library="")
    status, lines = setup_py_with_cuda(tmp_path, "130", tmp_path / "cuda")
    assert status == 0
    as_kept(lines[0])


@pytest.mark.parametrize("is_asked_for", [False, True])
@pytest.mark.parametrize(
    "toolkit, headers",
    [("12.4", HEADERS), ("13.0", ())],
    ids=["another release", "no headers"],
)
def test_a_toolkit_that_cannot_be_used(
    setup_with_cuda, tmp_path, toolkit, headers, is_asked_for, as_kept
):
    wish = {"OVERFLOW_FAST_CUDA": "1"} if is_asked_for else {}
    status, lines = setup_with_cuda(tmp_path, "130", toolkit, headers, **wish)
    assert status == is_asked_for
    as_kept(lines[-1 if is_asked_for else 0])


def test_a_toolkit_without_a_header_that_torchs_headers_include(
    setup_with_cuda, tmp_path, as_kept
):
    (tmp_path / "torch" / "c10" / "cuda").mkdir(parents=True)
    exception = tmp_path / "torch" / "c10" / "cuda" / "CUDAException.h"
    exception.write_text("#include <cusparse.h>")
    variables = {"CPATH": str(tmp_path / "torch")}
    _, lines = setup_with_cuda(tmp_path, "130", "13.0", **variables)
    as_kept(lines[0])


def test_headers_where_the_compiler_looks_by_itself(setup_with_cuda, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for header in HEADERS:
        (elsewhere / header).write_text("")
    variables = {"CPATH": str(elsewhere)}
    _, lines = setup_with_cuda(tmp_path, "130", "13.0", headers=(), **variables)
    assert lines[0].startswith("7.5;8.0;9.0;10.0;12.0+PTX")


# An editable installation would find the extension where it is.
IMPORTS_ANEW = """
import sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
for name in [name for name in sys.modules if name.startswith("overflow_fast")]:
    del sys.modules[name]
import overflow_fast
"""
FIRST_USE = "overflow_fast.scan"
SECOND_USE = """
for name in ("scan", "OverflowGuard", "scan"):
    try:
        getattr(overflow_fast, name)
    except ImportError as error:
        print(error)
try:
    import overflow_fast._C
except ImportError as error:
    print(error)
"""
ENV = """
from overflow_fast.__main__ import main
main(["env"])
"""
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
FOLDER = folder_for(torch.__version__).name


def package_with_binaries(tmp_path, *names, checkout=False):
    """What the first use of a copy of the package says that has these binaries."""
    done = used_with_binaries(tmp_path, FIRST_USE, *names, checkout=checkout)
    # The lines of the error, or of the warning that something else scans.
    said = done.stderr.rpartition("\nImportError: ")[2].strip()
    return done.returncode, re.sub(r"^(\[overflow_fast\] )+", "", said, flags=re.M)


def used_with_binaries(tmp_path, use, *names, checkout=False):
    """The process that uses a copy of the package with these (empty) binaries."""
    package = tmp_path / "overflow_fast"
    ignored = shutil.ignore_patterns("_C.*", "__pycache__")
    shutil.copytree(ROOT / "overflow_fast", package, ignore=ignored)
    for name in names:
        path = package / "binaries" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    if checkout:
        (tmp_path / "setup.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(IMPORTS_ANEW + use)
    return python(str(script), cwd=tmp_path)


# The binaries that are there, and whether their use ends the program.
BINARIES = {
    "none": ([], False),
    "broken": ([f"{FOLDER}/_C{SUFFIX}"], True),
    "beside the package": ([f"../_C{SUFFIX}"], False),
    "other torches": ([f"torch2_{n}/_C{SUFFIX}" for n in (10, 9)], False),
    "another Python": ([f"{FOLDER}/_C.cpython-39-x.so"], False),
}


@pytest.mark.parametrize("kind", BINARIES)
def test_an_installation_says_which_extension_it_lacks(kind, tmp_path, as_kept):
    names, is_error = BINARIES[kind]
    status, message = package_with_binaries(tmp_path, *names)
    assert status == is_error
    as_kept(message)


def test_a_checkout_that_is_not_built(tmp_path, as_kept):
    status, message = package_with_binaries(tmp_path, checkout=True)
    assert status == 0
    as_kept(message)


def test_the_import_alone_asks_for_no_extension(tmp_path):
    done = used_with_binaries(tmp_path, "", f"{FOLDER}/_C{SUFFIX}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_use_says_that_the_extension_cannot_be_loaded(tmp_path, as_kept):
    done = used_with_binaries(tmp_path, SECOND_USE, f"{FOLDER}/_C{SUFFIX}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert (
        len(said) == 8 and set(said[::2]) == {said[0]} and set(said[1::2]) == {said[1]}
    )
    as_kept(said[0])
    as_kept(said[1])


def test_env_says_that_the_extension_cannot_be_loaded(tmp_path, as_kept):
    done = used_with_binaries(tmp_path, ENV, f"{FOLDER}/_C{SUFFIX}")
    assert done.returncode == 0, done.stderr
    as_kept(done.stdout.splitlines()[1])
    assert f"PyTorch version: {torch.__version__}\n" in done.stdout


def test_env_says_that_there_is_no_extension(tmp_path, as_kept):
    done = used_with_binaries(tmp_path, ENV)
    assert done.returncode == 0, done.stderr
    as_kept([line for line in done.stdout.splitlines() if "kernels" in line])
    as_kept(done.stderr)


COMMANDS = """
import sys, torch
from overflow_fast.__main__ import main
for arguments in (["run", "train.py"], ["run", "--help"], ["demo"], ["explain", "x"]):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    print(arguments, status, file=sys.stderr)
"""


@pytest.mark.parametrize("is_there", [False, True])
def test_commands_that_need_the_extension_end_with_its_sentence(tmp_path, is_there):
    (tmp_path / "train.py").write_text("raise SystemExit('trained')")
    names = [f"{FOLDER}/_C{SUFFIX}"] if is_there else []
    done = used_with_binaries(tmp_path, COMMANDS, *names)
    said = done.stderr.splitlines()
    assert done.returncode == 0 and "Traceback" not in done.stderr
    wanted = "cannot be loaded" if is_there else "is not built"
    told = [line for line in said if wanted in line and "_fast]" not in line]
    assert len(told) == (4 if is_there else 3)  # help needs none, if it can be made
    assert said[:2] == [told[0], "['run', 'train.py'] 2"]
    assert "['demo'] 2" in said and said[-2:] == [told[-1], "['explain', 'x'] 2"]


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1234"])
def test_setup_builds_where_the_package_looks(version):
    assert folder_for(version).name == "torch2_13"
    assert (
        runpy.run_path(str(ROOT / "setup.py"))["binary_folder"](version) == "torch2_13"
    )


def test_every_source_is_compiled_once():
    names = runpy.run_path(str(ROOT / "setup.py"))
    folders = [folder for unit in names["UNITS"].values() for folder in unit]
    files = names["sources"](*folders, *names["KERNELS"])
    compiled = []
    for path in names["join_units"](files):
        included = re.findall(r'#include "../../(.+)"', (ROOT / path).read_text())
        compiled += included if path.startswith("build/units") else [path]
    assert sorted(compiled) == files
    written = {path.relative_to(ROOT).as_posix() for path in CSRC.rglob("*.cpp")}
    assert written - set(compiled) == {"csrc/scan/cuda/cuda_device.cpp"}


def test_progress_is_shown_and_the_output_is_kept(capfd, as_kept):
    progress = runpy.run_path(str(ROOT / "setup.py"))["progress"]
    terminal = io.StringIO()
    with progress(terminal):
        os.write(1, b"Emitting ninja build file\n[1/2] c++ a\na.cpp:1: warning\n")
        os.write(1, b"[2/2] c++ b\n")
    as_kept(terminal.getvalue().splitlines())
    assert capfd.readouterr().out.splitlines()[1:] == [
        "[1/2] c++ a",
        "a.cpp:1: warning",
        "[2/2] c++ b",
    ]


@pytest.mark.parametrize(
    "variable, message",
    [
        ("PYTHON=no-python", "no-python was not found; install Python 3.10 or newer"),
        ("CXX=no-compiler", "no C++ compiler: no-compiler was not found; install g++"),
    ],
)
def test_make_says_what_is_missing(tmp_path, variable, message):
    if shutil.which("make") is None:
        pytest.skip("no make")
    command = ["make", "build", f"VENV={tmp_path / 'venv'}", variable]
    # The tests may run under make, which tells its children to say where they are.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout.startswith(f"overflow_fast: {message}")
    assert not (tmp_path / "venv").exists()


def test_no_build_flag_changes_what_a_nan_is():
    flags = ("fast-math", "Ofast", "finite-math", "use_fast_math")
    files = [ROOT / "setup.py", ROOT / "Makefile", *(ROOT / "csrc").rglob("*.*")]
    for path in files:
        text = path.read_text().replace("No fast-math, ever", "")
        assert not any(f"-{flag}" in text for flag in flags), path
