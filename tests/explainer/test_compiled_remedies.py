"""Remedies of steps that call compiled code are tried eagerly; the report says so."""

import sys
import threading

import pytest
import torch
from remedied_files import module_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.causes import ONLY_COMPILED

SOURCE = """import torch
from torch import nn
def root(x):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
class Norm(nn.Module):
    def forward(self, x):
        return x * root(x)
"""
EAGERLY = "Remedies were tried with compiled code run eagerly"


def whole(model):
    return torch.compile(model, backend=BACKEND[0])


def method(model):
    model.compile(backend=BACKEND[0])
    return model


def region(model):
    model[1].compile(backend=BACKEND[0])
    return model


def function(model):
    return torch.compile(lambda x: model(x), backend=BACKEND[0])


BACKEND = ["eager"]


@pytest.fixture
def norms(tmp_path, monkeypatch):
    """The module of the source and its path; dynamo imports it by its name."""
    module, path = module_of(tmp_path, SOURCE)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module, path


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def explanation_of(norm, wrap, backend, x=None, **options):
    """The explanation of a step of a model with a normalization, whose input is 0."""
    BACKEND[0] = backend
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.zero_()
    called = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, explain=True, **options)
    x = torch.zeros(3, 4) if x is None else x
    try:
        with pytest.raises(NonFiniteError) as error:
            guard.run(lambda: called(x).pow(2).mean()).backward()
            optimizer.step()
    finally:
        guard.remove()
    return error.value.report.explanation


# How the code is called matters to dynamo, which then hands its graphs to any backend.
@pytest.mark.parametrize(
    "wrap, backend",
    [
        *((wrap, "aot_eager") for wrap in (whole, method, region, function)),
        pytest.param(whole, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_remedy_of_compiled_code_is_found(wrap, backend, norms):
    module, path = norms
    found = explanation_of(module.Norm(), wrap, backend)
    good = [each for each in found.remedies if each.is_recommended]
    assert good and good[0].file == str(path), found
    assert "did not help" not in str(found)
    assert EAGERLY in str(found)


def test_without_compiled_code_nothing_is_said_of_it(norms):
    module, _ = norms
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    found = explanation_of(module.Norm(), lambda model: model, "eager")
    assert found.remedies[0].is_recommended and EAGERLY not in str(found)


def test_compiled_code_is_as_before_afterwards(norms):
    """No graph with an edit is left, and none is compiled again."""
    (module, _), backend = norms, "aot_eager"
    compiled = torch.compile(module.root, backend=backend)
    zeros, code = torch.zeros(2, 4), module.root.__code__
    assert compiled(zeros).isinf().all()
    explanation_of(module.Norm(), region, backend)
    assert module.root.__code__ is code
    assert compiled(zeros).isinf().all()


@pytest.mark.slow
def test_a_thread_that_compiles_meanwhile_sees_its_own_line(norms):
    module, _ = norms
    end, wrong, num_calls = threading.Event(), [], [0]

    def work():
        while not end.is_set():
            num_calls[0] += 1
            torch._dynamo.reset_code_caches()
            try:
                compiled = torch.compile(module.root, backend="eager", fullgraph=True)
                if not compiled(torch.zeros(2, 4)).isinf().all():
                    wrong.append("edited")
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = explanation_of(module.Norm(), lambda model: model, "eager")
    finally:
        end.set()
        thread.join()
    assert num_calls[0] and not wrong
    assert found.remedies[0].is_recommended, found


def only_compiled(graph, inputs):
    """A backend whose code returns nan."""

    def run(*args):
        return [each * float("nan") for each in graph(*args)]

    return run


def test_what_fails_in_compiled_code_alone_has_no_remedy(norms):
    module, _ = norms
    found = explanation_of(module.Norm(), region, only_compiled, torch.ones(3, 4))
    assert found.cause == ONLY_COMPILED.name, found
    assert found.remedies == []
