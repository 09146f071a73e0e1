"""Half models with layers in float32, in the graphs that torch.onnx exports."""

import copy

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import keep_in_fp32


class Unit(Assembled):
    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def unit():
    return Unit(conv=nn.Conv2d(4, 4, 3, padding=1), norm=nn.GroupNorm(2, 4))


class Block(Assembled):
    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, 2, width // 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block():
    return Block(
        norm1=nn.LayerNorm(16),
        qkv=nn.Linear(16, 48),
        out=nn.Linear(16, 16),
        norm2=nn.LayerNorm(16),
        up=nn.Linear(16, 64),
        down=nn.Linear(64, 16),
    )


def cnn():
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(unit(), unit()))
    model = nn.Sequential(body, nn.Conv2d(4, 2, 1))
    model[0][1][1].conv.weight.mul_(2e5)
    return model, torch.randn(2, 3, 8, 8), ["0.1.1.conv"], ["0.1.1.norm"]


def transformer():
    blocks = nn.Sequential(block(), block())
    model = nn.Sequential(blocks, nn.LayerNorm(16), nn.Linear(16, 4))
    blocks[0].down.weight.mul_(2e5)
    return model, torch.randn(2, 5, 16), ["0.0.down", "0.1"], ["1"]


def running_variance():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model[0].weight.mul_(2e3)
    model[1].running_var.fill_(1e6)
    return model, torch.randn(2, 3, 8, 8), ["1"], None


CASES = [cnn, transformer, running_variance]


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    with torch.no_grad():
        model, x, names, until = request.param()
    model.eval()
    half = copy.deepcopy(model)
    keep_in_fp32(half, names, until)
    with torch.no_grad():
        return half.half(), x, model(x)


def distance(found, true):
    return float((found.float() - true).norm() / true.norm())


def test_modules_that_are_kept_before_the_cast_stay_float32(case):
    half, x, true = case
    with torch.no_grad():
        assert distance(half(x.half()), true) < 1e-3


def traced(half, x):
    return torch.jit.trace(half, (x,))


def exported(half, x):
    return torch.export.export(half, (x,)).module()


@pytest.mark.parametrize("graph_of", [traced, exported])
def test_the_graph_has_the_casts(case, graph_of):
    """That of either exporter, with `dynamo=False` and with `dynamo=True`."""
    half, x, true = case
    graph = graph_of(half, x.half())
    with torch.no_grad():
        found = graph(x.half())
    assert found.dtype == torch.float16 and distance(found, true) < 1e-3


def test_a_cast_back_and_a_removed_handle_cast_all():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = keep_in_fp32(model, ["1"])
    model.to(torch.bfloat16)
    assert [each.weight.dtype for each in model] == [torch.bfloat16, torch.float32]
    assert model.double()[1].weight.dtype == torch.float64
    model.float()
    handle.remove()
    model.half()
    assert all(each.dtype == torch.float16 for each in model.parameters())


def test_a_copy_keeps_its_own_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    keep_in_fp32(model, ["1"])
    twin = copy.deepcopy(model).half()
    assert twin[1].weight.dtype == torch.float32
    assert twin(torch.ones(1, 2).half()).dtype == torch.float16
    assert model[0].weight.dtype == torch.float32
