"""Failures of many classes: phase, cause, operation and module of each are found."""

import copy
import ctypes
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer.replayer import Replayer, StepPart
from overflow_fast.guard.options import BUDGET

pytestmark = pytest.mark.usefixtures("untried")

INF, NAN = math.inf, math.nan
RANGE, UNDEFINED = "range overflow", "undefined"
SINGULAR, EMPTY = "singular gradient", "empty reduction"


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    def __init__(self, function=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.inner = Inner(function)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def data(factor=1.0):
    return factor * torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def place(found):
    op = None if found.op is None else found.op.name
    return found.phase, found.cause, op, found.module


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient - gradient)


def written_view(x):
    y = 1000 * x
    y[:, :2].exp_()
    return y


def unwritten(x):
    part = torch.empty(4, 4)
    ctypes.memset(part.data_ptr(), 0xFF, 64)
    part[:2] = 0
    return x + part


def root(x):
    return (0 * x).abs().sqrt()


def attended(x, values, **options):
    x, values = x[None, None], values[None, None]
    return F.scaled_dot_product_attention(x, x, values, **options)[0, 0]


# By what is in the middle of a model.
MODULES = {
    "a custom Function": (lambda x: Exp.apply(1000 * x), "forward", RANGE, "aten.exp"),
    "its backward": (Divides.apply, "backward", SINGULAR, "aten.div.Tensor"),
    "in place": (lambda x: (0 * x).abs().log_(), "forward", UNDEFINED, "aten.log_"),
    "in place, by a view": (written_view, "forward", RANGE, "aten.exp_"),
    "nobody wrote to it": (
        *(unwritten, "forward", "not reproducible"),
        "aten.empty.memory_format",
    ),
    "checkpoint": (
        lambda x: checkpoint(root, x, use_reentrant=False),
        *("backward", SINGULAR, "aten.sqrt"),
    ),
    "reentrant checkpoint": (
        lambda x: checkpoint(root, x, use_reentrant=True),
        *("backward", SINGULAR, "aten.sqrt"),
    ),
    "log behind a where": (
        lambda x: torch.where(x > 100, (0 * x).log(), x),
        *("backward", SINGULAR, "aten.log"),
    ),
    "exp behind a where": (
        lambda x: torch.where(x > 1e9, (1e4 * x).abs().exp(), x),
        *("backward", RANGE, "aten.exp"),
    ),
    "mean of nothing": (lambda x: x + x[:0].mean(), "forward", EMPTY, "aten.mean"),
    "std of one": (
        lambda x: x + x[0, :1].std(),
        "forward",
        EMPTY,
        "aten.std.correction",
    ),
    "acos": (lambda x: torch.acos(0 * x + 1), "backward", SINGULAR, "aten.acos"),
    "pow": (lambda x: (0 * x).pow(0.5), "backward", SINGULAR, "aten.pow.Tensor_Scalar"),
    "svd": (
        lambda x: torch.linalg.svd(0 * x + torch.eye(4))[0],
        *("backward", SINGULAR, "aten._linalg_svd"),
    ),
    "layer norm": (
        lambda x: F.layer_norm(0 * x, (4,), eps=0.0),
        *("forward", UNDEFINED, "aten.native_layer_norm"),
    ),
    "slogdet": (
        lambda x: x + torch.linalg.slogdet(0 * x).logabsdet,
        *("forward", UNDEFINED, "aten._linalg_slogdet"),
    ),
    "0 / 0": (
        lambda x: (0 * x) / (0 * x).sum(-1, keepdim=True),
        *("forward", UNDEFINED, "aten.div.Tensor"),
    ),
    "softmax of one's own": (
        lambda x: (1e4 * x).exp() / (1e4 * x).exp().sum(-1, keepdim=True),
        *("forward", RANGE, "aten.exp"),
    ),
    "inside an operation": (
        lambda x: x + torch.full((4,), 3e38).mean(),
        *("forward", RANGE, "aten.mean"),
    ),
    "a cast": (lambda x: (1e6 * x).half().float(), "forward", RANGE, "aten._to_copy"),
    "a number": (lambda x: x + NAN, "forward", "constant", "aten.add.Tensor"),
    "another number": (
        lambda x: x + INF - INF,
        "forward",
        "constant",
        "aten.add.Tensor",
    ),
    "a mask that overflows": (
        lambda x: torch.baddbmm(
            *(torch.full((1, 4, 4), -INF).triu(1), 1e20 * x[None], 1e20 * x.T[None])
        )[0].softmax(-1),
        *("forward", RANGE, "aten.baddbmm"),
    ),
    "fused attention": (
        lambda x: attended(1e20 * x, x),
        *("forward", RANGE, "aten._scaled_dot_product_flash_attention_for_cpu"),
    ),
    "fused attention, causal, scaled": (
        lambda x: attended(1e20 * x, x, is_causal=True, scale=3.0),
        *("forward", RANGE, "aten._scaled_dot_product_flash_attention_for_cpu"),
    ),
    "fused attention with a mask": (
        lambda x: attended(1e20 * x, x, attn_mask=torch.zeros(4, 4)),
        *("forward", RANGE, "aten._scaled_dot_product_flash_attention_for_cpu"),
    ),
    "only masked": (
        lambda x: (x + torch.full((4, 4), -INF)).softmax(-1),
        *("forward", UNDEFINED, "aten._softmax"),
    ),
}


