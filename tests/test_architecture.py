"""Files use only what stands before them on the way from the hook to the report."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overflow_fast"

# Torch's private APIs: any module may use it, and it uses none.
ROOM = "torch_internals"
# A module may import those in its own line, and nothing else of the package.
ALLOWED = {
    "tensors": {"_C"},
    "ops": {"_C", "tensors"},
    "metal.__init__": {"_C"},
    "report": {"_C"},
    "traced_numbers": set(),
    "traced_text": set(),
    "traced_graph": {"tensors", "traced_numbers", "traced_text"},
    "traced_place": set(),
    "traced_walk": {"traced_text"},
    "traced": {
        *("_C", "names", "tensors"),
        *("traced_graph", "traced_place", "traced_text", "traced_walk"),
    },
    "compiled_boundary": set(),
    "hooks": {"_C", "traced"},
    "coverage": {"_C"},
    "callbacks": {"_C", "coverage", "tensors"},
    "owner": {"_C", "coverage", "hooks", "traced_walk"},
    "steps": {"_C", "coverage", "hooks", "owner", "compiled_boundary"},
    "debug": {"_C", "ops", "report", "steps"},
    "lines": set(),
    "log": set(),
    "names": set(),
    "selection": {"names"},
    "guard.modules": {"names", "selection"},
    "replaced_forward": set(),
    "float32": {"replaced_forward"},
    "module_kinds": set(),
    "precision": {"float32", "names", "selection"},
    "guard.__init__": set(),
    "guard.cadence": set(),
    "guard.scalers": {"guard.verdict"},
    "guard.snapshot": {"guard.nested"},
    "guard.strays": {"guard.snapshot"},
    "guard.nested": set(),
    "guard.optimizers": {"_C", "guard.nested", "guard.snapshot", "guard.strays"},
    "guard.rounds": {"guard.optimizers", "guard.report"},
    "guard.watch": {
        *("_C", "guard.batch", "guard.loop_batches", "guard.modules", "hooks"),
        *("names", "selection", "steps", "tensors", "traced", "traced_walk"),
    },
    "guard.coverage": {"coverage", "guard.watch"},
    "guard.buffers": {"guard.watch"},
    "guard.step_tensors": {
        *("_C", "guard.cadence", "guard.nested", "guard.watch", "selection", "tensors"),
    },
    "guard.verdict": {"_C", "report", "guard.watch"},
    "guard.batch": {"_C"},
    "guard.loop_batches": {"guard.batch"},
    "guard.settings": set(),
    "guard.calls": {"_C", "guard.verdict", "guard.watch"},
    "guard.hooked": {"_C"},
    "guard.handed": {
        *("_C", "guard.batch", "guard.calls", "guard.hooked", "guard.verdict"),
        "report",
    },
    "guard.kept": {
        *("_C", "guard.batch", "guard.calls", "guard.handed", "guard.verdict"),
        *("guard.watch", "report", "tensors"),
    },
    "guard.forward": {
        *("_C", "guard.calls", "guard.handed", "guard.hooked", "guard.kept"),
        "guard.verdict",
        "report",
    },
    "guard.backward": {"_C", "guard.calls", "guard.hooked", "guard.verdict"},
    "guard.parameters": {
        *(
            "_C",
            "guard.batch",
            "guard.calls",
            "guard.hooked",
            "guard.verdict",
            "report",
        ),
    },
    "guard.remarks": {"_C", "guard.batch", "guard.verdict", "report"},
    "guard.attribution": {
        *("_C", "guard.backward", "guard.calls", "guard.forward"),
        *("guard.parameters", "guard.remarks", "guard.verdict", "guard.watch"),
        "report",
    },
    "guard.origin": {"guard.verdict"},
    "guard.half_casts": set(),
    "guard.remedy": {
        *("_C", "guard.half_casts", "guard.verdict", "guard.watch"),
        *("module_kinds", "names"),
    },
    "guard.advice": {"guard.remedy", "guard.settings", "guard.verdict"},
    "guard.report": {
        *("_C", "debug", "lines", "report", "guard.advice", "guard.origin"),
        *("guard.remedy", "guard.strict_json", "guard.verdict", "guard.watch"),
    },
    "guard.meter": {"guard.report"},
    "guard.strict_json": set(),
    "guard.run": {"__version__", "guard.strict_json", "guard.watch"},
    "guard.json_log": {"guard.strict_json"},
    "guard.evidence_tensors": {"ops"},
    "guard.evidence": {
        *("guard.evidence_tensors", "guard.report", "guard.run", "guard.strict_json"),
    },
    "guard.run_lines": {"guard.coverage", "guard.report", "guard.watch"},
    "guard.metrics": set(),
    "guard.rules": {"_C", "guard.verdict", "guard.watch", "report", "selection"},
    "guard.headroom": {"_C", "guard.verdict", "guard.watch", "lines"},
    "guard.options": {
        *("guard.metrics", "guard.optimizers", "guard.policy", "guard.report"),
        *("guard.rules", "guard.watch", "names", "selection"),
    },
    "guard.archive": {
        *("guard.evidence", "guard.json_log", "guard.options", "guard.report"),
        *("guard.run", "guard.step_tensors", "guard.verdict", "guard.watch"),
    },
    "guard.joining": set(),
    "guard.groups": {"guard.nested", "names"},
    "guard.peers": set(),
    "guard.participants": {
        *("guard.groups", "guard.joining", "guard.peers", "guard.watch"),
    },
    "guard.agreement": {
        *("guard.joining", "guard.participants", "guard.peers", "guard.report"),
        *("guard.verdict", "guard.watch"),
    },
    "guard.learning": {
        *("_C", "guard.agreement", "guard.rules", "guard.verdict", "guard.watch"),
    },
    "guard.policy": set(),
    "guard.alarms": {"guard.report"},
    "guard.step_result": {
        *("guard.optimizers", "guard.step_tensors", "guard.verdict"),
    },
    "guard.step_report": {
        *("guard.archive", "guard.options", "guard.policy", "guard.remedy"),
        *("guard.report", "guard.step_result", "guard.verdict", "guard.watch", "ops"),
    },
    "guard.device_flags": {"guard.optimizers", "guard.options", "guard.watch"},
    "guard.isolation": {"_C", "guard.meter", "guard.report"},
    "guard.decision": {
        *("_C", "guard.agreement", "guard.alarms", "guard.archive"),
        *("guard.attribution", "guard.learning", "guard.optimizers", "guard.options"),
        *("guard.policy", "guard.report", "guard.rounds", "guard.settings"),
        *("guard.step_report", "guard.step_result", "guard.verdict", "guard.watch"),
    },
    "guard.judgement": {
        *("_C", "guard.buffers", "guard.cadence", "guard.decision"),
        *("guard.device_flags", "guard.step_result"),
        *("guard.optimizers", "guard.options", "guard.report", "guard.scalers"),
        *("guard.step_tensors", "guard.verdict", "guard.watch"),
    },
    "guard.state": {
        *("_C", "guard.attribution", "guard.cadence", "guard.optimizers"),
        *("guard.options", "guard.report", "guard.rules", "guard.step_tensors"),
        *("guard.verdict", "guard.watch", "selection"),
    },
    "guard.faults": {"hooks"},
    "guard.fault_results": set(),
    "guard.self_test": {
        *("_C", "guard.attribution", "guard.cadence", "guard.fault_results"),
        *(
            "guard.faults",
            "guard.step_tensors",
            "guard.verdict",
            "guard.watch",
            "selection",
            "tensors",
        ),
    },
    "guard.supervisor": {
        *("_C", "guard.cadence", "guard.coverage", "guard.decision", "guard.headroom"),
        *("guard.joining", "guard.judgement", "guard.loop_batches", "guard.meter"),
        *("guard.metrics", "guard.optimizers", "guard.options", "guard.report"),
        *("guard.rounds", "guard.rules", "guard.scalers", "guard.watch"),
        *("guard.fault_results", "guard.isolation", "guard.learning"),
        *("guard.self_test", "guard.step_result"),
    },
    "guard.guard": {
        *("_C", "guard.cadence", "guard.coverage", "guard.fault_results"),
        *("guard.headroom", "guard.joining"),
        *("guard.metrics", "guard.options", "guard.report", "guard.rules"),
        *("guard.learning", "guard.run_lines", "guard.self_test", "guard.state"),
        "guard.supervisor",
    },
    "__init__": {
        *("_C", "callbacks", "coverage", "debug", "log", "metal", "ops", "precision"),
        *("guard.coverage", "guard.guard", "guard.report", "guard.state"),
    },
    "__main__": {"_C", "__version__", "demo", "integrations.transformers"},
    "integrations.__init__": set(),
    "integrations.transformers": {"debug", "hooks"},
    "integrations.stand_in": set(),
    "integrations.guarded": {"guard.guard", "guard.options"},
    "integrations.trainer": {"guard.report", "integrations.guarded"},
    "integrations.lightning": {
        *("guard.guard", "integrations.guarded", "integrations.stand_in"),
    },
    "integrations.accelerate": {
        *("guard.guard", "integrations.guarded", "integrations.stand_in"),
    },
    "integrations.tensorboard": {"guard.metrics", "guard.options"},
    "integrations.prometheus": {"guard.metrics", "guard.options"},
    "demo.__init__": {"debug", "demo.model", "precision"},
    "demo.model": set(),
}


def modules():
    for path in PACKAGE.rglob("*.py"):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def imports_of(name, path):
    """What of the package a module imports, as dotted names below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = name.split(".")[: -node.level]
        if node.module:
            found.add(".".join([*base, node.module]))
        else:
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


