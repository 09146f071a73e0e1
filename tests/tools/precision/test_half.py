"""Lists for a model whose weights are half precision."""

import io

import pytest
import torch
from assembled import Assembled
from torch import nn

import overflow_fast
from overflow_fast import advise_precision
from overflow_fast.tools.precision.half import onnx_scopes


class Block(Assembled):
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            Block(norm=nn.LayerNorm(16), up=nn.Linear(16, 32), down=nn.Linear(32, 16))
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(factor=3e5):
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        net.blocks[1].down.weight.mul_(factor)
    return net


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 16)


@torch.no_grad()
def test_the_list_holds_in_a_half_model():
    net, x = make(), batch()
    advice = advise_precision(net, [x], cast="half")
    assert advice.modules["float16"] == ["blocks.1.down", "blocks.2", "norm"]
    model, true = make(), make()(x)
    names = {"overflow_fast": overflow_fast, "torch": torch, "model": model}
    exec(advice.codes["float16"], names)
    output = model(x.half())
    assert output.dtype == torch.float16
    assert float((output.float() - true).norm() / true.norm()) < 0.01
    assert all(p.dtype == torch.float32 for p in net.parameters())


def test_a_model_that_fits_needs_no_list():
    advice = advise_precision(make(1.0), [batch()], cast="half")
    assert advice.codes["float16"] == "model.to(torch.float16)"
    assert advice.modules == {"bfloat16": [], "float16": []}


def test_the_first_line_says_what_to_call(as_kept):
    as_kept(advise_precision(make(), [batch()], cast="half"))


@pytest.mark.parametrize("cast", ["full", None])
def test_other_casts_are_refused(cast, as_kept):
    as_kept.error(ValueError, advise_precision, make(), [batch()], cast=cast)


def test_half_takes_no_loss(as_kept):
    with pytest.raises(ValueError) as raised:
        advise_precision(make(), [batch()], lambda x: x.sum(), cast="half")
    as_kept(raised.value)


def test_scopes_are_those_of_the_exporter(monkeypatch):
    utils = pytest.importorskip(
        "torch.onnx._internal.torchscript_exporter.onnx_proto_utils"
    )
    monkeypatch.setattr(utils, "_add_onnxscript_fn", lambda graph, functions: graph)
    file = io.BytesIO()
    torch.onnx.export(make(), (batch(),), file, dynamo=False, verbose=False)
    scopes = onnx_scopes(make(), ["first", "blocks.1.down", "blocks.2", "norm"])
    assert scopes == ["/first/", "/blocks.1/down/", "/blocks.2/", "/norm/"]
    assert all(scope.encode() in file.getvalue() for scope in scopes)