@pytest.mark.tries_remedies
@pytest.mark.parametrize("case", MODULES)
def test_what_is_in_a_module(case):
    function, *expected = MODULES[case]
    model = Net(function)
    found = explain(model, data(), lambda x: model(x).sum())
    assert place(found) == (*expected, "inner")
    assert found.op.file == __file__
    assert found.replays <= BUDGET + 1  # and one in float64


def test_a_number_beyond_float64_is_not_told_as_the_largest_of_the_others():
    model = Net(lambda x: torch.exp(0 * x + torch.tensor([1.0, 100.0, 800.0, 0.0])))
    found = explain(model, data(), lambda x: model(x).sum())
    assert (found.cause, found.op.true_value) == (RANGE, INF)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_an_overflow(dtype):
    limit = torch.finfo(dtype).max
    model = Net(lambda x: ((0 * x + limit / 2) @ (0 * x + 1)) + x).to(dtype)
    found = explain(model, data().to(dtype), lambda x: model(x).float().sum())
    assert place(found) == ("forward", RANGE, "aten.mm", "inner")
    assert found.op.true_value == pytest.approx(2 * limit, rel=0.01)
    assert found.op.limit == limit
    assert found.op.first_index == (0, 0)
    assert [each.num_inf for each in found.op.outputs] == [16]
    assert [each.num_inf for each in found.op.inputs] == [0, 0]
    assert len(str(found).splitlines()) <= 8


def test_autocast():
    model = Net()
    with torch.no_grad():
        model.first.weight.fill_(5e4)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().sum()

    found = explain(model, data(), loss)
    assert place(found) == ("forward", RANGE, "aten.addmm", "first")


