"""Results that are undefined because an operation before them has lost a value."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overflow_fast import explain
from overflow_fast.explainer import rounding
from overflow_fast.explainer.float64 import Float64Run
from overflow_fast.guard.report.notes import (
    NOT_IN_FLOAT64,
    NOT_LOOKED_BACK,
    SPENT,
    WHICH_SAMPLE,
)

pytestmark = pytest.mark.usefixtures("untried")


def model_of(value, dtype=torch.float32):
    """A linear layer that gives a value for an input of ones."""
    model = nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        model.weight.fill_(value / 2)
        model.bias.zero_()
    return model


def explained(value, function, dtype=torch.float32):
    """The explanation of a function of what such a layer gives."""
    model = model_of(value, dtype)
    torch.manual_seed(0)
    x = torch.ones(4, 2, dtype=dtype)
    return explain(model, x, lambda x: function(model(x)))


def in_place(x):
    y = x.clone()
    y[:, :2].exp_()
    return y[:, :2].log().sum()


def of_a_view(x):
    left, right = x.exp().chunk(2, 1)
    return left.log().sum() + right.sum()


def likelihood(x):
    scale = x.exp()
    normal = torch.distributions.Normal(scale * 0, scale, validate_args=False)
    return -normal.log_prob(scale * 0).mean()


def cross_entropy(x):
    p = torch.sigmoid(x)
    return -torch.log(1 - p).mean()


# The value given, the function, what loses it, the cause, and the first remedy.
LOST = {
    "exp in a distribution": (-150, likelihood, "exp", "underflow", "at least 1e-8"),
    "in place, of a part": (-150, in_place, "exp_", "underflow", None),
    "by a view": (-150, of_a_view, "exp", "underflow", "argument of exp"),
    "softmax": (
        *(200, lambda x: (x * torch.arange(3)).softmax(-1).log().mean()),
        *("_softmax", "underflow", "log_softmax"),
    ),
    "logsumexp": (
        *(-150, lambda x: torch.log(torch.exp(x).sum(-1)).mean()),
        *("exp", "underflow", "logsumexp"),
    ),
    "a probability of 1": (30, cross_entropy, "sigmoid", "rounding", "logsigmoid"),
    "tanh": (
        *(15, lambda x: torch.log(1 - torch.tanh(x) ** 2).mean()),
        *("tanh", "rounding", "log(1 - tanh(x)^2)"),
    ),
    "a sum": (
        *(0.1, lambda x: torch.log((1e9 + x) - 1e9).mean()),
        *("add.Tensor", "rounding", None),
    ),
    "a norm": (
        *(1e-30, lambda x: (x / x.pow(2).sum(-1, keepdim=True).sqrt()).mean()),
        *("pow.Tensor_Scalar", "underflow", None),
    ),
    "in backward": (
        *(1e-30, lambda x: x.pow(2).sum().sqrt()),
        *("pow.Tensor_Scalar", "underflow", None),
    ),
}


@pytest.mark.tries_remedies
@pytest.mark.parametrize("case", LOST)
def test_the_operation_that_lost_it(case):
    value, function, op, cause, remedy = LOST[case]
    found = explained(value, function)
    assert (found.cause, found.lost_by.name) == (cause, f"aten.{op}")
    assert found.lost_by.file == __file__
    text = "underflowed" if cause == "underflow" else "was rounded"
    lost = f" (test_lost_values.py:{found.lost_by.line}) {text}"
    assert lost in found.words.gist()
    assert "it is finite" in found.evidence[1]
    if remedy is not None:
        first = next(each for each in found.remedies if each.is_finite)
        assert remedy in (found.nearest or first).text
    # In float64 from the start it is finite, as the report says.
    wide = model_of(value, torch.float64)
    loss = function(wide(torch.ones(4, 2, dtype=torch.float64)))
    loss.backward()
    assert loss.isfinite()
    assert wide.weight.grad.isfinite().all()


def likelihood_of_a_mixture(model, x):
    mean, y = model(x), torch.tensor([[0.0, 1.0, 2.0]])
    weight = torch.full((3,), 1 / 3)
    density = torch.exp(-((y - mean) ** 2)) / (2 * weight.sum())
    return -torch.log((weight * density).sum(-1)).mean()


@pytest.mark.tries_remedies
def test_a_sum_of_densities_is_a_logsumexp_of_logarithms():
    model = model_of(40.0)
    found = explain(
        model, torch.ones(4, 2), lambda x: likelihood_of_a_mixture(model, x)
    )
    best = found.remedies[0]
    assert (found.cause, best.is_finite) == ("underflow", True)
    assert "weight.log()" in best.code and ".logsumexp(-1)" in best.code
    assert best.loss == pytest.approx(38**2 + math.log(6), rel=1e-3)


def entropy(model, x):
    p = F.softmax(model(x), dim=-1)
    return (p * torch.log(p)).sum(-1).mean()


@pytest.mark.tries_remedies
def test_a_remedy_calls_nothing_twice():
    model = model_of(400.0)
    with torch.no_grad():
        model.weight[1:] = 0
    num_called = []
    model.register_forward_hook(lambda *_: num_called.append(1))
    found = explain(model, torch.ones(4, 2), lambda x: entropy(model, x))
    best = found.remedies[0]
    assert best.is_finite and "log_softmax" in best.code
    assert best.code.count("model(x)") == 1
    assert len(num_called) == found.replays


# What float64 does not help.
UNDEFINED = {
    "log of 0": lambda x: (x * 0).log().sum(),
    "0 / 0": lambda x: ((x * 0) / (x * 0)).sum(),
    "a mask": lambda x: x.masked_fill(x < 9, -torch.inf).softmax(-1).sum(),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_what_is_undefined_in_float64_too(case, as_kept):
    found = explained(1.0, UNDEFINED[case])
    assert (found.cause, found.lost_by) == ("undefined", None)
    as_kept(found.evidence[1])


# What float64 loses, too: of finite numbers the result is never exactly 0 or 1.
BEYOND = {
    "exp": (lambda x: torch.exp(-1e4 * x).log().mean(), "exp", "underflow"),
    "exp in place": (lambda x: (-1e4 * x).exp_().log().mean(), "exp_", "underflow"),
    "tanh": (lambda x: torch.atanh(torch.tanh(300 * x)).mean(), "tanh", "rounding"),
    "sigmoid": (
        *(lambda x: torch.log(1 - torch.sigmoid(300 * x)).mean(), "sigmoid"),
        "rounding",
    ),
    "a sum of exp": (
        lambda x: torch.log(torch.exp(-1e4 * x).sum(-1)).mean(),
        *("exp", "underflow"),
    ),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_value_that_float64_loses_too(case, as_kept):
    function, op, cause = BEYOND[case]
    found = explained(1.0, function)
    assert (found.cause, found.lost_by.name) == (cause, f"aten.{op}")
    as_kept(found.evidence[1:])


# Results of exactly 0 and 1 that are no loss.
EXACT = {
    "tanh of 0": lambda x: (1 / torch.tanh(0 * x)).mean(),
    "exp of 0": lambda x: torch.log(torch.exp(0 * x) - 1).mean(),
    "a mask": lambda x: x.masked_fill(x < 9, -torch.inf).exp().log().mean(),
}


@pytest.mark.parametrize("case", EXACT)
def test_an_exact_result_is_no_loss(case):
    found = explained(1.0, EXACT[case])
    assert found.lost_by is None
    assert found.cause not in ("underflow", "rounding")


def test_a_prediction_that_equals_its_target_was_not_lost():
    model = model_of(0.3)
    x = torch.ones(4, 2)
    target = model(x).detach()
    found = explain(model, x, lambda x: (model(x) - target).pow(2).sum().sqrt())
    assert (found.cause, found.lost_by) == ("singular gradient", None)
    assert "rounded" not in str(found)


@pytest.mark.tries_remedies
def test_nor_was_what_both_have_gone_through():
    """As in the IoU of boxes with those of a teacher that has the same weights."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    target = model(x).detach()

    def loss(x):
        y = model(x)
        iou = torch.min(y, target) / torch.max(y, target)
        angle = (y.atan() - target.atan()).pow(2)
        return (iou - angle / (1 - iou + angle)).mean()

    found = explain(model, x, loss)
    assert (found.cause, found.lost_by) == ("undefined", None)
    assert "where the divisor is 0" in found.remedies[0].text
    assert found.remedies[0].is_right
    assert "true gradients" not in str(found)


