"""Healthy programs whose models return -inf are not stopped; what is bad there is."""

import logging

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from guarding import INF, NAN, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Schedule

VOCABULARY = 12
NOT_ALLOWED = torch.arange(VOCABULARY) >= 9


class Masked(Assembled):
    def forward(self, x):
        return self.mask(x)


def padded(logits):
    whole = torch.full_like(logits, -INF)
    return torch.where(NOT_ALLOWED, whole, logits)


def beams(logits):
    return torch.full((len(logits), 4), -INF).index_fill(1, torch.tensor([0]), 0.0)


MASKS = {
    "actions": lambda logits: logits.masked_fill(NOT_ALLOWED, -INF),
    "vocabulary": padded,
    "log probabilities": lambda logits: padded(logits).log_softmax(-1),
    "beams": lambda logits: (logits, beams(logits)),
    "causal": lambda logits: {"x": logits, "mask": torch.full((6, 6), -INF).triu(1)},
    "one-hot": lambda logits: (logits, F.one_hot(logits.argmax(-1)).float().log()),
    "added": lambda logits: (
        logits + torch.zeros(VOCABULARY).masked_fill(NOT_ALLOWED, -INF)
    ),
}


class Policy(Assembled):
    """Has a fault where it is told to."""

    def forward(self, tokens):
        logits = self.head(self.embed(tokens).tanh())
        if self.fault is not None:
            logits = logits + torch.zeros(VOCABULARY).index_fill(
                0, tokens[:1], self.fault
            )
        return self.masked(logits)


def logits_of(output):
    output = output.get("x") if isinstance(output, dict) else output
    return output[0] if isinstance(output, tuple) else output


