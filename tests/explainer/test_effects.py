"""What a step changes and a replay cannot put back makes no claim of a fault."""

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer.effects import before

NAN = float("nan")


def explained(model, loss, steps=9):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as error:
            for _ in range(steps):
                optimizer.zero_grad()
                guard.run(loss).backward()
                optimizer.step()
    return error.value.report.explanation


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def counted():
    state, model = SimpleNamespace(left=3), net()

    def loss():
        state.left -= 1
        return (model(torch.ones(3, 4)) / state.left).mean()

    return model, loss, "state.left"


def counted_in_a_list():
    left, model = [3], net()

    def loss():
        left[0] -= 1
        return (model(torch.ones(3, 4)) / left[0]).mean()

    return model, loss, "left[0]"


def drawn_by_torch():
    generator, model = torch.Generator().manual_seed(2), net()

    def loss():
        kept = torch.rand((), generator=generator) > 0.7
        return (model(torch.ones(3, 4)) / (1 - kept.float())).mean()

    return model, loss, "generator"


def drawn_by_python():
    own, model = random.Random(0), net()

    def loss():
        return (model(torch.ones(3, 4)) / min(1, own.randrange(6))).mean()

    return model, loss, "own"


def drawn_by_numpy():
    import numpy

    own, model = numpy.random.default_rng(1), net()

    def loss():
        return (model(torch.ones(3, 4)) / min(1, int(own.integers(6)))).mean()

    return model, loss, "own"


def taken_from_an_iterator():
    batches = [torch.ones(3, 4), torch.full((3, 4), NAN), *[torch.ones(3, 4)] * 9]
    stream, model = iter(batches), net()
    return model, lambda: model(next(stream)).mean(), "stream"


@pytest.mark.parametrize(
    "make",
    [
        *(counted, counted_in_a_list, drawn_by_torch, drawn_by_python, drawn_by_numpy),
        taken_from_an_iterator,
    ],
)
def test_what_the_step_changes_is_named_and_no_fault_claimed(make, as_kept):
    model, loss, name = make()
    found = explained(model, loss)
    assert found.cause != "not reproducible"
    assert not found.is_transient
    if name != "own":  # each replay draws the same numbers: those after the step
        assert not [each for each in found.remedies if each.is_recommended]
    if found.cause == "unknown":
        as_kept(found.notes[0])


def test_a_number_that_stays_is_no_doubt():
    settings, model, calls = SimpleNamespace(rate=2.0), net(), []

    class Once(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x * (NAN if len(calls) == 1 else 1)

    whole = nn.Sequential(model, Once())
    found = explained(whole, lambda: whole(torch.ones(3, 4)).mean() * settings.rate)
    assert found.cause == "not reproducible"


def test_a_method_of_a_tensors_is_no_iterator_of_that_name():
    model, x = net(), torch.full((3, 4), -100.0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    around = {"log": iter([1]), "model": model, "x": x}  # and x.log() reads no `log`
    loss = eval("lambda: model(x).log().mean()", around)
    assert explained(model, loss).cause == "undefined"


@pytest.mark.parametrize("is_on", [True, False])
def test_what_was_there_before_is_known_without_the_collector(is_on):
    def items():
        yield from "ab"

    old, was_on = items(), gc.isenabled()
    try:
        gc.enable() if is_on else gc.disable()
        known = before.Before()
        new = items()
        assert known.has(old) and not known.has(new)
        assert (known.listed is None) == is_on
    finally:
        gc.enable() if was_on else gc.disable()