def test_equal_numbers_of_which_none_is_given_may_have_lost_what_they_differ_by():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3), torch.randn(4, 2)

    def loss(x):
        y = model(x)
        return (1 / ((100 + y) - (100 + (y + 1e-7).detach()))).mean()

    found = explain(model, x, loss)
    assert (found.cause, found.lost_by.name) == ("rounding", "aten.sub.Tensor")
    assert "aten.add.Tensor" in found.evidence[1]


def test_a_whole_number_is_given_as_it_is():
    ones = torch.ones(4, 3)
    found = explained(30, lambda x: torch.log(ones - torch.sigmoid(x)).mean())
    assert (found.cause, found.lost_by.name) == ("rounding", "aten.sigmoid")


def test_an_exact_result_that_does_no_harm_is_not_blamed():
    found = explained(
        1.0, lambda x: (torch.exp(-1e4 * x) + (0 * x.detach()).sum().log()).mean()
    )
    assert (found.cause, found.lost_by) == ("undefined", None)


@pytest.mark.parametrize("far", [25.0, 8.0])
def test_the_element_that_was_lost_is_named_and_no_other(far):
    """The rounding of other elements is larger, relatively, and does no harm."""
    rows, label = torch.tensor([[0.3, -0.4], [far, 0.0], [20.0, 0.0]]), [[0], [0], [0]]
    model = model_of(0.0)
    model.weight.data[:] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1e4]])

    def loss(x):
        p = model(x + torch.tensor([0.0, 1.0])).softmax(-1)
        return ((1 - p.gather(-1, torch.tensor(label)).squeeze(-1)) ** 0.5).mean()

    found = explain(model, rows, loss)
    assert (found.cause, found.lost_by.name) == ("rounding", "aten._softmax")
    assert "was rounded: 0.99999999" in found.words.gist()
    assert found.words.gist().endswith("became 1")


