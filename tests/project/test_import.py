"""Importing the package, and each of its names, loads what that needs."""

import ast
import importlib
import pickle
import pydoc
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import overflow_fast
from overflow_fast import _C

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

PACKAGE = Path(overflow_fast.__file__).parent


# The table of names.


def checked_names():
    """The modules of the names that type checkers see."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    found = {}
    for node in tree.body:
        is_name = isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names if is_name else ():
            assert alias.asname == alias.name, "handed on only as itself"
            found[alias.name] = node.module or alias.name
    return found


def test_type_checkers_see_the_table_of_names():
    assert checked_names() == overflow_fast._MODULES
    assert sorted(overflow_fast._MODULES) == sorted(overflow_fast.__all__)


def test_each_name_is_what_its_module_has():
    for name, path in overflow_fast._MODULES.items():
        module = importlib.import_module(f"overflow_fast.{path}")
        expected = module if path == name else getattr(module, name)
        assert getattr(overflow_fast, name) is expected, name
    assert isinstance(overflow_fast.options, types.ModuleType)


def test_another_name_is_not_there(as_kept):
    assert not hasattr(overflow_fast, "nope")
    as_kept.error(AttributeError, getattr, overflow_fast, "nope")
    with pytest.raises(ImportError) as raised:
        from overflow_fast import nope  # noqa: F401
    as_kept(raised.value)


def test_names_are_the_same_after_a_reload():
    before = {name: getattr(overflow_fast, name) for name in overflow_fast.__all__}
    assert importlib.reload(overflow_fast) is overflow_fast
    assert before == {name: getattr(overflow_fast, name) for name in before}


def test_help_shows_the_names():
    shown = pydoc.render_doc(overflow_fast, renderer=pydoc.plaintext)
    for name in overflow_fast.__all__:
        assert name in shown


# What is loaded.

LOADED = "sorted(n for n in sys.modules if n.partition('.')[0] == 'overflow_fast')"


def test_the_import_loads_nothing_else():
    code = f"import sys, overflow_fast; print({LOADED}, 'torch' in sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert loaded.strip() == "['overflow_fast'] False"


LOST = """
import sys, torch, overflow_fast
from torch import nn

class Scaled(nn.Module):
    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        variance = (x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
        return centred / torch.sqrt(variance)

torch.manual_seed(1)
x = torch.randn(3, 50, 8) - 5
x[2] = -15.942385 + 1e-5 * torch.randn(50, 8)
found = overflow_fast.explain(Scaled(), x)
assert found.cause == "rounding" and found.lost_by is not None, found
x = torch.ones(3, 8) + 1e30 * torch.eye(3, 8)
with torch.no_grad():
    found = overflow_fast.explain(Scaled(), x[..., None] ** 2)
print("sympy" in sys.modules)
"""


def test_an_explanation_does_not_import_sympy():
    code = [sys.executable, "-W", "ignore", "-c", LOST]
    assert subprocess.check_output(code, text=True) == "False\n"


def test_each_name_can_be_the_first(fresh):
    for name in {path: name for name, path in overflow_fast._MODULES.items()}.values():
        assert fresh(f"from overflow_fast import {name}") == ""


STAR = """
import overflow_fast
from overflow_fast import _C
shown = dir(overflow_fast)
from overflow_fast import *
assert sorted([*overflow_fast.__all__, "__version__"]) == shown == dir(overflow_fast)
assert all(globals()[n] is getattr(overflow_fast, n) for n in overflow_fast.__all__)
import overflow_fast.tools.compare.recorded, torch
torch.ops.overflow_fast.scan
"""


def test_a_star_imports_all_names(fresh):
    fresh(STAR)


THREADS = """
import threading, overflow_fast
names, found = ("scan", "OverflowGuard", "DebugUnderflowOverflow", "explain"), []
begin = threading.Barrier(8)

def ask(first):
    begin.wait()
    for i in range(4):
        name = names[(first + i) % 4]
        found.append((name, getattr(overflow_fast, name)))

threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
for each in threads: each.start()
for each in threads: each.join()
print(len(found), len(set(found)))
"""


def test_threads_may_ask_for_names_at_once(fresh):
    assert fresh(THREADS) == "32 4\n"


def test_pickles_find_what_they_name(tmp_path, fresh):
    model = nn.Sequential(nn.Linear(2, 2))
    detector = overflow_fast.DebugUnderflowOverflow(model)
    stat = overflow_fast.scan([torch.ones(2)])[0]
    stored = tmp_path / "stored.pkl"
    stored.write_bytes(pickle.dumps((_C.FrameHook, stat, model)))
    detector.remove()
    code = """
import pickle, sys
hook, stat, model = pickle.load(open(sys.argv[1], "rb"))
import overflow_fast, torch
assert type(stat) is overflow_fast.Stat and stat.abs_max == 1
model[0].weight.data.fill_(torch.inf)
try:
    model(torch.ones(1, 2))
except ValueError:
    print("detected")
"""
    assert fresh(code, str(stored)).strip().endswith("detected")


# Dynamo, whose import takes as long as torch's.

BEGIN = """
import sys, threading, torch
from torch import nn
import overflow_fast as of

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x):
        return self.layer(x)

