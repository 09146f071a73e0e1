"""What has made the 0, or the number below 0, that an operation is not defined for."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overflow_fast import explain
from overflow_fast.guard.report.gist import told_apart

pytestmark = pytest.mark.usefixtures("untried")
ROW = torch.tensor([0.3, -0.4, 1.25])


def explained(function, x=None, weight=None):
    """The explanation of a function of what a layer gives for random rows.

    Args:
        function: The function, of the batch and what the layer gives.
        x: The batch; random numbers, if not given.
        weight: Of all weights of the layer, which has no bias.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=weight is None)
    if weight is not None:
        nn.init.constant_(model.weight, weight)
    x = torch.randn(5, 3) if x is None else x
    return explain(model, x, lambda x: function(x, model(x)).sum())


def twins():
    x = torch.randn(5, 3)
    x[3] = x[1]
    return x


def with_row(number):
    x = torch.rand(5, 3)
    x[3] = number
    return x


def masked(y, number=0.0):
    keep = torch.arange(5)[:, None] != 2
    return torch.where(keep, y.exp(), number)


def contrast(y):
    """A loss that masks each row's largest number, after it has subtracted it."""
    scores = 1e3 * y @ y.T
    rest = 1 - torch.eye(5)
    weights = (scores - scores.amax(1, keepdim=True).detach()).exp() * rest
    return weights.sum(1).log()


def distances(x, y):
    squares = (y[:, None] - y[None]).square().sum(-1)
    return squares[torch.triu_indices(5, 5, 1).unbind()].sqrt()


def padded(x, y):
    table = nn.Embedding(4, 3, padding_idx=0)
    rows = table(torch.tensor([1, 0, 2]))
    return y.sum() * rows / rows.norm(dim=1, keepdim=True)


def written(x, y):
    y = y.exp()
    y[2] = 0
    return y.sum(1).log()


def transmittance(x, y):
    alpha = y.sigmoid().index_fill(1, torch.tensor([1]), 1.0)
    return (1 - alpha).cumprod(1).log()


def numbers_of(*scalars):
    numbers = [each.item() for each in scalars]
    return torch.tensor(numbers)