def test_random_numbers_are_taken_as_they_were(as_kept):
    found = explained(-150, lambda x: F.dropout(x, 0.5).exp().log().mean())
    assert (found.cause, found.lost_by.name) == ("underflow", "aten.exp")
    as_kept(found.evidence)


def test_a_value_that_is_not_computed_in_float64_is_not_claimed(as_kept):
    def loss(x):
        scale = float(x.exp().max())  # leaves torch, and is 0
        return (x / scale).mean()

    found = explained(-150, loss)
    assert found.cause == "undefined"
    as_kept(found.evidence[0])


# What is outside of an operation's domain.
OUTSIDE = {
    "log": (lambda x: x.log(), "its input is -1 at [0, 0]"),
    "a root": (lambda x: x.sqrt(), "its input is -1 at [0, 0]"),
    "a power": (lambda x: x**0.5, "its input is -1 at [0, 0], the exponent 0.5"),
    "acos": (lambda x: (2 * x).acos(), "its input is -2 at [0, 0]"),
    "a divisor": (lambda x: x / (x + 1), "the divisor is 0 at [0, 0]"),
    "one for all": (lambda x: x / (x + 1)[:, :1], "the divisor is 0 at [0, 0]"),
    "a number": (lambda x: x / 0.0, "the divisor is the number 0"),
}


OUTSIDE |= {
    "scores": (
        lambda x: x.masked_fill(x < 9, -torch.inf).log_softmax(1),
        "all 3 scores at [0, :] are -inf",
    ),
    "scores, the first dimension": (
        lambda x: x.masked_fill(x < 9, -torch.inf).log_softmax(0),
        "all 4 scores at [:, 0] are -inf",
    ),
    "a transcript": (
        lambda x: transcript(x, [9, 4], [2, 4]),
        "sample 1 (from 0) has 4 frames for 4 labels, 3 of them the same as the one "
        "before",
    ),
    "a longer transcript": (
        lambda x: transcript(x, [9, 3], [2, 4]),
        "sample 1 (from 0) has 3 frames for 4 labels",
    ),
    "a direction": (
        lambda x: torch._weight_norm(x * torch.tensor([1.0, 0, 1]), x[:1], 1),
        "all of its input at [:, 1] is 0, whose norm it divides by",
    ),
}


def test_nan_that_a_function_of_torch_writes_is_named_by_what_it_takes(as_kept):
    """The determinant is negative: -1 of two rows that have changed places."""
    swapped = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    found = explain(
        model_of(1.0),
        torch.ones(2, 2),
        lambda x: (model_of(1.0)(x)[:, :2] * swapped).logdet().sum(),
    )
    as_kept(found)


def transcript(x, frames, lengths):
    logs = x.mean() + torch.zeros(9, 2, 3).log_softmax(-1)
    labels = torch.ones(2, 4, dtype=torch.long)
    return F.ctc_loss(logs, labels, torch.tensor(frames), torch.tensor(lengths))


@pytest.mark.parametrize("case", OUTSIDE)
def test_the_input_outside_of_the_domain(case):
    function, text = OUTSIDE[case]
    found = explained(-1.0, lambda x: function(x).sum())
    assert text in found.evidence[0]


