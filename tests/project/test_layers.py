"""Five layers: none knows an outer one, and none loads more than it needs.

scan < detector < guard < explain < tools. What each use loads is seen in a new process.
"""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import overflow_fast
from overflow_fast.guard import outer

PACKAGE = Path(overflow_fast.__file__).parent

LAYERS = {
    "scan": ("_C", "base", "binaries", "scanner", "torch_internals"),
    "detector": ("detector",),
    "guard": ("guard", "options"),
    "explain": ("explainer", "precision"),
    "tools": ("tools", "integrations", "monitors"),
}
ORDER = tuple(LAYERS)
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
# `__init__` is a table of names, and `__main__` the command line.
FACE = ("__init__", "__main__")
# What the guard's layer calls of outer ones: all of it stands in guard/outer.py.
OUTER = {
    "explainer.step_explainer:StepExplainer",
    "explainer.loss_line:loss_at_hand",
    "explainer.optimizer_step:explain_seen_update",
    "tools.selftest:SelfTest",
    "tools.page.guard_page:write_guard_page",
    "tools.page.guard_page:evidence_page",
}


def _name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts)


MODULES = {_name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
INNER = [name for name in MODULES if name not in FACE]


@functools.cache
def _nodes(name):
    """All nodes of a module, but for what type checkers alone read."""
    waiting, found = [ast.parse(MODULES[name].read_text())], []
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


@functools.cache
def imports_of(name):
    """The modules of the package that a module imports, wherever it does."""
    own = name.split(".")
    is_package = MODULES[name].name == "__init__.py"
    found = set()
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            plain = [each.name.split(".") for each in node.names]
            found |= {".".join(p[1:]) for p in plain if p[0] == PACKAGE.name and p[1:]}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = own[: len(own) - node.level + is_package]
        elif node.module.split(".")[0] == PACKAGE.name:
            base = []
        else:
            continue
        module = (node.module or "").removeprefix(PACKAGE.name).strip(".")
        base = [*base, *filter(None, module.split("."))]
        for alias in node.names:
            whole = ".".join([*base, alias.name])
            found.add(whole if whole in MODULES or whole == "_C" else ".".join(base))
    return found - {""}


def named_in(name):
    """The modules of the package that stand as text in a module's code."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    docs = {
        id(node.body[0].value)
        for node in _nodes(name)
        if isinstance(node, documented)
        and ast.get_docstring(node, clean=False) is not None
    }
    texts = [
        node.value
        for node in _nodes(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docs
    ]
    found = set()
    for text in texts:
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+(:\w+)?", text):
            path = text.partition(":")[0].removeprefix(f"{PACKAGE.name}.")
            parts = path.split(".")
            heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
            found.add(max((h for h in heads if h in MODULES), key=len, default=""))
    return found - {""}


def layer_of(name):
    return ORDER.index(LAYER_OF[name.split(".")[0]])


def test_each_module_has_a_layer():
    assert {name.split(".")[0] for name in INNER} | {"_C"} == set(LAYER_OF)


def test_no_layer_knows_an_outer_one():
    version = {"__init__"}  # some ask for it
    outward = {
        (name, used)
        for name in INNER
        for used in (imports_of(name) | named_in(name)) - version
        if layer_of(used) > layer_of(name)
    }
    assert outward <= {("guard.outer", each.partition(":")[0]) for each in OUTER}


def test_what_a_guard_calls_of_outer_layers_is_listed():
    assert set(outer._PLACES.values()) == OUTER


def test_no_module_is_in_a_circle():
    graph = {name: imports_of(name) & set(INNER) for name in INNER}
    graphlib.TopologicalSorter(graph).prepare()


# What is really loaded.

CODE = """
import contextlib, io, json, logging, os, sys
import torch
logging.disable(logging.CRITICAL)
torch.manual_seed(0)  # with gradients that are not all 0
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
x = torch.ones(2, 4)
optimizer = torch.optim.AdamW(model.parameters()) if {has_optimizer} else None
had_dynamo = "torch._dynamo" in sys.modules  # torch's optimizers import it
import overflow_fast as of
def steps(count, **arguments):
    with of.OverflowGuard(model, optimizer, "skip", **arguments):
        for _ in range(count):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
{use}
names = [name for name in sys.modules if name.split(".")[0] == "overflow_fast"]
has_dynamo = "torch._dynamo" in sys.modules and not had_dynamo
print(json.dumps([names, has_dynamo]), file=sys.__stdout__)
"""
FILES = "log='run.jsonl', record='run.ofr'"
BAD = "x[0, 0] = float('inf')"
# The layer that is the last to be loaded.
USES = {
    "import overflow_fast": ("", None),
    "scan([x])": ("of.scan([x])", "scan"),
    "a detector's forward": ("of.DebugUnderflowOverflow(model); model(x)", "detector"),
    "a guard without an optimizer": (
        *("guard = of.OverflowGuard(model); model(x).mean().backward()", "guard"),
    ),
    "a guard's clean steps": (f"steps(3, {FILES})", "guard"),
    "a bad step without explanation": (
        *(f"{BAD}; steps(1, explain=False, {FILES})", "guard"),
    ),
    "a bad step": (f"{BAD}; steps(1, {FILES})", "explain"),
}


@pytest.mark.parametrize("use", USES)
def test_what_a_use_loads(use, tmp_path, fresh):
    code, last = USES[use]
    whole = CODE.replace("{has_optimizer}", str("steps(" in code))
    printed = fresh(whole.replace("{use}", code), cwd=tmp_path)
    names, has_dynamo = json.loads(printed.splitlines()[-1])
    own = {name.partition(".")[2] for name in names} - {""}
    layers = {LAYER_OF[name.split(".")[0]] for name in own}
    inner = () if last is None else ORDER[: ORDER.index(last) + 1]
    assert layers <= {*inner, *(["scan"] if last is None else [])}
    assert last is None or last in layers
    assert not has_dynamo


LOG = """
import contextlib, io, json, sys
from overflow_fast.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    status = main(["suspects", "run.jsonl"])
names = [name for name in sys.modules if name.split(".")[0] == "overflow_fast"]
print(json.dumps([names, "torch" in sys.modules, status, out.getvalue()]))
"""


def test_reading_a_log_loads_no_torch_and_no_guard(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    log = tmp_path / "run.jsonl"
    with overflow_fast.OverflowGuard(model, optimizer, "skip", log=log):
        model(torch.full((1, 2), float("nan"))).sum().backward()
        optimizer.step()
    command = [sys.executable, "-W", "ignore", "-c", LOG]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names, has_torch, status, out = json.loads(done.stdout)
    assert (status, has_torch) == (0, False)
    assert "transient" in out
    of_guard = {name for name in names if name.startswith("overflow_fast.guard.")}
    assert {name.split(".")[2] for name in of_guard} <= {"files", "report", "record"}
