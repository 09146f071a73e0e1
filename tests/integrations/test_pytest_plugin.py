"""The mark and the fixture fail a test in which a model becomes non-finite."""

import os
import re
import subprocess
import sys

import pytest
from pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

TESTS = """
import pytest, torch
from torch import nn

INF = float("inf")


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, value):
    model(torch.full((1, 2), value)).sum().backward()
    optimizer.step()


def test_passes_without_it():
    train(*net(), INF)


@pytest.mark.overflow_guard
def test_passes_marked():
    train(*net(), 1.0)


@pytest.mark.overflow_guard(explain=False)
def test_fails_marked_step():
    train(*net(), INF)


@pytest.mark.overflow_guard(explain=False)
def test_fails_marked_inference():
    with torch.no_grad():
        net()[0](torch.full((1, 2), INF))


@pytest.mark.overflow_guard("tripwire")
def test_fails_marked_wrongly():
    pass


@pytest.mark.overflow_guard(wach="tripwire")
def test_fails_marked_with_a_wrong_name():
    train(*net(), 1.0)


@pytest.mark.overflow_guard(allow={"*:output": "all"})
def test_fails_marked_with_a_wrong_value():
    train(*net(), 1.0)


@pytest.mark.overflow_guard(include=["zzz*"])
def test_fails_marked_with_no_module():
    train(*net(), 1.0)


@pytest.mark.overflow_guard
def test_passes_marked_in_vain():
    nn.Linear(2, 2)(torch.full((1, 2), INF))


def test_passes_with_the_fixture(overflow_guard):
    model, optimizer = net()
    overflow_guard(model, optimizer)
    train(model, optimizer, 1.0)


def test_fails_forward(overflow_guard):
    model, _ = net()
    overflow_guard(model, explain=False)
    model(torch.full((1, 2), INF))


def test_fails_backward(overflow_guard):
    model, _ = net()
    overflow_guard(model, explain=False)
    (model(torch.ones(1, 2)) * 0).sum().sqrt().backward()


def test_fails_step(overflow_guard):
    model, optimizer = net()
    overflow_guard(model, optimizer, explain=False)
    train(model, optimizer, INF)


def test_fails_update(overflow_guard):
    model, optimizer = net()
    overflow_guard(model, optimizer, explain=False)
    optimizer.param_groups[0]["lr"] = 3e38
    (model(torch.ones(1, 2)) * 100).sum().backward()
    optimizer.step()


def test_passes_afterwards():
    train(*net(), INF)
"""

UNUSED = """
import sys


def test_it_is_there(pytestconfig):
    assert "overflow_fast.integrations.pytest_plugin" in sys.modules
    assert any("overflow_guard" in line for line in pytestconfig.getini("markers"))


def test_it_has_imported_nothing():
    assert not {"torch", "msgspec", "overflow_fast.guard.guard"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")

    def run(source):
        (folder / "test_it.py").write_text(source)
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
        plugins = "overflow_fast.integrations.pytest_plugin", "no:cacheprovider"
        options = ["-q", "-rA", "--strict-markers", *(f"-p{each}" for each in plugins)]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *options,
                "test_it.py",
            ],
            env=os.environ | alone,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        return done.stdout

    return run


@pytest.fixture(scope="module")
def output(run):
    return run(TESTS)


def test_each_ends_as_its_name_says(output):
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_it.py::(\w+)", output, re.M)
    assert len(found) == TESTS.count("def test_")
    for end, name in found:
        assert end == ("FAILED" if "_fails_" in name else "PASSED"), (name, output)


def test_what_the_end_of_a_test_finds_is_shown_in_full(output):
    sections = re.split(r"^_+ (test_\w+) _+$", output, flags=re.M)
    shown = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name in ("test_fails_forward", "test_fails_backward"):
        assert "print(" not in shown[name]
        assert "values are non-finite." in shown[name]


@pytest.mark.parametrize(
    "text",
    [
        "Step 0: `input[0]` of 0 (Linear) holds 2 inf.",
        "It was found in a forward without autograd",
        "must be given arguments of OverflowGuard by name",
        "the mark overflow_guard: OverflowGuard has no argument wach: did you mean",
        "the mark overflow_guard: allow['*:output'] must be '-inf', ",
        "the mark overflow_guard: include must hold names of modules, or patterns",
        "ran no module without autograd; the fixture overflow_guard takes any model",
        "Step 0: the optimizer's step wrote ",
        "`grad_output` of 1 (Tanh) holds 2 nan",
    ],
)
def test_the_report_is_what_a_reader_sees(output, text):
    assert text in output
    assert "pytest_plugin.py" not in output
    assert "During handling" not in output


def test_a_suite_that_does_not_use_it_imports_no_torch(run):
    assert run(UNUSED).count("PASSED") == UNUSED.count("def test_")
