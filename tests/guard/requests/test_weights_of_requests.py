"""Which forwards without autograd scan the weights: those before which they changed."""

import threading

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

NAN = float("nan")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def scans(guard, function):
    """The number of tensors that are listed in what a function runs."""
    before = guard.coverage().tensors_listed
    function()
    return guard.coverage().tensors_listed - before


@torch.no_grad()
def forward(model):
    return model(torch.ones(3, 4))


def first_of(guard, model):
    with pytest.raises(NonFiniteError) as caught:
        forward(model)
    return caught.value.report.verdict.first.label


def test_weights_are_scanned_until_they_are_written_to():
    model = net()
    with OverflowGuard(model) as guard:
        with_weights = scans(guard, lambda: forward(model))
        assert scans(guard, lambda: forward(model)) == with_weights - 4
        with torch.no_grad():
            model[2].weight.mul_(0.5)
        assert scans(guard, lambda: forward(model)) == with_weights - 3
        assert scans(guard, lambda: forward(model)) == with_weights - 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_was_made_bad_between_requests_is_the_first(mode):
    model = net()
    with OverflowGuard(model, explain=False) as guard:
        forward(model)
        with mode():
            model[2].weight[0, 0] = NAN
        # It stays bad, and is named again by those that come after.
        assert first_of(guard, model) == "2.weight"
        assert first_of(guard, model) == "2.weight"
        with mode():
            model[2].weight[0, 0] = 0
        forward(model)


def replaced(model):
    model[2].weight = nn.Parameter(torch.full_like(model[2].weight, NAN))


def given_other_memory(model):
    model[2].weight.data = torch.full_like(model[2].weight, NAN)


def loaded(model):
    state = {name: each.clone() for name, each in model.state_dict().items()}
    state["2.weight"][0, 0] = NAN
    model.load_state_dict(state)


def assigned(model):
    state = dict(model.state_dict())
    state["2.weight"] = torch.full_like(state["2.weight"], NAN)
    model.load_state_dict(state, assign=True)


def past_its_version(model):
    model[2].weight.data[0, 0] = NAN


def by_numpy(model):
    model[2].weight.detach().numpy()[0, 0] = NAN


WAYS = [replaced, given_other_memory, loaded, assigned, past_its_version, by_numpy]


@pytest.mark.parametrize("change", WAYS)
def test_other_weights_are_scanned(change):
    model = net()
    with OverflowGuard(model, explain=False) as guard:
        forward(model)
        forward(model)
        change(model)
        assert first_of(guard, model) == "2.weight"
        assert first_of(guard, model) == "2.weight"


def test_weights_without_a_version_are_scanned_each_time():
    with torch.inference_mode():
        model = net()
    with OverflowGuard(model) as guard, torch.inference_mode():
        first = scans(guard, lambda: model(torch.ones(3, 4)))
        assert scans(guard, lambda: model(torch.ones(3, 4))) == first


def test_an_evaluation_of_a_model_that_is_trained_scans_them_each_time():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        first = scans(guard, lambda: forward(model))
        assert scans(guard, lambda: forward(model)) == first


def test_a_bad_request_of_a_model_that_is_trained_scans_them_once():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def request():
        with guard.request():
            forward(model)

    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        first = scans(guard, request)
        model[2].weight.data[0, 0] = NAN
        assert scans(guard, request) == first
    assert guard.last_report is not None


def test_weights_that_another_thread_has_scanned_are_known():
    model = net()
    with OverflowGuard(model) as guard:
        with_weights = scans(guard, lambda: forward(model))

        def beside():
            thread = threading.Thread(target=forward, args=(model,))
            thread.start()
            thread.join()

        assert scans(guard, beside) == with_weights - 4