def test_double_backward():
    model = Net(lambda x: 0 * x.relu())

    def loss(x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((gradient**2).sum().sqrt() - 1) ** 2

    found = explain(model, data(), loss)
    assert place(found) == ("backward", SINGULAR, "aten.sqrt", "")
    assert "sqrt()" in found.op.code


def test_a_number_that_vanishes_in_float16():
    model = Net(lambda x: x / ((0 * x).abs() + 1e-8)).half()
    found = explain(model, data().half(), lambda x: model(x).float().sum())
    assert found.op.name == "aten.div.Tensor"
    assert (found.cause, found.lost_by.name) == ("underflow", "aten.add.Tensor")


def test_a_number_that_a_zero_divides_and_the_product_that_makes_nan_of_it():
    ratio = Net(lambda x: x * (9 / (x.detach() > 9).half()) * (x.detach() > 9))
    found = explain(ratio, data(), lambda x: ratio(x).sum())
    first, *rows = str(found).split("\n")
    assert first.startswith("9 / 0 at test_replay_causes.py:"), first
    assert "and 0 * an infinite value is the nan that follows" in first, first
    assert not any("nan that follows" in each for each in rows)
    alone = Net(lambda x: x + (0 * x.detach()).reciprocal())
    assert "1 / 0 at" in str(explain(alone, data(), lambda x: alone(x).sum()))


# Loss code outside of modules.
LOSSES = {
    "labels": (
        lambda model, b: F.cross_entropy(model(b["x"]), b["none"]),
        *(EMPTY, "aten.nll_loss_forward"),
    ),
    "mean of a mask": (
        lambda model, b: model(b["x"])[b["mask"]].sum() / b["mask"].sum(),
        *(EMPTY, "aten.div.Tensor"),
    ),
    "mean of a mask of floats": (
        lambda model, b: (model(b["x"]) * b["zeros"]).sum() / b["zeros"].sum(),
        *(EMPTY, "aten.div.Tensor"),
    ),
    "of nothing": (
        lambda model, b: F.mse_loss(model(b["x"])[b["mask"]], b["x"][b["mask"]]),
        *(EMPTY, "aten.mse_loss"),
    ),
    "too large": (
        lambda model, b: F.mse_loss(1e25 * model(b["x"]), b["x"]),
        *(RANGE, "aten.mse_loss"),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_is_in_the_loss(case):
    loss, cause, op = LOSSES[case]
    batch = {
        "x": data(),
        "none": torch.full((4,), -100),
        "mask": torch.zeros(4, dtype=torch.bool),
        "zeros": torch.zeros(4, 4),
    }
    found = explain(Net(), batch, loss)
    assert place(found) == ("forward", cause, op, "")


# What was bad before the step.


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight(value):
    model = Net()
    with torch.no_grad():
        model.last.weight[1, 2] = value
    found = explain(model, data(), lambda x: model(x).sum())
    assert place(found) == ("weights", "bad weights", None, "last")
    assert found.tensor == "last.weight"


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_a_buffer(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    getattr(model[1], name)[2] = INF * (name == "running_mean") or NAN
    found = explain(model, data(), lambda x: model(x).sum())
    assert place(found) == ("weights", "bad weights", None, "1")
    assert found.tensor == f"1.{name}"


def test_a_mask_in_a_buffer_is_meant():
    model = Net(lambda x: (x + model.mask).softmax(-1).log())
    model.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
    found = explain(model, data(), lambda x: model(x).sum())
    assert place(found) == ("forward", UNDEFINED, "aten.log", "inner")


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_key_of_the_batch(value):
    batch = {"x": data(), "more": {"target": data(), "index": torch.arange(7, 11)}}
    batch["more"]["target"][2, 1] = value
    loss = lambda model, b: F.mse_loss(model(b["x"]), b["more"]["target"])  # noqa: E731
    found = explain(Net(), batch, loss)
    assert place(found) == ("data", "bad data", None, "")
    assert (found.tensor, found.sample) == ("batch['more']['target']", 2)
    assert found.sample.dataset == 9


def test_bad_data_that_is_not_used_is_not_blamed():
    batch = {"x": data(), "target": torch.full((4, 4), NAN)}
    found = explain(Net(lambda x: (0 * x).log()), batch, lambda m, b: m(b["x"]).sum())
    assert place(found) == ("forward", UNDEFINED, "aten.log", "inner")


@pytest.mark.parametrize("size", [4, 8])
def test_the_sample(size):
    x = torch.ones(size, 4)
    x[3] = 0
    model = nn.Sequential(Inner(lambda x: x.log()), nn.Linear(4, 4))
    found = explain(model, x, lambda x: model(x).sum())
    assert (found.sample, found.num_samples) == (3, size)


@pytest.fixture
def parts(monkeypatch):
    """The parts of a batch that are replayed as they are."""
    found, run = [], Replayer.run

    def noting(self, step=StepPart(), patches=(), observers=()):  # noqa: B008
        if step.rows is not None and not patches:
            found.append(step.rows)
        return run(self, step, patches, observers)

    monkeypatch.setattr(Replayer, "run", noting)
    return found


@pytest.mark.tries_remedies
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_no_part_of_a_batch_is_run_twice_as_it_was(parts, bad):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.ones(4, 1)
    x[bad] = -100
    found = explain(model, x, lambda x: model(x).sum().sqrt())
    assert int(found.sample) == bad
    assert not [rows for rows in parts if parts.count(rows) > 1]
    assert found.remedies[0].elsewhere.moved is not None


def test_several_samples_are_not_one(parts):
    x = torch.ones(4, 4)
    x[1:3] = 0
    model = nn.Sequential(Inner(lambda x: x.log()), nn.Linear(4, 4))
    assert explain(model, x, lambda x: model(x).sum()).sample is None
    assert parts == [(2,)]  # which fails alone, as the first one did among the others


def test_a_finite_step():
    model = Net()
    found = explain(model, data(), lambda x: model(x).sum())
    assert found.is_finite and found.op is None
    assert str(found).startswith("The step is finite when it is run.")


def test_a_loss_that_raises():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        explain(Net(), data(), lambda x: 1 / 0)


def test_a_batch_of_another_shape_is_refused_by_the_model_itself():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        explain(nn.Linear(4, 2), torch.ones(3, 5))


def test_wrong_arguments(as_kept):
    def call(arguments):
        explain(*arguments)

    as_kept.errors(call, [(1, 2), (Net(), 1, 2)])


@pytest.mark.tries_remedies
def test_a_matrix_that_is_singular_in_its_dtype_alone(as_kept):
    """Its factorization ends at a pivot of 0: no value in it was too large."""
    matrix = torch.tensor([[3, 1], [1, 1 / 3]])  # a third is rounded up
    net = Net(lambda x: x + torch.logdet(matrix))
    found = explain(net, torch.ones(2, 4), lambda x: net(x).mean())
    assert (found.cause, found.op.name) == ("rounding", "aten._linalg_slogdet")
    as_kept(found.reason, found.evidence[1])
    assert found.remedies[0].is_right and ".double()" in found.remedies[0].code


def test_what_draws_numbers_is_not_run_again_in_float64():
    """Its result would be that of other numbers."""
    net = Net(lambda x: torch.native_dropout((x * 0 + 6e4).half(), 0.5, True)[0])
    found = explain(net, data(), lambda x: net.inner(x).float().sum())
    assert (found.cause, found.op.name) == ("unknown", "aten.native_dropout")
    assert found.op.true_value is None and "it draws random numbers" in found.reason


def test_a_number_just_outside_of_a_domain_is_shown_to_be_there(as_kept):
    above = torch.tensor([0.5, 1 + 2.0**-23])
    net = Net(lambda x: x + torch.acos(above).sum())
    as_kept(explain(net, torch.ones(2, 4), lambda x: net(x).mean()).evidence[0])


def test_an_empty_batch_has_no_labels_that_are_ignored(as_kept):
    net = nn.Linear(4, 3)
    batch = (torch.ones(0, 4), torch.zeros(0, dtype=torch.long))
    found = explain(net, batch, lambda b: F.cross_entropy(net(b[0]), b[1]))
    assert found.cause == "empty reduction"
    as_kept(found.reason)


class Held(nn.Module):
    """A model with -inf in a buffer, which nothing has masked."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("log_variance", torch.tensor([-INF, 0.5]))
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x), self.log_variance)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, low: (x + low) - low,
        lambda x, low: (x + low).sub_(low),
        lambda x, low: low + -low + x,
        lambda x, low: x + low * low.exp(),
        lambda x, low: x + low / low,
    ],
)
def test_infs_that_make_a_nan_are_told_with_where_they_are_from(function, as_kept):
    torch.manual_seed(0)
    net = Held(function)
    found = explain(net, torch.ones(3, 4), lambda x: net(x).sum())
    made = found.evidence[0]
    assert found.cause == UNDEFINED
    assert " with 1 -inf, else in magnitude " in made or "with 3 -inf, else" in made
    as_kept(made)


def test_a_scaled_sum_of_infs_is_not_told_as_a_plain_one(as_kept):
    torch.manual_seed(0)
    net = Held(lambda x, low: torch.add(low, low, alpha=-1) + x)
    found = explain(net, torch.ones(3, 4), lambda x: net(x).sum())
    assert found.cause == UNDEFINED
    as_kept(found.evidence[0])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.xlogy, "its second input is 0 at [1, 2]"),
        (
            lambda x, y: torch.special.xlog1py(x, y - 1),
            "its second input is -1 at [1, 2]",
        ),
    ],
)
def test_a_second_input_outside_of_a_domain_is_named(function, said):
    density = torch.ones(4, 4)
    density[1, 2] = 0
    net = Net(lambda x: function(x.abs() + 1, density))
    found = explain(net, data(), lambda x: net(x).mean())
    assert said in found.evidence[0]


WIDENING = {
    "a product": (nn.Linear(2, 6, bias=False), (3, 2)),
    "a product and a sum": (nn.Linear(2, 6), (3, 2)),
    "a convolution": (nn.Conv1d(2, 6, 1, bias=False), (3, 2, 1)),
    "products": (nn.Bilinear(2, 2, 6, bias=False), (3, 2)),
}


@pytest.mark.parametrize("name", WIDENING)
def test_a_result_that_is_wider_than_its_arguments_is_explained(name):
    """The bad value has a place where no argument has one."""
    layer, shape = WIDENING[name]
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[5] = 3e38
    x = torch.full(shape, 2.0)
    given = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    found = explain(layer, given)
    assert found.cause == "range overflow" and found.op.true_value > 3.5e38


def test_what_is_undefined_in_the_forward_too_is_no_singular_gradient():
    model = Net()

    def loss(x):
        power = (model(x) - 9.0) ** 1.2  # which is nan: only its derivative is used
        (slope,) = torch.autograd.grad(power.sum(), model.last.bias, create_graph=True)
        return slope.mean()

    found = explain(model, data(), loss)
    assert (found.cause, found.op.name) == (UNDEFINED, "aten.pow.Tensor_Scalar")
    assert str(found).startswith("(-")


@pytest.mark.parametrize(
    ("function", "factor", "cause"),
    [
        (lambda x: torch.angle(torch.complex(x, x)), 1e-22, "underflow"),
        (torch.linalg.vector_norm, 1e21, RANGE),
    ],
)
def test_which_way_an_intermediate_value_has_left_the_range(function, factor, cause):
    weight = nn.Parameter(torch.ones(4))
    model = Net()
    model.weight = weight
    found = explain(
        model, torch.full((4, 4), factor), lambda x: function(x * weight).mean()
    )
    first = str(found).splitlines()[0]
    assert found.cause == cause
    assert ("overflowed" in first) == (cause == RANGE)
    assert ("too small for complex64" in first) == (cause == "underflow")


@pytest.mark.tries_remedies
def test_a_number_that_code_writes_is_told_as_no_more_than_that(as_kept):
    """A condition that float64 does not meet has it written: a share of 0."""
    weight = nn.Parameter(torch.ones(3))
    model = Net()
    model.weight = weight

    def loss(x):
        cost = (x * weight).softmax(-1).clone()
        cost[cost == 0] = INF
        return (0.0 * cost).sum()

    found = explain(model, torch.tensor([[0.0, -200.0, 1.0]]), loss)
    assert found.cause == "constant"
    as_kept(str(found).splitlines()[0], found.evidence)


def test_the_numbers_told_are_those_of_a_nan_beside_an_inf():
    """The class weights of labels of one class: those of the others are in no loss."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    guard = OverflowGuard(model, optimizer)
    x, labels = torch.randn(5, 4), torch.full((5,), 2)

    def loss():
        weights = torch.tensor([5.0, 5.0, 0.0])
        return F.cross_entropy(model(x), labels, weight=weights / weights.min())

    with pytest.raises(NonFiniteError, match=r"0 / 0 at .* is undefined"):
        guard.run(loss).backward()
        optimizer.step()
    guard.remove()