AT = r" \(test_made_zero.py:\d+\)"
# The function of the batch and of what the layer gives, the reason; and the batch.
MADE = {
    # By a bound.
    "relu": (lambda x, y: (-y.exp()).relu().log(), "relu made it 0, of -.*"),
    "relu, a row": (
        lambda x, y: 1 / (-y.exp()).relu().norm(dim=1),
        "relu made all 3 numbers 0",
    ),
    "clamp": (lambda x, y: 1 / (-y.exp()).clamp(min=0), "clamp made it 0, of -.*"),
    "a pool": (
        lambda x, y: y.mean() / F.max_pool1d((-y.exp()).relu()[:, None], 3),
        "relu made it 0, of -.*",
    ),
    "in place, of a product": (
        lambda x, y: (2 * y.exp().neg_().relu_()).log(),
        "relu made it 0, of -.*",
    ),
    "a logarithm of 1": (
        lambda x, y: y / torch.ones(5, 3).log(),
        "log made it 0, of 1",
    ),
    "a score that is masked": (
        lambda x, y: y.masked_fill(y < 9, -torch.inf).exp().log(),
        "exp made it 0, of -inf",
    ),
    # By a mask.
    "a product with 0": (lambda x, y: (y * 0).log(), "mul multiplied .* by 0"),
    "a product with a mask": (
        lambda x, y: (y.exp() * (torch.arange(3) != 1)).log(),
        "mul multiplied .* by 0",
    ),
    "a product with a mask of numbers": (
        lambda x, y: (y.exp() * torch.tensor([0.0, 1.0, 1.0])).log(),
        "mul multiplied .* by 0",
    ),
    "where": (lambda x, y: masked(y).log(), f"where{AT} wrote that 0"),
    "where, of a tensor": (
        lambda x, y: masked(y, torch.zeros(5, 3)).sum(1).log(),
        f"where{AT} wrote zeros there",
    ),
    "masked_fill": (
        lambda x, y: y.exp().masked_fill(y < 9, 0).log(),
        "masked_fill wrote that 0",
    ),
    "dropout": (
        lambda x, y: y / F.dropout(y, 0.999).norm(dim=1, keepdim=True),
        "mul multiplied 3 numbers by 0",
    ),
    "the code": (written, rf"the code{AT} wrote that 0"),
    # By numbers of Python.
    "numbers that were read": (
        lambda x, y: y.sum() / numbers_of(y[0, 0], y.min().relu()),
        "relu made it 0, of -.*",
    ),
    "a number that was read": (
        lambda x, y: y / torch.tensor(float((y - 9).relu().sum())),
        "relu made all 15 numbers 0",
    ),
    "numbers of Python": (
        lambda x, y: y / torch.tensor([len(y) - 5.0]),
        "the 0 is a number of Python",
    ),
    "a number of Python, after one that was read": (
        lambda x, y: y / torch.tensor([y[0, 0].item() * 0]),
        "the 0 is a number of Python",
    ),
    # By a difference.
    "equal operands": (
        lambda x, y: (y - y.detach()).square().sum().sqrt(),
        r"`y` and `y.detach\(\)` are the same",
    ),
    "one operand": (lambda x, y: y / (y - y), "`y` is subtracted from itself"),
    "equal operands, of which one is a number": (
        lambda x, y: (y.mean() * (1 - x.sign() ** 2)).sqrt(),
        r"`1` and `x.sign\(\) \*\* 2` are equal at \[0, 0\]",
    ),
    "a diagonal": (
        lambda x, y: (y[:, None] - y[None]).square().sum(-1).sqrt(),
        r"`y\[:, None\]` and `y\[None\]` are the same at \[0, 0, :\]",
    ),
    "equal rows": (
        distances,
        rf"`y\[:, None\]` and `y\[None\]` are equal{AT}, as `batch\[1\]` and "
        r"`batch\[3\]` are",
        twins,
    ),
    "a difference of the batch": (
        lambda x, y: y[:, :2] / x.diff(dim=1),
        r"`batch\[3, 1\]` and `batch\[3, 0\]` are equal",
        lambda: with_row(2.0),
    ),
    "a batch of one": (
        lambda x, y: (y[:1] - y[:1].mean(0)).norm().pow(-1),
        r"`y\[:1\]` and `y\[:1\].mean\(0\)` are equal",
    ),
    "a range": (
        lambda x, y: y / (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)),
        r"`x.amax\(1, keepdim=True\)` and `x.amin\(1, keepdim=True\)` are equal at "
        r"\[3, 0\]",
        lambda: with_row(2.0),
    ),
    "alpha of 1": (transmittance, r"`1` and `alpha` are equal at \[0, 1\]"),
    # By a reduction.
    "a deviation": (
        lambda x, y: y / x.std(1, keepdim=True),
        "std is of 3 equal numbers, 2",
        lambda: with_row(2.0),
    ),
    "a deviation of one number": (
        lambda x, y: y[:1] / y[:1].var(0, correction=0).sqrt(),
        "var is of one number",
    ),
    "weights that sum to 0": (
        lambda x, y: y / torch.tensor([1.0, -2.0, 1.0]).sum(),
        "sum of 3 numbers is 0, and not all of these are",
    ),
    # A number below 0, by a difference, or of numbers that were below 0.
    "a width": (
        lambda x, y: ((x[:, 2] - x[:, 0]) / (2 + y.sigmoid()[:, 0].detach())).log(),
        r"1 - 4 is -3, of `batch\[3, 2\]` and `batch\[3, 0\]`",
        lambda: torch.tensor(
            [[0.0, 1.0, 2.0]] * 3 + [[4.0, 0.0, 1.0], [0.0, 1.0, 2.0]]
        ),
    ),
    "1 less a square of a scaled number": (
        lambda x, y: (1 - ((y * 0 + 0.6).tanh() * 2) ** 2).log(),
        r"1 - 1.15369 is -0.154, where 1.07 \*\* 2 is 1.15, 0.537 \* 2 is 1.07, "
        r"tanh\(0.6\) is 0.537",
    ),
    "1 less a scaled quotient": (
        lambda x, y: (1 - 3 * x / x.detach().norm()).sqrt() + 0 * y,
        r"1 - ([\d.]+) is -[\d.]+, where ([\d.]+) / [\d.]+ is [\d.]+, "
        r"[\d.]+ \* 3 is \2",
        lambda: with_row(0.9),
    ),
    "numbers less 3": (lambda x, y: (y - 3).sqrt(), r"0.752361 - 3 is -2.25"),
    "what a loss gives less than its mean": (
        lambda x, y: -2 * (y.exp()[0, 0] - y.exp().mean() - 1e3).rsqrt(),
        r"[\d.]+ - 1000 is -[\d.]+|-[\d.]+ - 1000 is -[\d.]+",
    ),
    "a sum with signs": (
        lambda x, y: torch.zeros(2).index_add(0, torch.arange(5) % 2, x[:, 0]) ** -0.5,
        r"`batch\[3, 0\]` is -4",
        lambda: with_row(-4.0),
    ),
    "a mean of many": (
        lambda x, y: y / x.mean(0).sqrt(),
        r"`batch` has numbers below 0 there, down to -3",
        lambda: with_row(-4.0) - torch.tensor([[0.0], [3.0], [0.0], [-1.0], [0.0]]),
    ),
    # By a draw.
    "a normal draw": (
        lambda x, y: y.mean() * torch.randn(5, 3).sort(0)[0].log(),
        r"randn drew -[\d.]+",
    ),
    "a draw in place": (
        lambda x, y: y / torch.empty(5, 3).uniform_(0, 0),
        "uniform drew 0",
    ),
    "a draw by the batch": (
        lambda x, y: y.mean() * torch.poisson(x.sigmoid() * 0).log(),
        "poisson drew 0",
    ),
    # By nothing in the step.
    "a row of the batch": (
        lambda x, y: (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)),
        r"`batch\[3, :\]` is 0",
        lambda: with_row(0.0),
    ),
}


