"""Without an extension: what torch operations do, and what says that it is missing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import python

from overflow_fast import _C
from overflow_fast.scanner.fallback import fallback_module

ROOT = Path(__file__).parents[2]
# An editable installation would find the extension where it is.
SCRIPT = """
import json, sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
for name in [name for name in sys.modules if name.startswith("overflow_fast")]:
    del sys.modules[name]
import torch
import overflow_fast as of

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
of.assert_finite_state(model, optimizer)
said = {}

def keep(name, function, *arguments, **options):
    try:
        said[name] = str(function(*arguments, **options))
    except (ImportError, of.NonFiniteError) as error:
        said[name] = f"{type(error).__name__}: {error}"

state = optimizer.state[model[0].weight]["exp_avg"]
for name, tensor, value in (
    ("weight", model[0].weight.data, float("nan")),
    ("buffer", model[1].running_var, float("inf")),
    ("state", state, -float("inf")),
):
    kept = tensor.clone()
    tensor[0] = value
    keep(name, of.assert_finite_state, model, optimizer)
    tensor.copy_(kept)
model[1].running_mean[0] = -float("inf")
keep("mask", of.assert_finite_state, model, optimizer)
model[0].weight.data[0] = float("inf")
allow = {"0:weight.weight": "inf"}
keep("allowed", of.assert_finite_state, model, optimizer, allow=allow)
keep("guard", of.OverflowGuard, model, optimizer)
keep("detector", of.DebugUnderflowOverflow, model)
parts = [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(3) / 0]
said["scan"] = [[s.abs_max, s.has_inf, s.not_scanned] for s in of.scan(parts)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a program says without an extension; under "warning" what it logs."""
    folder = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns("_C.*", "torch2_*", "__pycache__")
    shutil.copytree(ROOT / "overflow_fast", folder / "overflow_fast", ignore=ignored)
    (folder / "script.py").write_text(SCRIPT)
    done = python(str(folder / "script.py"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"warning": done.stderr}


def test_what_is_missing_is_logged_once(said, as_kept):
    as_kept(said["warning"])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("weight", "weight `0.weight` holds 2 nan"),
        ("buffer", "buffer `1.running_var` holds 1 inf"),
        ("state", "optimizer state `0.weight.exp_avg` holds 2 -inf"),
    ],
)
def test_a_state_that_is_not_finite_is_refused(said, name, found):
    assert said[name].startswith("NonFiniteError: ")
    assert found in " ".join(said[name].split())


@pytest.mark.parametrize("name", ["mask", "allowed"])
def test_what_is_meant_is_no_alarm(said, name):
    assert said[name] == "None"


@pytest.mark.parametrize("name", ["guard", "detector"])
def test_what_needs_the_extension_says_how_to_get_it(said, name, as_kept):
    as_kept(said[name])


def test_wrappers_are_scanned_and_others_say_why(said):
    assert said["scan"] == [
        [1.0, False, None],
        [None, False, "meta tensor"],
        [float("inf"), True, None],
    ]


NAMES = ("LabelStyle", "Readability", "Role", "ScanBackend")


@pytest.mark.parametrize("name", NAMES)
def test_its_enumerations_are_those_of_the_extension(name):
    theirs, ours = getattr(_C, name), getattr(fallback_module(), name)
    assert list(ours.__members__) == list(theirs.__members__)


def test_its_kinds_of_values_are_those_of_the_extension():
    for name in ("POSITIVE_INF", "NEGATIVE_INF", "NAN"):
        assert getattr(fallback_module(), name) == getattr(_C, name)


def test_large_tensors_are_scanned_in_pieces():
    tensor = torch.ones(3, (1 << 22) + 5)
    tensor[0, 7], tensor[2, -1] = float("inf"), float("nan")
    stat = fallback_module().scan_tensors([tensor])[0]
    assert (stat.num_nan, stat.num_inf) == (1, 1)
    assert stat.abs_max != stat.abs_max and stat.abs_min != stat.abs_min