@pytest.mark.parametrize("name, path", list(modules()), ids=str)
def test_imports_run_one_way(name, path):
    found = {i for i in imports_of(name, path) if not i.startswith(ROOM)}
    if name.startswith(ROOM):
        assert imports_of(name, path) <= {f"{ROOM}.registry"}
    else:
        assert found <= ALLOWED[name]


def test_every_module_has_its_place():
    assert {n for n, _ in modules() if not n.startswith(ROOM)} == set(ALLOWED)


TORCH_FREE = [
    *(ROOT / "csrc" / name for name in ("dtype.h", "stat.h", "layout.h", "half.h")),
    *(ROOT / "csrc" / name for name in ("device.h", "variants.h", "variants.cpp")),
    *(ROOT / "csrc" / "cpu").glob("*"),
    *(ROOT / "csrc" / "mps").glob("*"),
    *(path for path in (ROOT / "csrc" / "cuda").glob("*") if path.suffix != ".cpp"),
]


@pytest.mark.parametrize("path", TORCH_FREE, ids=lambda path: path.name)
def test_the_scan_core_knows_no_torch(path):
    includes = re.findall(r"#include [<\"](.+)[>\"]", path.read_text())
    foreign = [i for i in includes if re.match(r"(torch|ATen|c10|pybind11|Python)", i)]
    assert foreign == []


def test_the_core_knows_no_text_and_no_policy():
    for path in (ROOT / "csrc").rglob("*.*"):
        assert not re.search(r"abs min|Detected|batch number", path.read_text()), path


def test_the_extension_imports_nothing_of_the_package():
    for path in (ROOT / "csrc").rglob("*.*"):
        imported = re.findall(r"import(?:_)?\(\s*\"([\w.]+)", path.read_text(), re.I)
        assert not [name for name in imported if name.startswith("overflow_fast")], path