# What has made the number near 0 by which a quotient overflows.
NEAR = {
    "a square of an exponential": (
        lambda x, y: 1 / (2 * (y * 0 - 48.3).exp() ** 2),
        r"exp\(-48.3\) is 1.06e-21",
    ),
    "a derivative": (
        lambda x, y: 1e-3 * y.detach() / (y * 0 - 50).exp(),
        r"exp\(-50\) is 1.93e-22",
    ),
    "a softmax": (
        lambda x, y: torch.tensor(1e3) / (y * 0 + 42 * torch.arange(3)).softmax(1),
        r"softmax made 3.31e-37 of a score that is 84 below the largest of 3",
    ),
    "a sigmoid": (
        lambda x, y: torch.tensor(1e3) / (y * 0 - 85).sigmoid(),
        r"sigmoid\(-85\) is 1.22e-37",
    ),
    "a power": (
        lambda x, y: y / (y.detach() * 0 + 0.1) ** 40,
        r"0.1 \*\* 40 is 1e-40",
    ),
    "a number of the batch": (
        lambda x, y: y / x,
        r"`batch\[3, 0\]` is 1e-40",
        lambda: with_row(1e-40),
    ),
    "a difference": (
        lambda x, y: 1e25 * y.mean() / (x[3] - 0.5).square().square(),
        r"0.5000000596 - 0.5 cancels to 5.96e-08",
        lambda: with_row(0.5 + 2**-24),
    ),
    "a bound": (
        lambda x, y: y / (0 * y.detach() + 5).clamp(None, 1e-40),
        "",
    ),
    "many numbers": (lambda x, y: 1 / (y * 1e-42).abs().mean(), ""),
}


@pytest.mark.parametrize("case", NEAR)
def test_what_has_made_a_divisor_near_0(case):
    function, maker, *batch = NEAR[case]
    found = explained(function, *(make() for make in batch))
    assert found.cause == "range overflow", found
    by = r"it divides by [-\d.e]+" + ": " * bool(maker)
    assert re.fullmatch(by + maker, found.reason), found


@pytest.mark.parametrize("case", MADE)
def test_what_has_made_it(case):
    function, reason, *batch = MADE[case]
    found = explained(function, *(make() for make in batch))
    assert found.cause in ("undefined", "singular gradient")
    assert re.fullmatch(reason, found.reason), found.reason
    assert found.reason in found.words.gist()


