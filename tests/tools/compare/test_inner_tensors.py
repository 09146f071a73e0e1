"""Weights in tensor subclasses are compared by the tensors within them."""

import pytest
import torch

import overflow_fast


class Scaled(torch.Tensor):
    """Small integers with a scale, as quantized weights are."""

    @staticmethod
    def __new__(cls, data, scale):
        options = {"dtype": scale.dtype, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, **options)

    def __init__(self, data, scale):
        self.data_of, self.scale_of = data, scale

    def __tensor_flatten__(self):
        return ["data_of", "scale_of"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["data_of"], inner["scale_of"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_of, args[0].scale_of)
        plain = [
            each.data_of.to(each.scale_of.dtype) * each.scale_of
            if isinstance(each, cls)
            else each
            for each in args
        ]
        return func(*plain, **(kwargs or {}))


class Layer(torch.nn.Module):
    def __init__(self, dtype, scale=0.1, change=0):
        super().__init__()
        data = (torch.arange(64).view(8, 8) % 7).to(dtype)
        if change:
            data[0, 0] = change
        self.inner = torch.nn.Module()
        weight = Scaled(data, torch.tensor([scale]))
        self.inner.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        weight = self.inner.weight
        return x @ (weight.data_of.to(x.dtype) * weight.scale_of)


def compared(folder, *models):
    for name, model in zip("ab", models, strict=True):
        with overflow_fast.recording(folder / name, model), torch.no_grad():
            model(torch.ones(2, 8))
    return overflow_fast.compare(folder / "a", folder / "b")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("change", "path"),
    [({"scale": 0.2}, "weight.scale_of"), ({"change": 3}, "weight.data_of")],
)
def test_the_inner_tensor_that_differs_is_named(dtype, change, path, tmp_path):
    diff = compared(tmp_path, Layer(dtype, **change), Layer(dtype))
    assert (diff.first.kind, diff.first.row.place.path) == ("weights", path), diff
    assert f"inner.{path}: parameter" in str(diff.first) and diff.said == []


def test_equal_ones_are_equal(tmp_path):
    diff = compared(tmp_path, Layer(torch.int8), Layer(torch.int8))
    assert diff.first is None and diff.counts()["equal"] == len(diff.rows), diff


def test_models_side_by_side():
    models = Layer(torch.int8, scale=0.2), Layer(torch.int8)
    with torch.no_grad():
        diff = overflow_fast.compare_live(*models, torch.ones(2, 8))
    assert diff.first.row.place.path == "weight.scale_of", diff