def detects(call, model):
    weight, kept = model.layer.weight.data, model.layer.weight.data.clone()
    call(torch.ones(1, 2))
    weight.fill_(torch.inf)
    try:
        call(torch.ones(1, 2))
    except ValueError:
        return True
    finally:
        weight.copy_(kept)
    return False

def is_waiting():
    return any("overflow_fast" in type(each).__module__ for each in sys.meta_path)

model = Net()
"""


PROGRAMS = {
    "a detector and a guard do without dynamo": """
detector = of.DebugUnderflowOverflow(model)
assert detects(model, model)
detector.remove()
guard = of.OverflowGuard(model)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
guard.remove()
assert "torch._dynamo" not in sys.modules and not is_waiting()
""",
    "a copy that is compiled later has the hooks": """
import copy
detector = of.DebugUnderflowOverflow(model)
model_2 = copy.deepcopy(model)
detector.remove()
assert is_waiting()
assert detects(torch.compile(model_2, fullgraph=True, backend="eager"), model_2)
""",
    "code of a twin is not run for a model with hooks": """
detector = of.DebugUnderflowOverflow(model)
call = torch.compile(lambda model, x: model(x), backend="eager")
call(Net(), torch.ones(1, 2))
assert detects(lambda x: call(model, x), model)
""",
    "what was compiled before has the hooks": """
call = torch.compile(model, backend="eager")
call(torch.ones(1, 2))
detector = of.DebugUnderflowOverflow(model)
assert detects(call, model) and not is_waiting()
""",
    "dynamo is imported where hooks cannot be registered": """
detector = of.DebugUnderflowOverflow(model)
sys.modules["overflow_fast.detector.compiled"] = None  # gone from the disk
import torch._dynamo
assert not is_waiting() and detects(model, model)
""",
    "hooks that could not be loaded are loaded later": """
import logging
logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
detector = of.DebugUnderflowOverflow(model)
sys.modules["overflow_fast.detector.compiled"] = None  # gone for a while
call = torch.compile(lambda x: model(x), backend="eager")
call(torch.ones(1, 2))
del sys.modules["overflow_fast.detector.compiled"]
detector.remove()
detector = of.DebugUnderflowOverflow(model)
call = torch.compile(lambda x: model(x), fullgraph=True, backend="eager")
assert detects(call, model)
""",
    "hooks that could not be registered are registered later": """
import logging
logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
import torch._dynamo
real = torch.compiler.substitute_in_graph

def fails(function, **options):
    if "root" in repr(function) or "paused" in repr(function):
        raise RuntimeError("not now")
    return real(function, **options)

torch.compiler.substitute_in_graph = fails
of.DebugUnderflowOverflow(model).remove()
torch.compiler.substitute_in_graph = real
detector = of.DebugUnderflowOverflow(model)
call = torch.compile(lambda x: model(x), fullgraph=True, backend="eager")
assert detects(call, model)
""",
    "two first traces load the hooks once": """
import time
from overflow_fast.detector import compiled, dynamo

def register():
    calls.append(threading.get_ident())
    time.sleep(0.1)
    return True

calls, compiled.register = [], register
threads = [threading.Thread(target=dynamo._is_loaded) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
assert len(calls) == 1
""",
    "threads may import dynamo while hooks are put on": """
begin = threading.Barrier(5)

def attach():
    begin.wait()
    detectors.append(of.DebugUnderflowOverflow(Net()))

def load():
    begin.wait()
    import torch._dynamo

of.DebugUnderflowOverflow
detectors = []
threads = [threading.Thread(target=f) for f in (load, attach, load, attach)]
for each in threads: each.start()
begin.wait()
for each in threads: each.join()
detector = of.DebugUnderflowOverflow(model)
call = torch.compile(model, fullgraph=True, backend="eager")
assert detects(call, model) and len(detectors) == 2 and not is_waiting()
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_hooks_and_dynamo_whichever_comes_first(program, fresh):
    fresh(BEGIN + PROGRAMS[program])


@pytest.mark.parametrize(
    "compiled",
    [
        "call = torch.compile(lambda x: model(x), fullgraph=True, backend='eager')",
        "thread = threading.Thread(target=__import__, args=('torch._dynamo',));"
        "thread.start(); thread.join();"
        "model.compile(fullgraph=True, backend='eager'); call = model",
    ],
    ids=["function", "in place, imported by a thread"],
)
def test_what_is_compiled_later_has_the_hooks(compiled, fresh):
    code = f"""
detector = of.DebugUnderflowOverflow(model)
assert "torch._dynamo" not in sys.modules and is_waiting()
{compiled}
assert detects(call, model) and not is_waiting()
assert torch._dynamo.__loader__ is torch._dynamo.__spec__.loader
assert type(torch._dynamo.__loader__).__name__ == "SourceFileLoader"
"""
    fresh(BEGIN + code)
