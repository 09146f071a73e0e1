"""Lines of installed packages, and losses to which no label has added anything."""

import importlib
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.base.source_files import installed_name, short_name

pytestmark = pytest.mark.usefixtures("untried")

LIBRARY = """
import torch

def ratio(loss, count):
    return loss / count

def distance(x, y):
    x = torch.log(x.abs())
    y = torch.log(y.abs())
    return (x - y).abs().mean()

class Step(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad / p.abs().sum(), alpha=-0.1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x, count):
        return ratio(self.head(x).sum() * 0, count)

def ctc(scores, labels, zero_infinity=False, **others):
    lengths = torch.tensor([len(scores)]), torch.tensor([labels.numel()])
    return torch.nn.functional.ctc_loss(
        scores[:, None], labels, *lengths, zero_infinity=zero_infinity)

class Recognizer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.head = config, torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        scores = self.head(x).log_softmax(-1)
        return ctc(scores, labels, zero_infinity=self.config.ctc_zero_infinity)

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.epsilon = 0.0

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
"""


@pytest.fixture
def lossy(tmp_path, monkeypatch):
    folder = tmp_path / "lib" / "site-packages" / "lossy" / "parts"
    folder.mkdir(parents=True)
    (folder / "ratios.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "lib" / "site-packages"))
    yield importlib.import_module("lossy.parts.ratios")
    for name in [each for each in sys.modules if each.split(".")[0] == "lossy"]:
        del sys.modules[name]


class Model(nn.Module):
    def __init__(self, divide):
        super().__init__()
        self.head, self.divide = nn.Linear(4, 3), divide

    def forward(self, x, count):
        return self.divide(self.head(x).sum() * 0, count)


def explained(model, *inputs, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        call = lambda: model(*inputs)  # noqa: E731  # the program's own line, in run
        loss = guard.run(call) if run else model(*inputs)  # the program's own line
        loss.backward()
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
    return raised.value


@pytest.mark.tries_remedies
@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("is_own_model", [True, False])
def test_a_line_of_a_package_comes_with_that_of_the_program(
    lossy, is_own_model, run, as_kept
):
    model = Model(lossy.ratio) if is_own_model else lossy.Model()
    error = explained(model, torch.ones(2, 4), torch.tensor(0.0), run=run)
    found = error.report.explanation
    assert found.op.place == "lossy/parts/ratios.py:5"
    assert found.op.called_from.startswith("test_installed_lines.py:")
    own = "self.divide(" if is_own_model else "the program's own line"
    assert own in found.op.called_from
    assert (", in run" in found.op.called_from) == (run and not is_own_model)
    assert f"your line {found.op.called_from}" in str(error).splitlines()
    remedy = found.remedies[0]
    assert remedy.is_recommended and remedy.code == ""
    as_kept(remedy)
    assert remedy.file == lossy.__file__


# Options of the model, which nobody has to edit a package's file for.


def remedied(model, *inputs):
    error = explained(model, *inputs, run=True)
    first = error.report.explanation.remedies[0]
    exec(first.code, {"model": model})
    assert model(*inputs).isfinite()
    return first


@pytest.mark.tries_remedies
def test_a_flag_of_the_models_configuration_is_set_there(lossy):
    model = lossy.Recognizer(types.SimpleNamespace(ctc_zero_infinity=False))
    first = remedied(model, torch.ones(2, 4), torch.tensor([1, 2, 1]))
    assert first.is_recommended and not first.file
    assert first.code == "model.config.ctc_zero_infinity = True"


@pytest.mark.tries_remedies
def test_a_flag_that_is_no_models_is_told_in_words(lossy):
    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x, labels):
            return lossy.ctc(self.head(x).log_softmax(-1), labels)

    error = explained(Recognizer(), torch.ones(2, 4), torch.tensor([1, 2, 1]), run=True)
    first = error.report.explanation.remedies[0]
    assert first.text.startswith("change zero_infinity to True in `") and not first.code


class Normed(nn.Module):
    def __init__(self, *norms):
        super().__init__()
        self.weight, self.norms = nn.Parameter(torch.zeros(4)), nn.ModuleList(norms)

    def forward(self, x):
        for norm in self.norms:
            x = norm(x * self.weight)
        return x.sum()


@pytest.mark.tries_remedies
def test_the_eps_of_norms_is_set_in_all_of_a_kind(lossy):
    first = remedied(Normed(lossy.Norm(), nn.Identity()), torch.ones(2, 4))
    assert first.code == 'model.get_submodule("norms.0").epsilon = 1e-6'
    first = remedied(Normed(lossy.Norm(), lossy.Norm()), torch.ones(2, 4))
    assert first.text == "set epsilon of each Norm to 1e-6"
    first = remedied(Normed(nn.LayerNorm(4, eps=0.0)), torch.ones(2, 4))
    assert first.code == 'model.get_submodule("norms.0").eps = 1e-6'


@pytest.mark.tries_remedies
def test_a_line_of_the_program_is_changed_as_ever():
    def divide(loss, count):
        return loss / count

    error = explained(Model(divide), torch.ones(2, 4), torch.tensor(0.0), run=True)
    found = error.report.explanation
    assert found.op.called_from == "" and any(each.file for each in found.remedies)


@pytest.mark.tries_remedies
def test_changes_of_several_lines_of_a_package_are_in_the_exception(lossy, as_kept):
    model = Model(lambda loss, count: lossy.distance(loss, loss.detach() + count))
    error = explained(model, torch.ones(2, 4), torch.tensor(0.0), run=True)
    as_kept([each for each in str(error).splitlines() if each.startswith("tried")])


@pytest.mark.tries_remedies
def test_a_line_of_a_package_is_changed_for_all_who_call_it(lossy):
    def divide(loss, count):
        loss = lossy.ratio(lossy.ratio(loss, torch.zeros(())), torch.zeros(()))
        return lossy.ratio(lossy.ratio(loss, torch.zeros(())), torch.zeros(()))

    error = explained(Model(divide), torch.ones(2, 4), torch.tensor(0.0), run=True)
    first = error.report.explanation.remedies[0]
    assert first.is_recommended and first.text.endswith("is 0 in `loss / count`")


@pytest.mark.explains
def test_a_step_of_a_packages_optimizer_has_a_remedy(lossy, as_kept):
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.bias)
    optimizer = lossy.Step(model.parameters())
    with OverflowGuard(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
    found = raised.value.report.explanation
    assert found.op.place == "lossy/parts/ratios.py:19"
    as_kept(found.remedies[0])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/v/lib/python3.11/site-packages/a/b.py", "a/b.py"),
        ("/usr/lib/python3/dist-packages/a/b.py", "a/b.py"),
        ("/v/site-packages/x/site-packages/a.py", "a.py"),
        (importlib.__file__, "importlib/__init__.py"),
        ("/home/me/site-packages.py", ""),
        ("/home/me/train.py", ""),
        ("<string>", ""),
    ],
)
def test_installed_files(file, name):
    assert installed_name(file) == name
    assert short_name(file) == (name or file.rpartition("/")[2])


class Labeled(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.head, self.reduction = nn.Linear(4, 3), reduction

    def forward(self, x, labels, count):
        scores = self.head(x)
        loss = functional.cross_entropy(scores, labels, reduction=self.reduction)
        return (loss.sum() * 1.0) / count


@pytest.mark.parametrize("number", [0, 0.0, torch.tensor(0)])
def test_a_sum_over_no_label_is_an_empty_reduction(number):
    labels = torch.full((4,), -100)
    count = torch.as_tensor(number)
    error = explained(Labeled("sum"), torch.ones(4, 4), labels, count, run=True)
    found = error.report.explanation
    assert found.cause == "empty reduction"
    assert found.reason.startswith("no label of the batch counts")
    assert "every sample" in found.reason and "collator" in found.reason


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_labels_that_count_are_not_blamed(reduction):
    model, labels = Labeled(reduction), torch.tensor([0, 1, -100, 2])
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 0.0, 0.0]))
    count = torch.tensor(0.0)
    error = explained(model, torch.ones(4, 4), labels, count, run=True)
    assert error.report.explanation.cause == "undefined"
