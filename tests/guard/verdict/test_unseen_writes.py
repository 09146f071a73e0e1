"""Values that are written without torch counting it: no reader is named for them."""

import math
import types

import pytest
import torch
from test_attribution import verdict_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

SMALL, LARGE = 2, 64  # rows of 32 floats: a larger one is remembered, not scanned again
WRITERS = {"inner": ["b"], "between": ["the model"], "reader": ["c"]}


def write(tensor):
    tensor.detach().numpy()[0, 0] = math.inf


class Writes(nn.Module):
    """Calls a layer, and writes to its output or its input if it is the writer."""

    def __init__(self, place):
        super().__init__()
        self.layer, self.place = nn.Linear(32, 32), place

    def forward(self, x):
        if self.place == "reader":
            write(x)
        y = self.layer(x)
        if self.place == "inner":
            write(y)
        return y


class Net(nn.Module):
    """b's layer makes a value that c's layer reads; one of three writes to it."""

    def __init__(self, place, reader=None):
        super().__init__()
        self.b = Writes(place if place == "inner" else "")
        self.c = reader or Writes(place if place == "reader" else "")
        self.place = place

    def forward(self, x):
        y = self.b(x)
        if self.place == "between":
            write(y)
        return self.c(y)


def finite_input(rows):
    return torch.ones(rows, 32)


@pytest.mark.parametrize("place", WRITERS)
@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_a_value_that_was_finite_when_it_was_returned_is_not_its_readers(
    place, rows, as_kept
):
    torch.manual_seed(0)
    verdict = verdict_of(Net(place), lambda m: m(finite_input(rows)).mean())
    if place == "inner" and rows == SMALL:  # b's own output is scanned again
        assert (verdict.origin.how, verdict.origin.maker) == ("made", "b")
        return
    assert (verdict.origin.how, verdict.origin.source) == ("unclear", "unclear")
    as_kept(verdict.origin.maker)
    assert set(verdict.origin.candidates) >= set(WRITERS[place])
    assert (
        "b.layer" not in verdict.origin.candidates
        and "c.layer" not in verdict.origin.candidates
    )
    assert verdict.origin.after == "b.layer"


def test_a_value_that_no_node_of_autograd_has_made_is_known_from_the_scan_before():
    model = Net("between")
    model.b.requires_grad_(False)
    verdict = verdict_of(model, lambda m: m(finite_input(LARGE)).mean())
    assert (verdict.origin.how, verdict.origin.after) == ("unclear", "b.layer")


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_what_a_module_computes_between_two_calls_is_still_its_own(rows):
    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.c(self.b(x) / 0)

    verdict = verdict_of(Divides(), lambda m: m(finite_input(rows)).mean())
    assert (verdict.origin.source, verdict.origin.candidates) == (
        "caller",
        ["the model"],
    )


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_a_write_between_two_models_is_not_the_second_ones(rows):
    first, second = nn.Linear(32, 32), nn.Linear(32, 1)

    def step(models):
        y = models[0](finite_input(rows))
        write(y)
        return models[1](y).mean()

    verdict = verdict_of([first, second], step)
    assert verdict.origin.how == "unclear"
    assert verdict.origin.candidates == ["the training loop"]


def test_later_readers_are_given_what_was_found_when_it_was_scanned_again():
    """The output of tanh is finite: its frame is bad for its input alone."""

    class Twice(Net):
        def forward(self, x):
            y = self.b(x)
            write(y)
            return self.c(y) + torch.tanh(self.d(y))

    def num_bad(rows):
        model = Twice("", nn.Softmax(-1))
        model.d = nn.Tanh()
        return verdict_of(model, lambda m: m(finite_input(rows)).mean()).num_bad_frames

    assert num_bad(LARGE) == num_bad(SMALL)


def overflowing():
    """A layer whose output is -inf in whichever order the processor adds."""
    hidden, layer = nn.Linear(32, 32), nn.Linear(32, 4)
    with torch.no_grad():
        hidden.weight.zero_()
        hidden.bias.fill_(1.0)
        layer.weight.fill_(-3e38)
    return nn.Sequential(hidden, layer)


@pytest.mark.parametrize("defer", [False, True])
def test_a_layer_that_can_have_made_it_is_named_with_when_its_input_was_seen(
    defer, as_kept
):
    model = overflowing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = OverflowGuard(model, optimizer, _defer=defer)
    model(finite_input(LARGE)).mean().backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    verdict = error.value.report.verdict
    assert (verdict.origin.how, verdict.origin.candidates) == ("made", ["1"])
    assert verdict.origin.stale_inputs == ["input[0]"] * defer
    as_kept(error.value)
    guard.remove()


MACHINE = types.ModuleType("machine")  # no replay restores what it counts


class Once(Writes):
    """Writes in its first call alone: a replay is finite."""

    def forward(self, x):
        y = self.layer(x)
        MACHINE.num_calls += 1
        if MACHINE.num_calls == 1:
            write(y)
        return y


def once_writing():
    MACHINE.num_calls = 0
    return nn.Sequential(Once(""), nn.Softmax(-1), nn.Linear(32, 1))


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.explains
def test_a_replay_that_is_finite_names_no_reader(defer):
    model = once_writing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OverflowGuard(model, optimizer, _defer=defer) as guard:
        guard.run(lambda: model(finite_input(LARGE)).square().mean()).backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    report = error.value.report
    assert report.explanation.cause == "not reproducible"
    assert report.explanation.module == ""
    # On a device the input was not scanned again, which the report says.
    assert report.verdict.origin.candidates == (["1"] if defer else ["0"])
    assert report.verdict.origin.stale_inputs == ["input[0]"]


@pytest.mark.parametrize("watch", ["tripwire", None])
@pytest.mark.explains
def test_the_loss_is_not_blamed_for_what_it_was_given(watch, as_kept):
    """A replay's outputs are finite, the gradient that it gives them is the step's."""
    model = once_writing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arguments = {} if watch is None else {"watch": watch}
    with OverflowGuard(model, optimizer, **arguments):
        output = model(finite_input(LARGE))
        output.square().mean().backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    verdict = error.value.report.verdict
    assert (verdict.origin.how, verdict.origin.source) == ("unclear", "unclear")
    as_kept(error.value)
    found = error.value.report.explanation
    if watch:
        assert verdict.origin.candidates == ["the loss", "the batch", "the model"]
        return
    assert (found.phase, found.cause) == ("forward", "not reproducible")
    as_kept(found.evidence)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_the_tripwire_blames_the_loss_where_the_steps_outputs_are_still_there(
    is_dropped,
):
    model = nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with OverflowGuard(model, optimizer, "warn", watch="tripwire") as guard:
        output = model(finite_input(SMALL))
        loss = (output * 0).log().mean()
        if is_dropped:
            del output
        loss.backward()
        optimizer.step()
    source = "unclear" if is_dropped else "loss"
    assert guard.last_report.verdict.origin.source == source
