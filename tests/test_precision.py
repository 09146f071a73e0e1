"""keep_in_fp32: chosen modules run in float32."""

import copy

import pytest
import torch
from guarding import hooks_of
from torch import nn

from overflow_fast import OverflowGuard, keep_in_fp32


class Seen(nn.Linear):
    def forward(self, x, scale=None):
        self.dtypes = x.dtype, self.weight.dtype
        out = super().forward(x)
        return out if scale is None else out * scale


def make(dtype=None):
    torch.manual_seed(0)
    model = nn.Sequential(Seen(4, 4), nn.ReLU(), Seen(4, 4), Seen(4, 2))
    return model if dtype is None else model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_half_precision_model(dtype):
    model = make(dtype)
    with keep_in_fp32(model, ["2"]) as handle:
        assert handle.names == ["2"]
        out = model(torch.ones(3, 4, dtype=dtype))
        assert out.dtype == dtype
        out.sum().backward()
    assert model[0].dtypes == (dtype, dtype)
    assert model[2].dtypes == (torch.float32, torch.float32)
    assert model[3].dtypes == (dtype, dtype)
    assert model[2].weight.grad.dtype == torch.float32
    assert hooks_of(model) == 0


def test_under_autocast():
    model = make()
    dtypes = []
    with keep_in_fp32(model, ["2"]):
        model[2].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        model[3].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(3, 4))
            assert torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.float32, torch.bfloat16]
    assert model[2].dtypes == (torch.float32, torch.float32)


def test_keyword_inputs_and_nested_outputs():
    class Two(nn.Module):
        def forward(self, *, x):
            return {"y": x * 2, "n": x.long()}

    model = nn.ModuleDict({"a": Two()})
    with keep_in_fp32(model, ["a"]):
        out = model["a"](x=torch.full((2,), 4e4, dtype=torch.float16))
    assert out["y"].dtype == torch.float16
    assert out["n"].dtype == torch.int64


def test_what_overflowed_does_no_more():
    """The advice of a report, followed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Seen(4, 4), Seen(4, 2)))
    model.half()
    for module, value in ((model[0], 1.0), (model[1][0], 3e4), (model[1][1], 1e-6)):
        module.weight.data.fill_(value)
    x = torch.ones(1, 4, dtype=torch.float16)
    with OverflowGuard(model, on_overflow="warn") as guard:
        model(x)
        report = guard.check()
        assert report.verdict.maker == "1.0"
        assert "`overflow_fast.keep_in_fp32(model, ['1.0'])`" in str(report)
    keep_in_fp32(model, ["1"])
    with OverflowGuard(model, on_overflow="warn") as guard:
        model(x)
        assert guard.check() is None


def test_an_exception_leaves_autocast_as_it_was():
    model = make()
    with keep_in_fp32(model, ["2"]), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            model[2](torch.ones(3, 5))
        assert torch.is_autocast_enabled("cpu")
        model(torch.ones(3, 4))


def test_patterns_and_copies():
    model = make(torch.bfloat16)
    handle = keep_in_fp32(model, ["[02]"])
    assert handle.names == ["0", "2"]
    other = copy.deepcopy(model)
    other(torch.ones(1, 4, dtype=torch.bfloat16))
    assert other[2].dtypes == (torch.float32, torch.float32)
    handle.remove()
    handle.remove()
    assert hooks_of(model) == 0


def test_wrong_arguments_are_told():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        keep_in_fp32(3, ["2"])
    with pytest.raises(TypeError, match="names must be a list of names, got the str"):
        keep_in_fp32(make(), "2")
    with pytest.raises(ValueError, match=r"names must hold .*; 'x' matches none"):
        keep_in_fp32(make(), ["x"])