def make(mask, **options):
    torch.manual_seed(0)
    model = Policy(
        embed=nn.Embedding(VOCABULARY, 8),
        head=nn.Linear(8, VOCABULARY),
        masked=Masked(mask=MASKS[mask]),
        fault=None,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, OverflowGuard(model, optimizer, **options)


def loss_of(call, tokens):
    return F.cross_entropy(logits_of(call(tokens)), tokens)


def train(model, optimizer, guard, way, faults, call=None):
    """Makes steps; the faults are those of each forward, one without autograd first."""
    call = model if call is None else call
    for old, new in faults:
        tokens = torch.randint(0, 9, (6,))
        model.fault = old
        with torch.no_grad():
            call(tokens)
        model.fault = new
        if way == "run":
            loss = guard.run(lambda: loss_of(call, tokens))  # noqa: B023
        else:
            loss = loss_of(call, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def told(caplog):
    return [e.getMessage() for e in caplog.records if "no alarm" in e.getMessage()]


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING, "overflow_fast")


OPTIONS = [
    {},
    {"explain": False},
    {"watch": "tripwire"},
    {"sync": "lagged"},
    {"sync": "lagged", "_defer": True},
    {"schedule": Schedule(every=2)},
]


@pytest.mark.parametrize("way", ["alone", "run"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_program_whose_model_returns_masks_goes_on_and_is_told_once(
    mask, way, caplog
):
    model, optimizer, guard = make(mask)
    with guard:
        train(model, optimizer, guard, way, [(None, None)] * 3)
        assert guard.check() is None
    assert len(told(caplog)) == 1 and guard.last_report is None
    assert guard.last_step_skipped is False and guard.metrics()["steps_total"] == 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_goes_on_with_any_option(options, tmp_path):
    model, optimizer, guard = make("actions", record=tmp_path / "r", **options)
    with guard:
        train(model, optimizer, guard, "run", [(None, None)] * 3)
        assert guard.check() is None


def test_it_goes_on_where_an_optimizer_reads_what_devices_found():
    model, _, _ = make("actions")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    guard = OverflowGuard(model, optimizer, sync="lagged", _defer=True)
    with guard:
        train(model, optimizer, guard, "run", [(None, None)] * 2)
        before = state_of(model)
        train(model, optimizer, guard, "run", [(None, None)])
        assert not before["model"]["head.weight"].equal(model.head.weight)
        with pytest.raises(NonFiniteError):
            train(model, optimizer, guard, "run", [(None, NAN), (None, None)])


@pytest.mark.slow
def test_it_goes_on_in_compiled_code():
    model, optimizer, guard = make("actions")
    compiled = torch.compile(model, backend="eager")
    with guard:
        train(model, optimizer, guard, "run", [(None, None)] * 3, compiled)


def test_a_scaler_that_skips_its_first_step_goes_on():
    model, optimizer, guard = make("actions")
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with guard:
        for _ in range(30):
            tokens = torch.randint(0, 9, (6,))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, tokens) * 100).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 1e38 and guard.last_report is None


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("fault", [NAN, INF, -INF])
@pytest.mark.parametrize("mask", ["actions", "beams"])
def test_what_is_bad_is_an_alarm_before_a_weight_changes(mask, fault, at):
    """-inf at the target makes the loss inf, with finite gradients."""
    model, optimizer, guard = make(mask)
    with guard:
        train(model, optimizer, guard, "run", [(None, None)] * at)
        before = state_of(model)["model"]
        with pytest.raises(NonFiniteError):
            train(model, optimizer, guard, "run", [(None, fault)])
    assert all(before[name].equal(each) for name, each in model.state_dict().items())


@pytest.mark.parametrize("fault", [NAN, INF])
def test_what_is_bad_without_autograd_is_an_alarm(fault):
    model, optimizer, guard = make("actions")
    with guard:
        train(model, optimizer, guard, "alone", [(None, None)])
        with pytest.raises(NonFiniteError, match="without autograd"):
            train(model, optimizer, guard, "alone", [(fault, None)])


@pytest.mark.parametrize(("message", "has_report"), [("mine", False), ("nan", True)])
def test_an_exception_is_not_said_to_be_of_a_mask_unless_it_is_of_values(
    message, has_report
):
    model, _, guard = make("actions", explain=False)
    with pytest.raises(ValueError, match=message), guard:
        model(torch.arange(6))
        raise ValueError(message)
    assert (guard.last_report is not None) == has_report


def test_a_mask_beside_what_is_bad_is_what_may_have_made_it():
    model, optimizer, guard = make("actions", explain=False)
    with guard, pytest.raises(NonFiniteError, match=r"of masked \(Masked\) holds 18"):
        tokens = torch.arange(6)
        (logits_of(model(tokens)).softmax(-1).sum() * NAN).backward()
        optimizer.step()


@pytest.mark.parametrize("autograd", [False, True])
def test_what_has_no_finite_value_is_no_mask(autograd):
    model = nn.Sequential(nn.Linear(2, 2), Masked(mask=lambda x: x.sum() * 0 - INF))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OverflowGuard(model, optimizer), pytest.raises(NonFiniteError):
        with torch.set_grad_enabled(autograd):
            loss = model(torch.ones(2, 2))
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("watch", [(), ("tripwire",)])
@pytest.mark.parametrize("mask", ["actions", "beams", "one-hot"])
def test_the_rule_that_is_told_silences_it(mask, watch, autograd, caplog):
    options = {"watch": watch[0]} if watch else {}
    model, _, trained = make(mask)
    trained.remove()
    guard = OverflowGuard(model, **options)
    tokens = torch.arange(6)

    def run():
        caplog.clear()
        with guard, torch.set_grad_enabled(autograd), guard.request():
            guard.run(lambda: model(tokens))
        return told(caplog)

    (text,) = run()
    rule = text.split("allow=")[1].split("}")[0] + "}"
    guard.remove()
    guard = OverflowGuard(model, allow=eval(rule), **options)
    assert run() == [] and guard.coverage().rules_unused == []
    guard.remove()


def test_one_rule_is_told_for_all_layers(caplog, as_kept):
    layers = [Masked(mask=lambda x: x.masked_fill(NOT_ALLOWED, -INF)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Softmax(-1))
    with OverflowGuard(model), torch.no_grad():
        model(torch.zeros(2, VOCABULARY))
    as_kept(*told(caplog))


def test_what_is_recorded_is_judged():
    model, optimizer, guard = make("actions")
    with guard, pytest.raises(NonFiniteError, match="holds 18 -inf"):
        output = model(torch.arange(6))
        guard.record(scores=output)
        F.cross_entropy(output, torch.arange(6)).backward()
        optimizer.step()