def test_an_input_below_0_is_named_and_is_no_reason():
    x = with_row(torch.tensor([1.0, 1.0, -1.5]))
    found = explained(lambda x, y: y.mean() * x.t().log(), x)
    assert found.cause == "undefined" and "`batch" not in found.words.gist()
    assert "`batch[3, 2]` is -1.5" in found.evidence


def test_what_a_derivative_has_made_within_torch_is_not_told():
    """Of an `acos` at 1 that is 1 - 1 * 1."""
    found = explained(lambda x, y: (y / y.detach()).acos())
    assert (found.cause, found.op.derivative) == ("singular gradient", "aten.rsqrt")
    assert not found.reason


# Nothing is said where a part of the way is not known, or would be no answer.
SILENT = {
    "a product of matrices": lambda x, y: (
        torch.eye(5)[:, :3] @ (y.exp() * torch.tensor([0.0, 1.0, 1.0])).T
    ).log(),
    "a count": lambda x, y: y.mean() / torch.bincount(torch.arange(2), minlength=4),
    "a layer's own number": lambda x, y: (0.1 * y - 1e-9).sqrt(),
    "the other sign of a number": lambda x, y: (-y.exp()).sqrt(),
    "two factors": lambda x, y: (-y.exp() * -y.exp() * -y.sigmoid()).log(),
    "three makers": lambda x, y: (
        torch.stack([y[0, 0] - y[0, 0], (-y.exp()).relu()[1, 0], y[0, 1] * 0])
        .norm()
        .pow(-1)
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_is_not_known_is_not_told(case):
    found = explained(SILENT[case])
    assert (found.cause, found.reason) == ("undefined", "")


def test_numbers_that_a_mask_leaves_out_beside_those_that_underflowed():
    found = explained(lambda x, y: contrast(y))
    assert (found.cause, found.lost_by.name) == ("underflow", "aten.exp")
    at = rf"mul{AT}"
    reason = rf"4 of 5 numbers are 0 so, and {at} multiplied 1 by 0"
    assert re.fullmatch(reason, found.reason)
    assert found.words.gist().endswith(f"; {found.reason}")


def variance(y):
    y = 1e3 + y / 50
    return y.square().mean(1) - y.mean(1) ** 2


def squared_distance(y):
    y = 99 + y
    squares = y.square().sum(1)
    return (squares[:, None] + squares[None]).sub_(2 * y @ y.T)


# Numbers below 0 that rounding has left of a difference.
CANCELLED = {
    "a variance": variance,
    "a distance, in place": squared_distance,
    "with an epsilon": lambda y: variance(y) + 1e-8,
    "of which one is taken": lambda y: variance(y).amin(0, keepdim=True),
}


@pytest.mark.parametrize("case", CANCELLED)
def test_a_difference_that_has_cancelled_is_the_cause(case):
    found = explained(lambda x, y: CANCELLED[case](y).sqrt())
    assert (found.cause, found.op.name) == ("rounding", "aten.sqrt")
    lost = found.lost_by
    assert re.match(r"aten.sub_?\.Tensor", lost.name)
    one, other = lost.operands
    assert lost.value < 0 and lost.value == pytest.approx(one - other, rel=1e-3)
    assert lost.true_value != lost.value
    text = (
        r"sqrt\(-.*\) at .*: [\d.]+ - [\d.]+ cancels to -[\d.e-]+ at .* \(float64: .*\)"
        r"; \w+ \(test_made_zero.py:\d+\) rounds it away in float32"
    )
    assert re.fullmatch(text, found.words.gist())
    assert re.search(r"with the result of aten\..*, in float32 it is not", str(found))


def test_what_is_left_of_a_number_of_the_code_was_lost_before():
    found = explained(lambda x, y: (1 - (99 + y).sigmoid()).log())
    assert (found.cause, found.lost_by.name) == ("rounding", "aten.sigmoid")
    assert not found.lost_by.operands


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((-17762.7997, -17762.8008), ("-17762.800", "-17762.801")),
        ((1 - 1e-9, 1.0), ("0.999999999", "1")),
        ((4.81e-267, 0.0), ("4.81e-267", "0")),
        ((1.5, 2.5), ("1.5", "2.5")),
    ],
)
def test_two_numbers_have_the_digits_that_tell_them_apart(numbers, texts):
    assert told_apart(*numbers) == texts
