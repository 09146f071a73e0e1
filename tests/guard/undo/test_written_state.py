"""Steps whose forward writes to what it reads: buffers of any size, weights, flags."""

import logging

import pytest
import torch
from failed_runs import failed
from torch import nn

from overflow_fast import OverflowGuard, assert_finite_state
from overflow_fast.guard.undo import writing_modules
from overflow_fast.monitors import LayerAudit, MaskedOps

pytestmark = pytest.mark.explains


class Codebook(nn.Module):
    def __init__(self, size, is_trained=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(size))
        if is_trained:
            del self.ema
            self.ema = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        y = self.linear(x) * 0 / self.ema.sum()
        with torch.no_grad():
            self.ema += 1
        return y.sum()


@pytest.mark.parametrize(
    "size, is_trained",
    [*((n, False) for n in (1000, 2**14 + 1, 2**18, 2**18 + 1, 2**20)), (1000, True)],
)
def test_buffers_of_every_size_and_weights_are_those_of_the_beginning_in_a_replay(
    size, is_trained
):
    model = Codebook(size, is_trained)
    report = failed(model, lambda: model(torch.ones(3, 4)))
    assert report.explanation.cause == "undefined"
    assert not model.ema.any()


class ActNorm(nn.Module):
    """Initializes its weight by its first batch."""

    def __init__(self, by_data=False, size=4):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(size))
        self.is_done, self.by_data = False, by_data

    def forward(self, x):
        if not self.is_done:
            with torch.no_grad():
                own = self.log_scale.data if self.by_data else self.log_scale
                own.copy_((-torch.log(x.std(0))).repeat(len(own) // 4))
            self.is_done = True
        return x * self.log_scale[:4].exp()


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_weight_that_the_forward_has_written_is_no_bad_weight(by_data, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ActNorm(by_data))
    model[0].weight.data[2] = 0
    assert_finite_state(model)
    x = torch.randn(8, 4)
    report = failed(model, lambda: model(x).mean(), policy)
    found = report.explanation
    assert (found.phase, found.cause, found.module) == ("forward", "undefined", "1")
    assert found.op.name == "aten.log" and "torch.log(x.std(0))" in found.op.code
    assert "before the step" not in " ".join(found.evidence)
    assert not model[1].log_scale.any() and not model[1].is_done
    assert "not known" not in str(report) and "initialize" not in str(report)


def test_a_large_weight_that_the_forward_has_written_is_said_to_be_unknown(as_kept):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ActNorm(size=2**16))
    model[0].weight.data[2] = 0
    x = torch.randn(8, 4)
    report = failed(model, lambda: model(x).mean())
    found = report.explanation
    assert found.cause == "unknown" and found.tensor == "1.log_scale"
    as_kept(found.evidence[0])
    as_kept(found.notes[0])
    as_kept(report.notes)
    said = " ".join(report.sentences())
    assert "the step's forward, which has written to 1.log_scale" in said
    assert "not known whether" not in said and "to try" not in said


def begun_by(module, x):
    module.layers[0].weight.data.copy_(x[:4].log())
    module.is_done = True


class BegunLate(nn.Module):
    """Its forward begins the weight of a layer, or an attribute, with a large batch."""

    def __init__(self, form):
        super().__init__()
        self.layers, self.form = nn.ModuleList([nn.Linear(4, 4)]), form
        self.is_done, self.codes = form == "attribute", None

    @torch.no_grad()
    def begin(self, x):
        self.layers[0].weight.copy_(x[:4].log())
        self.is_done = True

    def begin_attribute(self, x):
        self.codes = x.log()

    def forward(self, x):
        begins = len(x) > 4
        if begins and not self.is_done:
            self.begin(x) if self.form == "method" else begun_by(self, x)
        if begins and self.form == "attribute" and self.codes is None:
            self.begin_attribute(x)
        y = self.layers[0](x)
        return (y if self.codes is None else y * self.codes).sum()


@pytest.mark.parametrize("form", ["method", "function", "attribute"])
def test_what_code_begins_in_the_middle_of_a_training_is_run_again(form):
    torch.manual_seed(0)
    model = nn.Sequential(BegunLate(form))
    own, x = model[0], torch.eye(4)
    usual = [lambda: model(x)] * 10
    report = failed(model, lambda: model(x.repeat(2, 1)), before=usual)
    found = report.explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert ".log()" in found.op.code and "not known" not in str(report)
    assert own.layers[0].weight.isfinite().all()
    assert own.is_done == (form == "attribute")


def test_an_attribute_that_was_bad_before_is_known_in_each_step():
    torch.manual_seed(0)
    model = nn.Sequential(BegunLate("attribute"))

    def spoiled():
        loss = model(torch.eye(4))
        model[0].codes = torch.full((4,), float("inf"))
        return loss

    usual = [lambda: model(torch.eye(4))] * 9
    report = failed(model, lambda: model(torch.eye(4)), before=[*usual, spoiled])
    found = report.explanation
    assert (found.cause, found.tensor) == ("bad weights", "0.codes")


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.zeros(4, dtype=torch.bool)
        mask[0] = True
        return self.layer(x).masked_fill_(mask, 0).detach()


class OfBegun(BegunLate):
    def forward(self, x):
        return super().forward(x) + 1


def test_code_that_writes_to_modules_is_known_by_its_class():
    begun, quiet = BegunLate("method"), Silent()
    assert writing_modules.writes_of(begun)[:2] == (True, True)
    assert writing_modules.writes_of(OfBegun("method"))[:2] == (True, True)
    assert writing_modules.written_by(begun) == {begun, *begun.layers, begun.layers}
    others = quiet, nn.BatchNorm1d(4), nn.Sequential(begun)
    assert not any(any(writing_modules.writes_of(each)[:2]) for each in others)
    begun.layers.append(nn.Sequential(begun.layers))  # which holds itself
    assert begun.layers[0] in writing_modules.written_by(begun)


@pytest.mark.parametrize("size", [9, 2**13])  # copied in the first steps, and not
@pytest.mark.parametrize("monitors", [[LayerAudit(1)], [MaskedOps(1)]])
def test_weights_that_embeddings_renormalize(size, monitors, caplog):
    def trained(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(size, 16, max_norm=0.3), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = OverflowGuard(model, optimizer, **options) if options else None
        for i in range(20):
            generator = torch.Generator().manual_seed(i)
            x = torch.randint(0, size, (30,), generator=generator)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            guard.remove()
        return model[0].weight.detach()

    with caplog.at_level(logging.WARNING, "overflow_fast"):
        assert trained().equal(trained(monitors=monitors))
    assert "corruption" not in caplog.text and "put back" not in caplog.text


def test_scripted_layers_are_not_audited():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.LayerNorm(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, monitors=[LayerAudit(1)]) as guard:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert guard.coverage().failures == 0