def test_a_negative_running_variance(as_kept):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    model[1].running_var[2] = -0.5
    as_kept(explain(model, torch.ones(4, 2), lambda x: model(x).sum()).evidence[0])


def test_class_weights_of_zero_are_not_ignored_labels(as_kept):
    weight, labels = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2, 2, -100, 2])
    found = explained(1.0, lambda x: F.cross_entropy(x, labels, weight=weight))
    assert found.cause == "undefined"
    as_kept(found.reason)


@pytest.mark.tries_remedies
def test_labels_that_are_all_ignored(as_kept):
    labels = torch.full((4,), -100)
    found = explained(1.0, lambda x: F.cross_entropy(x, labels))
    assert found.cause == "empty reduction"
    assert "all are ignored" in found.reason
    as_kept(next(each for each in found.remedies if each.is_finite).text)


def test_a_nan_that_a_masks_infs_made_is_what_is_explained(as_kept):
    class Attention(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            scores[:, 1:] = float("-inf")
            scores[2] = float("-inf")
            scores -= scores.amax(-1, keepdim=True).detach()
            return scores.exp()

    model = Attention(2, 3)
    found = explain(model, torch.ones(4, 2), lambda x: model(x).sum())
    assert found.op.name == "aten.sub_.Tensor"
    assert found.op.first_index == (2, 0)
    as_kept(found.evidence[1])


@pytest.mark.day
@pytest.mark.parametrize(("room", "lost_by"), [(400, "aten._softmax"), (30, None)])
def test_what_ran_last_is_kept_where_there_is_not_room_for_all(
    monkeypatch, room, lost_by
):
    monkeypatch.setattr("overflow_fast.explainer.tape._MOST_NUMEL", room)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
    x = torch.ones(4, 8)

    def loss(x):
        scores = model(x) * 1e6 + torch.arange(8.0) * 200
        return -torch.log(scores.softmax(-1)).mean()

    found = explain(model, x, loss)
    assert (found.lost_by and found.lost_by.name) == lost_by


def test_masked_attention_before_it_is_no_lost_value():
    """A causal mask makes softmax return exact zeros, which float64 has, too."""
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)

    def loss(x):
        y = (x @ x.T + mask).softmax(-1) @ x
        return torch.log(torch.relu(y)).mean()

    found = explained(-1.0, loss)
    assert (found.cause, found.lost_by) == ("undefined", None)


def test_what_is_written_in_place_is_not_written_twice():
    """Each run in float64 begins with the numbers that the step began with."""
    model = model_of(-1000.0, torch.float64)

    def loss(x):
        lost = torch.exp(model(x)[:, :2])
        return torch.log(x.sub_(1.0) + lost).mean()

    found = explain(model, torch.ones(4, 2, dtype=torch.float64), loss)
    assert (found.cause, found.lost_by.name) == ("underflow", "aten.exp")


def passed_on(x, times=16):
    """The same by more operations than the nearest, which are computed first."""
    for _ in range(times):
        x = x * 1.0
    return x


# Functions that lose a value long before the operation that it makes undefined.
FAR = {
    "exp": (-150, lambda x: torch.log(passed_on(x.exp())).sum()),
    "tanh": (15, lambda x: torch.log(1 - passed_on(torch.tanh(x)) ** 2).sum()),
    "sigmoid": (30, lambda x: torch.log(1 - passed_on(torch.sigmoid(x))).sum()),
    "add.Tensor": (0.1, lambda x: torch.log(passed_on(1e9 + x) - 1e9).sum()),
    "pow.Tensor_Scalar": (1e-30, lambda x: (x / passed_on(x.pow(2)).sqrt()).sum()),
    "mul.Tensor": (
        *(0.3, lambda x: torch.log((passed_on(x * 1e-30) * 1e-15) * 1e30).sum()),
    ),
}


@pytest.fixture
def few_held(monkeypatch):
    """Fewer operations are held than a loop runs."""
    monkeypatch.setattr("overflow_fast.explainer.tape._MOST_CALLS", 96)


@pytest.mark.parametrize("num_before", [0, 120])  # all are held, or not all
@pytest.mark.parametrize("op", FAR)
def test_a_value_that_was_lost_long_before(op, num_before, few_held):
    value, function = FAR[op]
    found = explained(value, lambda x: function(passed_on(x, num_before)))
    assert (found.lost_by and found.lost_by.name) == f"aten.{op}"


