"""The norm that clipping computes stands for the gradients, if the tripwire may."""

import pytest
import torch
from pairs import pairs
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from overflow_fast import OverflowGuard
from overflow_fast.monitors import Headroom, Saturation, Underflow

INF, NAN = float("inf"), float("nan")
NUMBERS = 4 * 4 + 4  # of the model's parameters
FUNCTIONS = ("_get_total_norm", "_clip_grads_with_norm_")


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model):
    model(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()


def clip(model):
    return clip_grad_norm_(model.parameters(), 1.0)


def scanned(model, optimizer, between=lambda model: None, **options):
    """The bytes that are read in the second of two steps, of which all are clean."""
    guard = OverflowGuard(model, optimizer, watch="tripwire", **options)
    with guard:
        for _ in range(2):  # weights are scanned in the first
            before = guard.coverage().bytes_scanned
            optimizer.zero_grad()
            backward(model)
            between(model)
            optimizer.step()
        return guard.coverage().bytes_scanned - before


def test_a_norm_is_read_in_place_of_the_gradients(model, optimizer):
    assert scanned(model, optimizer) == 4 * NUMBERS
    assert scanned(model, optimizer, clip) == 4


ORDERS = [-INF, -1.0, 0.0, 0.5, 1, 2.0, 3.0, INF, "inf"]


@pytest.mark.parametrize(
    "order, foreach, bad", pairs(ORDERS, (None, False), (NAN, INF, -INF))
)
def test_no_norm_hides_a_bad_gradient(model, optimizer, order, foreach, bad):
    with OverflowGuard(model, optimizer, "skip", watch="tripwire") as guard:
        backward(model)
        model.weight.grad[1, 2] = bad
        clip_grad_norm_(model.parameters(), 1e9, order, foreach=foreach)
        is_bad = any(not p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert guard.num_skipped == is_bad


@pytest.mark.parametrize("most", [NAN, -INF, -1.0, 0.0, 1.0, INF])
def test_no_factor_hides_a_gradient_that_it_makes_bad(model, optimizer, most):
    with OverflowGuard(model, optimizer, "skip", watch="tripwire") as guard:
        backward(model)
        clip_grad_norm_(model.parameters(), most)
        is_bad = any(not p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert guard.num_skipped == is_bad


def clip_some(model, other):
    clip_grad_norm_([model.weight], 1.0)


def clip_another_model(model, other):
    clip_grad_norm_(other.parameters(), 1.0)


def clip_by_a_norm_of_others(model, other):
    norm = nn.utils.get_total_norm([p.grad for p in other.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


def clip_and_write_the_norm(model, other):
    clip_grad_norm_(model.parameters(), 1.0).fill_(1.0)


def clip_and_write_a_gradient(model, other):
    clip_grad_norm_(model.parameters(), 1.0)
    model.bias.grad.mul_(1.0)


def clip_and_go_backward_again(model, other):
    clip_grad_norm_(model.parameters(), 1.0)
    backward(model)


def clip_values(model, other):
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    "clip",
    [
        *(clip_some, clip_another_model, clip_by_a_norm_of_others, clip_values),
        *(clip_and_write_the_norm, clip_and_write_a_gradient),
        clip_and_go_backward_again,
    ],
)
def test_a_norm_that_does_not_stand_for_all_gradients_leaves_them_to_be_read(clip):
    model, optimizer = make()
    other = nn.Linear(4, 4)
    backward(other)
    between = lambda model: clip(model, other)  # noqa: E731
    assert scanned(model, optimizer, between) >= 4 * NUMBERS


def test_several_norms_may_stand_for_all_gradients(model, optimizer):
    def clip_each(model):
        for parameter in model.parameters():
            clip_grad_norm_(parameter, 1.0)

    assert scanned(model, optimizer, clip_each) == 8


def test_a_norm_need_not_stand_for_gradients_that_nothing_steps(model):
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    assert scanned(model, optimizer) == 4 * 4
    assert (
        scanned(model, optimizer, lambda model: clip_grad_norm_(model.bias, 1.0)) == 4
    )


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": lambda step, numbers: None},
        {"monitors": [Saturation(), Headroom()]},
        {"monitors": [Underflow()]},
        {"sync": "lagged"},
    ],
)
def test_gradients_whose_magnitudes_are_asked_for_are_read(model, optimizer, options):
    assert scanned(model, optimizer, clip, **options) == 4 * NUMBERS


def test_gradients_of_a_record_are_read(model, optimizer, tmp_path):
    path = tmp_path / "run.ofr"
    assert scanned(model, optimizer, clip, record=path) == 4 * NUMBERS


def test_gradients_in_float16_are_read():
    model, optimizer = make(torch.float16)
    assert scanned(model, optimizer, clip) == 2 * NUMBERS


def test_a_norm_that_overflows_is_no_alarm(model, optimizer):
    with OverflowGuard(model, optimizer, watch="tripwire", explain=False) as guard:
        backward(model)
        model.weight.grad.fill_(3e38)
        assert clip(model) == INF
        optimizer.step()  # as of any gradient of 0
    assert guard.num_skipped == 0


def test_a_norm_that_raises_is_forgotten(model, optimizer):
    with OverflowGuard(model, optimizer, "skip", watch="tripwire") as guard:
        backward(model)
        model.bias.grad[0] = NAN
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    assert guard.num_skipped == 1


def test_spikes_are_looked_for_in_the_norm(model, optimizer, caplog):
    with OverflowGuard(model, optimizer, watch="tripwire", explain=False):
        for step in range(130):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * (1e4 if step == 129 else 1.0)).backward()
            clip_grad_norm_(model.parameters(), 1e-3)  # all are clipped alike
            optimizer.step()
    assert "spikes: grad norm" in caplog.text


def test_the_functions_of_torch_are_put_back():
    before = [getattr(clip_grad, name) for name in FUNCTIONS]
    guards = [OverflowGuard(*make(), watch="tripwire") for _ in range(2)]
    for guard in guards:
        assert all(
            getattr(clip_grad, name) is not function
            for name, function in zip(FUNCTIONS, before, strict=True)
        )
        guard.remove()
    assert [getattr(clip_grad, name) for name in FUNCTIONS] == before
    with OverflowGuard(*make()):  # without a tripwire
        assert [getattr(clip_grad, name) for name in FUNCTIONS] == before


def test_what_other_code_has_wrapped_since_stays(model, optimizer, monkeypatch):
    with OverflowGuard(model, optimizer, watch="tripwire"):
        ours = clip_grad._clip_grads_with_norm_
        theirs = lambda *args: ours(*args)  # noqa: E731
        monkeypatch.setattr(clip_grad, FUNCTIONS[1], theirs)
    assert clip_grad._clip_grads_with_norm_ is theirs
    assert scanned(model, optimizer, clip) == 4
    backward(model)
    clip(model)  # without a guard


def test_compiled_clipping_is_left_alone(model, optimizer):
    clip = torch.compile(clip_grad_norm_, backend="eager")
    take = lambda model: clip(list(model.parameters()), 1.0)  # noqa: E731
    assert scanned(model, optimizer, take) in (4, 4 * NUMBERS)
