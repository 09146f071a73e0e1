"""The sentences of docs/guides/compare.md on what is named first, and from when on."""

import math

import pytest
import torch
from torch import nn

import overflow_fast


def x_of(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


class Scaled(nn.Module):
    """Multiplies by a factor, and its gradient by another one."""

    def __init__(self, factor=1.0, backward=1.0):
        super().__init__()
        self.factor = factor
        self._backward = backward

    def forward(self, x):
        y = x * self.factor
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self._backward)
        return y


KINDS = "weights", "batch", "forward", "loss", "backward", "gradients", "update"


def train(folder, wrong):
    """Records two steps, in which all that is `wrong` differs."""
    torch.manual_seed(0)
    factors = 1.0 + ("forward" in wrong), 1.0 + ("backward" in wrong)
    layers = nn.Linear(16, 16), nn.Tanh(), Scaled(*factors), nn.Linear(16, 4)
    model = nn.Sequential(*layers)
    if "weights" in wrong:
        model[3].bias.data += 1
    rate = 0.02 if "update" in wrong else 0.01
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with overflow_fast.recording(folder, model) as run:
        for step in range(2):
            if step:
                run.step()
            optimizer.zero_grad()
            output = model(x_of(step + 10 * ("batch" in wrong)))
            (output.square().sum() * (1.0 + ("loss" in wrong))).backward()
            if "gradients" in wrong:
                model[0].weight.grad *= 3
            optimizer.step()


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_of_several_differences_the_first_in_this_order_is_named(number, tmp_path):
    train(tmp_path / "a", KINDS[number:])
    train(tmp_path / "b", ())
    diff = overflow_fast.compare(tmp_path / "a", tmp_path / "b")
    assert diff.first.kind == KINDS[number], diff
    assert diff.first.row.step == (KINDS[number] == "update")


def half_and_float(weight=0.0, output=0.0):
    """A bfloat16 layer and its float32 copy, of which one has relative errors."""
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
    other = nn.Sequential(nn.Linear(256, 256, bias=False))
    with torch.no_grad():
        other[0].weight.copy_(half[0].weight)
        half[0].weight *= 1 + weight
    half.register_forward_hook(lambda m, args, y: y * (1 + output))
    return half, other


@pytest.mark.parametrize("error", [0.005, 0.01, 0.02, 0.04])
def test_an_output_differs_from_8_times_what_rounding_explains_on(error):
    half, other = half_and_float(output=error)
    x = torch.randn(64, 256).bfloat16()
    diff = overflow_fast.compare_live(half, other, x)
    row = next(r for r in diff.rows if str(r.place) == "the model: output")
    eps = torch.finfo(torch.bfloat16).eps
    explained = math.sqrt(0.18 * (3 + 4)) * eps / 2  # of the layer and of code after it
    assert row.explained == pytest.approx(explained, rel=0.01)
    assert (row.verdict == "introduced") == (row.relative >= 8 * explained)
    assert (diff.first is not None) == (error >= 0.04)


@pytest.mark.parametrize("error", [0.001, 0.002, 0.004, 0.008, 0.016])
def test_a_weight_differs_from_3_times_its_cast_on(error):
    half, other = half_and_float(weight=error)
    diff = overflow_fast.compare_live(half, other, torch.randn(64, 256).bfloat16())
    row = diff.rows[0]
    explained = math.sqrt(0.18) * torch.finfo(torch.bfloat16).eps / 2
    assert row.explained == pytest.approx(explained, rel=1e-3)
    assert (row.verdict == "introduced") == (row.relative >= 3 * explained)
    assert (diff.first is not None) == (row.verdict == "introduced")


def test_what_is_propagated_is_not_named_again():
    half, other = half_and_float(output=0.2)
    models = [
        nn.Sequential(m, nn.Linear(256, 256).to(m[0].weight)) for m in (half, other)
    ]
    with torch.no_grad():
        models[1][1].load_state_dict(models[0][1].state_dict())
    diff = overflow_fast.compare_live(*models, torch.randn(64, 256).bfloat16())
    made = [str(row.place) for row in diff.rows if row.verdict == "introduced"]
    assert made == ["0: output"] and diff.first.module == "0"
    last = next(r for r in diff.rows if str(r.place) == "1: output")
    assert last.verdict == "propagated" and last.times > 8