def norm(x):
    """A norm of numbers whose squares underflow, and a loop before its root."""
    return passed_on(x.pow(2), 200).sum().sqrt()


def test_a_value_that_was_lost_before_a_loop():
    found = explained(1e-30, norm)
    assert (found.cause, found.lost_by.name) == ("underflow", "aten.pow.Tensor_Scalar")


@pytest.mark.tries_remedies
def test_what_was_lost_before_all_that_is_held_is_no_singular_gradient(few_held):
    found = explained(1e-30, norm)
    assert (found.cause, found.lost_by) == ("rounding", None)
    assert "the whole step in float64 is finite" in str(found)


@pytest.mark.tries_remedies
def test_what_there_was_no_time_for_is_said(monkeypatch):
    monkeypatch.setattr("overflow_fast.explainer.budget.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("overflow_fast.explainer.budget.STEP_TIMES", 0.0)
    found = explained(*FAR["exp"])
    assert (found.cause, found.lost_by, found.sample) == ("undefined", None, None)
    assert [each for each in found.notes if each.endswith(f"{SPENT}.")] == [
        *(NOT_LOOKED_BACK, WHICH_SAMPLE, NOT_IN_FLOAT64)
    ]
    (left_out,) = found.remedies
    assert not left_out.tried and f"not tried {left_out.text}: {SPENT}" in str(found)


def test_a_rounded_difference_of_large_tensors_is_a_loss(few_held):
    def difference(x):
        x = passed_on(x, 120)
        y = F.pad(1e8 * x[0, :1], (0, 2**18), value=1e-6).cumsum(0)
        return torch.log(y[-1] - y[1])

    found = explained(1.0, difference)
    assert (found.cause, found.lost_by.name) == ("rounding", "aten.sub.Tensor")
    assert "aten.cumsum" in found.evidence[1]


# Functions that are undefined however their inputs are rounded.
STEADY = {
    "a relu": lambda x: torch.log(torch.relu(x - 5)).sum(),
    "equal numbers": lambda x: torch.log(x - x).sum(),
    "a mask": lambda x: torch.log(x.masked_fill(x > 0, 0)).sum(),
    "a negative root": lambda x: torch.sqrt(-x).sum(),
}


@pytest.mark.parametrize("case", STEADY)
def test_rounding_is_not_blamed_where_it_does_not_matter(case):
    found = explained(1.0, lambda x: STEADY[case](passed_on(x)))
    assert (found.cause, found.lost_by) == ("undefined", None)
    assert "a wider dtype would not help" in found.evidence[1]


def test_operations_before_the_nearest_are_not_run_in_vain(monkeypatch, few_held):
    """Whatever numbers these were given, the logarithm would be that of 0."""
    ran, run = set[int](), Float64Run._run

    def counted(self, op):
        ran.add(op.index)
        run(self, op)

    monkeypatch.setattr(Float64Run, "_run", counted)
    found = explained(1.0, lambda x: torch.log(passed_on(x, 120) * 0.0).sum())
    assert (found.cause, found.lost_by) == ("undefined", None)
    assert len(ran) == 12


def tanh_before(x, times):
    """A tanh that is rounded to 1, which so many operations pass on."""
    return torch.log(1 - passed_on(torch.tanh(x), times) ** 2).sum()


def zeros_behind(x, times):
    return torch.log(passed_on(x, times) * 0.0).sum()


def less_than_one(x, times):
    """What lies outside of the domain by more than rounding makes of it."""
    return torch.log(torch.sigmoid(passed_on(x, times)) - 2).sum()


# A function, a length of a loop in it, how many operations are run, and if then all.
STAGES = {
    "where they matter": (tanh_before, 100, [12], True),
    "in a loop": (tanh_before, 900, [12, 96], True),
    "where they do not": (zeros_behind, 900, [12], False),
    "where they would have to be far off": (less_than_one, 900, [12], False),
}


@pytest.mark.parametrize("case", STAGES)
def test_ever_more_are_run_where_these_matter_and_are_few_of_all(case, monkeypatch):
    def counted(ops, *args):
        runs.append(len(ops))
        return lost_value(ops, *args)

    runs, lost_value = [], rounding.lost_value
    monkeypatch.setattr(rounding, "lost_value", counted)
    function, times, before, ends_with_all = STAGES[case]
    explained(15, lambda x: function(x, times))
    num = len(before)
    assert runs[:num] == before
    assert [each > times for each in runs[num:]] == [True] * ends_with_all
