"""The package's names and docstrings, and the folders of the extension."""

import ast
import collections
import re
from pathlib import Path

from processes import python

import overflow_fast

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "overflow_fast"

# A folder of the extension uses those before it. Python's: test_layers.py.
FOLDERS = ("torch_internals", "scan", "record", "python")


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


MODULES = dict(modules())


def test_the_package_shows_its_public_names_alone():
    shown = [name for name in dir(overflow_fast) if not name.startswith("__")]
    assert shown == sorted(overflow_fast.__all__)
    for name in overflow_fast.__all__:
        assert getattr(overflow_fast, name).__doc__, name


# Each is imported by its path, and then read attribute by attribute, as users do.
REACH = """
import functools, importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    _, *parts = name.split(".")
    if functools.reduce(getattr, parts, sys.modules["overflow_fast"]) is not module:
        print(name)
"""


def test_no_public_name_hides_a_module():
    rooms = {name.removesuffix(".__init__") for name in MODULES}
    rooms -= {"__init__", "__main__"}
    # These import trainers, which may not be installed.
    names = [name for name in rooms if not name.startswith("integrations")]
    paths = [f"overflow_fast.{name}" for name in sorted(names)]
    done = python("-c", REACH, *paths)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    own = {"integrations", "monitors", "options"}
    assert not rooms & set(overflow_fast.__all__) - own


def test_no_two_classes_have_one_name():
    """But for those that a module keeps to itself."""
    defined = collections.Counter(
        node.name
        for name, path in MODULES.items()
        if name != "scanner.fallback"  # stands in for the extension's names
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    several = {name for name, count in defined.items() if count > 1}
    assert {name for name in several if not name.startswith("_")} == set()


# Docstrings.

OPENING = re.compile(r"(What|Whether|Says|Who|Has|(Tells|Returns) whether)\b")


def test_docstrings_open_with_a_verb_or_a_noun():
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    found = [
        f"{name}: {ast.get_docstring(node).splitlines()[0]}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and OPENING.match(ast.get_docstring(node) or "")
    ]
    assert found == []


# The extension.

CSRC = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
TORCH_FREE = [
    *(ROOT / "csrc/scan" / f"{name}.h" for name in ("dtype", "stat", "layout", "half")),
    *(ROOT / "csrc/scan" / name for name in ("device.h", "variants.h", "variants.cpp")),
    *(ROOT / "csrc/scan/cpu").glob("*"),
    *(ROOT / "csrc/scan/mps").glob("*"),
    *(path for path in (ROOT / "csrc/scan/cuda").glob("*") if path.suffix != ".cpp"),
]


def test_every_file_has_its_folder():
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in CSRC} == set(FOLDERS)


def test_folders_use_those_before_them():
    for path in CSRC:
        folder = path.relative_to(ROOT / "csrc").parts[0]
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            target = (path.parent / include).resolve()
            assert target.exists(), (path, include)
            used = target.relative_to(ROOT / "csrc").parts[0]
            assert FOLDERS.index(used) <= FOLDERS.index(folder), (path, include)


def test_the_scan_core_knows_no_torch():
    for path in TORCH_FREE:
        foreign = r"#include [<\"](torch|ATen|c10|pybind11|Python)"
        assert not re.search(foreign, path.read_text()), path


def test_the_extension_knows_no_text_no_policy_and_no_python_module():
    for path in CSRC:
        text = path.read_text()
        assert not re.search(r"abs min|Detected|batch number", text), path
        assert not re.search(r'import\("overflow_fast', text), path
