"""A forward without a backward: its output is all there is."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from small_models import Block
from torch import nn

import overflow_fast
from overflow_fast import explain, keep_in_fp32
from overflow_fast.explainer.remedies.half_dtypes import span
from overflow_fast.explainer.remedies.patches import InDtype
from overflow_fast.explainer.wider import TO_BFLOAT16, TO_FLOAT32, cast_leaf
from overflow_fast.guard.report.notes import NO_LOSS
from overflow_fast.precision.keep_in_fp32 import shortened


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x))


class Layer(Assembled):
    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(norm=nn.LayerNorm(16), mlp=Mlp()) for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_decoder():
    torch.manual_seed(0)
    model = Decoder().eval()
    with torch.no_grad():
        model.layers[1].mlp.down.weight.mul_(2e5)
    return model.half()


def batch():
    torch.manual_seed(1)
    return torch.randn(3, 16).half()


def distance(output, true):
    return float((output.float() - true).detach().norm() / true.detach().norm())


def test_a_residual_stream_is_cured_up_to_its_normalization():
    best = explain(make_decoder(), batch()).remedies[0]
    assert best.code == (
        "overflow_fast.keep_in_fp32(model, ['layers.1.mlp.down', 'layers.2', "
        "'layers.3'], until=['norm'])"
    )
    model, true = make_decoder(), make_decoder().float()(batch().float())
    exec(best.code, {"overflow_fast": overflow_fast, "model": model})
    own = distance(model(batch()), true)
    assert own < 0.01
    assert best.error == pytest.approx(own, rel=0.5)


class Stack(Assembled):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def make_stack(num_layers):
    layers = nn.ModuleList(
        Layer(norm=nn.LayerNorm(16), mlp=Mlp()) for _ in range(num_layers)
    )
    return Stack(layers=layers, norm=nn.LayerNorm(16))


class Both(Assembled):
    def forward(self, x):
        return self.head(self.decoder(self.encoder(x)))


def test_no_module_runs_in_float32_behind_the_normalization_that_ends_a_stream():
    torch.manual_seed(0)
    model = Both(encoder=make_stack(3), decoder=make_stack(4), head=nn.Linear(16, 4))
    with torch.no_grad():
        model.encoder.layers[1].mlp.down.weight.mul_(2e5)
    best = explain(model.eval().half(), batch()).remedies[0]
    assert best.is_right and best.until == ("encoder.norm",)
    assert best.modules == ("encoder.layers.1.mlp.down", "encoder.layers.2")


def test_bfloat16_is_a_cure_with_its_distance():
    cures = {each.text: each for each in explain(make_decoder(), batch()).remedies}
    cure = cures["use bfloat16 for the model and its inputs"]
    true = make_decoder().float()(batch().float())
    own = distance(make_decoder().bfloat16()(batch().bfloat16()), true)
    assert cure.is_recommended
    assert cure.error == pytest.approx(own, rel=0.2)


class Exponential(nn.Module):
    def forward(self, x):
        return torch.exp(x)


def test_an_output_far_from_float32s_is_no_cure():
    model = nn.Sequential(nn.Linear(16, 16), Exponential(), nn.Linear(16, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(0.75)
        model[2].weight.mul_(1e-2)
    found = explain(model.half(), torch.ones(2, 16).half())
    far = [each for each in found.remedies if each.misses == "output"]
    assert all(each.is_finite for each in far)
    assert far and not any(each.is_recommended for each in far)
    assert all(each.error > 0.01 for each in far)
    assert "from float32)" in str(found)


class Scores(nn.Module):
    def forward(self, x):
        return torch.matmul(x, x.mT) / 16


def test_the_distance_of_an_exact_form_is_that_of_its_own_output():
    torch.manual_seed(0)
    x = (torch.randn(6, 16) * 100).half()
    first, *_ = explain(Scores().half(), x).remedies
    assert first.text == "scale before the product"
    true = x.float() @ x.float().mT / 16
    assert first.error == pytest.approx(distance(x / 16 @ x.mT, true), rel=0.2)


def test_a_batch_without_the_failing_sample_has_no_distance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).eval()
    x = torch.randn(3, 16)
    x[1] = 6e4
    model[0].weight.data.abs_()
    found = explain(model.half(), x.half())
    of_data = [each for each in found.remedies if each.is_of_data]
    assert of_data and all(each.error is None for each in of_data)
    assert any(each.error is not None for each in found.remedies)


class Standardized(nn.Module):
    """Its variance may be below 0, where float32 rounds."""

    def forward(self, x, least=None):
        mean = x.mean(1, keepdim=True)
        variance = (x * x).mean(1, keepdim=True) - mean * mean
        variance = variance if least is None else variance.clamp(min=least)
        return (x - mean) / (torch.sqrt(variance) + 1e-5)


def test_a_remedy_of_float32_has_its_distance_from_float64():
    torch.manual_seed(1)
    x = torch.randn(3, 50, 8) - 5
    x[2] = -15.942385 + 1e-5 * torch.randn(50, 8)
    with torch.no_grad():
        found = explain(Standardized(), x)
    remedy = next(e for e in found.remedies if e.text.endswith("at least 1e-8"))
    own, true = Standardized()(x, 1e-8), Standardized()(x.double())
    assert remedy.error == pytest.approx(distance(own.double(), true), rel=0.01)
    assert remedy.error > 0.1 and not remedy.is_recommended
    assert "% from float64" in remedy.outcome


class Rescaled(Assembled):
    """Divides by how far two times are apart."""

    def forward(self, x, before, now):
        y = self.layer(x)
        return y * (0.5 / (now - before))


def test_an_infinite_result_is_not_cured_by_the_number_that_it_is_divided_by():
    now = torch.tensor(0.3)
    model = Rescaled(layer=nn.Linear(4, 4))
    with torch.no_grad():
        found = explain(model, (torch.ones(3, 4), now, now))
    assert not any(each.is_recommended for each in found.remedies)
    assert found.notes[-1].startswith("The result is infinite in exact arithmetic")


class Rms(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_values_within_a_finite_forward_are_named():
    torch.manual_seed(0)
    net = nn.Sequential(Rms(), nn.Linear(16, 4)).half()
    x = torch.randn(3, 16).half()
    x[1] *= 1000
    alone, with_loss = (
        explain(net, x),
        explain(net, x, lambda x: net(x).float().square().mean()),
    )
    for found in (alone, with_loss):
        assert found.is_finite and found.op is None
        assert "return x * torch.rsqrt(" in found.notes[-1]
        assert "(aten.pow.Tensor_Scalar in 0): 14 inf of 48 values" in found.notes[-1]


def test_all_that_were_not_finite_within_are_named():
    torch.manual_seed(0)
    with torch.no_grad():
        found = explain(
            Gated(norm=nn.LayerNorm(16)).half(), torch.randn(3, 16).half() * 300
        )
    names = re.findall(r"\((aten\.\w+)", found.notes[-1])
    assert found.is_finite and names == ["aten.log", "aten.mul", "aten.mul"]


def test_what_is_finite_within_as_well_has_run_once():
    assert explain(nn.Linear(4, 4), torch.ones(2, 4)).replays == 1


def test_infs_of_a_mask_are_not_hidden_ones():
    class Masked(nn.Module):
        def forward(self, x):
            keep = torch.ones_like(x, dtype=torch.bool).tril()
            return x.masked_fill(~keep, float("-inf")).softmax(-1)

    assert explain(Masked().half(), torch.randn(4, 4).half()).notes == [NO_LOSS]


def test_a_batch_of_inference_mode_is_replayed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
    with torch.inference_mode():
        x = torch.full((2, 4), 6e4).half() * 2
    found = explain(model, x)
    assert (found.phase, found.cause, found.tensor) == ("data", "bad data", "batch")


def test_a_model_made_in_inference_mode_is_replayed():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
        model[0].weight.fill_(1e4)
        found = explain(model, torch.full((2, 4), 100.0).half())
    assert found.cause == "range overflow"
    assert found.module == "0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wider_dtype_leaves_autocast_as_it_was(dtype):
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        with InDtype(dtype).applied({"": model}):
            assert model(torch.ones(1, 4)).dtype == dtype
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert model(torch.ones(1, 4)).dtype == torch.float16


def test_float32_stands_for_both_half_precisions():
    x = torch.ones(2, dtype=torch.bfloat16)
    assert cast_leaf(x, TO_FLOAT32).dtype == torch.float32
    assert cast_leaf(x, TO_BFLOAT16) is x


CALLED = {"", "a", "a.x", "b", "b.pre", "b.norm", "b.mlp", "b.mlp.up", "norm"}
ORDER = ["a.x", "a", "b.pre", "b.norm", "b.mlp.up", "b.mlp", "b", "norm"]


@pytest.mark.parametrize(
    ("begin", "until", "names"),
    [
        (0, "norm", ["a.x", "b"]),
        (0, "b.norm", ["a.x", "b.pre"]),
        (1, "norm", ["a", "b"]),
        (4, "norm", ["b.mlp.up"]),
    ],
)
def test_a_span_holds_all_that_runs_up_to_its_end_but_what_holds_both(
    begin, until, names
):
    assert span(ORDER[begin:], until, CALLED) == names


def test_patterns_stand_for_modules_with_all_that_is_in_them():
    names = ["up", "up.0", "up.0.lin", "up.1", "up.1.lin", "norm"]
    assert shortened(["up.0", "up.1"], names) == ["up.*"]
    assert shortened(["up.0"], names) == ["up.0"]


# keep_in_fp32 of containers, and of modules within others.


class Blocks(Assembled):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.named["norm"](x)


def test_a_container_stands_for_what_is_in_it():
    torch.manual_seed(0)
    model = Blocks(
        blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
        named=nn.ModuleDict({"norm": nn.LayerNorm(4)}),
    ).eval()
    with torch.no_grad():
        model.blocks[0].weight.mul_(1e5)
    model = model.half()
    x = torch.randn(3, 4).half() * 10
    true = copy.deepcopy(model).float()(x.float())
    handle = keep_in_fp32(model, ["blocks"], until=["named"])
    assert handle.names == ["blocks.0", "blocks.1"]
    output = model(x)
    assert output.dtype == torch.float16
    assert distance(output, true) < 0.01
    handle.remove()
    model.half()
    assert not bool(model(x).isfinite().all())


CALLS = [[["0.up"], ["0"]], [["0"], ["0.up"]], [["0", "0.up"]], [["0"]]]


@pytest.mark.parametrize("calls", CALLS)
def test_calls_for_a_module_and_for_one_around_it_add_up(calls):
    torch.manual_seed(0)
    model = nn.Sequential(Block()).eval()
    with torch.no_grad():
        model[0].up.weight.mul_(1e5)
    model = model.half()
    x = torch.randn(2, 8).half() * 10
    for names in calls:
        keep_in_fp32(model, names)
    output = model(x)
    assert output.dtype == torch.float16
    assert bool(output.isfinite().all())


def test_an_inner_module_is_itself_again_without_the_outer_one():
    model = nn.Sequential(Block()).half()
    keep_in_fp32(model, ["0.up"])
    outer = keep_in_fp32(model, ["0"])
    outer.remove()
    model[0].norm.half()
    assert model(torch.ones(2, 8).half()).dtype == torch.float16


class Gated(Assembled):
    """Its scores overflow where a mask looks for it, and saturate in a tanh before."""

    def forward(self, x):
        bias = torch.arange(16.0).log().clamp(min=0).half()
        soft = torch.tanh(x * x)
        y = (x * 1000 * x).view(-1, 16)
        if y.isinf().any():
            y = y.clamp(-64000, 64000)
        return self.norm(y + soft + bias)


class Scored(Assembled):
    """Computes a score of what a layer returns."""

    def forward(self, x):
        return self.score(self.layer(x))


NONE_COUNTS = torch.full((2,), -100)


@pytest.mark.parametrize(
    ("score", "op"),
    [
        (lambda y: F.cross_entropy(y, NONE_COUNTS), "aten.nll_loss_forward"),
        (lambda y: F.nll_loss(y, NONE_COUNTS), "aten.nll_loss_forward"),
        (lambda y: y.masked_fill(y == y, -torch.inf).softmax(-1), "aten._softmax"),
        (lambda y: y[:1].std(0), "aten.std.correction"),
        (lambda y: torch.logdet(-torch.eye(3) + 0 * y[0]), "aten.scalar_tensor"),
        (lambda y: (y * 1e30).square(), "aten.pow.Tensor_Scalar"),
    ],
)
@pytest.mark.usefixtures("untried")
def test_a_model_of_inference_mode_has_the_operations_of_others(score, op):
    """Which autograd takes apart there; a table of operations knows these."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode():
            model = Scored(layer=nn.Linear(3, 3), score=score)
        with overflow_fast.OverflowGuard(model, on_overflow="warn") as guard, mode():
            model(torch.ones(2, 3))
        found.append(guard.last_report.explanation)
    plain, own = found
    assert plain.op.name == op
    assert (plain.cause, plain.reason) == (own.cause, own.reason)
    assert (plain.op.name, plain.evidence) == (own.op.name, own.evidence)
