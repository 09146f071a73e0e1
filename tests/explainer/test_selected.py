"""What a later line leaves out is left out before it is computed: the same loss."""

import pytest
import torch
from remedied_files import edited, module_of
from torch import nn

from overflow_fast import explain
from overflow_fast.explainer.remedies.rules import SELECTS

NAN = float("nan")
HEAD = """import torch
import torch.nn.functional as F


def loss_of(out, y):
    known = ~y.isnan()
    {}
"""
_LOSS = (
    'return F.{}({}, y, reduction="none").masked_fill(~known, 0).mean()'  # of all rows
)
# Of each pattern a line, and what `y` holds once. Where it is a logarithm, `out` is 0.
LINES = {
    **{
        f"{name}(x, y)": (_LOSS.format(name, "out"), NAN)
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss")
    },
    "binary_cross_entropy_with_logits(x, y)": (
        _LOSS.format("binary_cross_entropy_with_logits", "out"),
        NAN,
    ),
    "kl_div(x, y)": (_LOSS.format("kl_div", "out"), NAN),
    "poisson_nll_loss(x, y)": (
        "return F.poisson_nll_loss(out, y, reduction='none')[known].mean()",
        NAN,
    ),
    "y - x": ("return torch.where(known, (out - y).square(), 0).mean()", NAN),
    "x - y": ("return torch.where(known, (y - out).square(), 0).mean()", NAN),
    "x * y": ("return torch.where(known, (y * out).square(), 0).mean()", NAN),
    "y / x": ("return (out / y).nan_to_num(0, 0, 0).square().mean()", 0.0),
}


def batch(value):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator)
    y = torch.rand(8, 3, generator=generator) + 0.5
    y[2, 1] = value
    return x, y


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def tried_on(path_or_line, value, tmp_path):
    """The explanation, the file, the loss as it is and as its first remedy has it."""
    module, path = module_of(tmp_path, HEAD.format(path_or_line))
    net, (x, y) = model(), batch(value)
    found = explain(net, (x, y), lambda b: module.loss_of(net(b[0]), b[1]))
    first = next(each for each in found.remedies if each.is_recommended)
    fresh, _ = module_of(tmp_path, edited(path, first))
    plain, changed = module.loss_of(net(x), y), fresh.loss_of(net(x), y)
    changed.backward()
    return found, first, plain, changed, net


def test_each_row_has_a_line():
    of_logarithms = {f"{name}(y)" for name in ("log", "log2", "log10")}
    of_logarithms |= {"rsqrt(y)", "reciprocal(y)"}
    assert {rule.pattern for rule in SELECTS} - of_logarithms == set(LINES)


@pytest.mark.tries_remedies
@pytest.mark.parametrize("name", ["log", "log2", "log10", "rsqrt", "reciprocal"])
def test_of_one_argument(name, tmp_path):
    """Of `y` times a share: the entry that is 0 is left out by `nan_to_num`."""
    line = f"p = y * out.sigmoid(); return (p * torch.{name}(p)).nan_to_num(0).mean()"
    _, first, plain, changed, _ = tried_on(line, 0.0, tmp_path)
    assert plain.isfinite() and torch.equal(plain, changed), first


@pytest.mark.tries_remedies
@pytest.mark.parametrize("pattern", LINES)
def test_the_loss_is_the_same_to_the_bit_and_the_gradient_finite(pattern, tmp_path):
    line, value = LINES[pattern]
    _, first, plain, changed, net = tried_on(line, value, tmp_path)
    assert "leave values out before the call" in first.text
    assert plain.isfinite() and torch.equal(plain, changed)
    assert all(each.grad.isfinite().all() for each in net.parameters())


@pytest.mark.tries_remedies
def test_what_a_mask_looks_for_stays_there(tmp_path):
    """The inf of the quotient is what the next line overwrites."""
    line = "r = (out - y) / y; r[~r.isfinite()] = 0; return r.square().mean()"
    _, first, plain, changed, _ = tried_on(line, 0.0, tmp_path)
    assert "leave values out" in first.text and torch.equal(plain, changed)


@pytest.mark.tries_remedies
def test_what_the_loss_reads_is_not_left_out():
    net = model()
    found = explain(net, batch(NAN), lambda b: (net(b[0]) - b[1]).square().mean())
    assert found.cause == "bad data"
    assert not any("leave values out" in each.text for each in found.remedies)


@pytest.mark.tries_remedies
def test_what_is_used_keeps_its_value(tmp_path):
    """A clamp behind the quotient uses the inf: 0 in its place gives another loss."""
    line = "return (out / y).clamp(-9, 9).square().mean()"
    _, first, plain, changed, _ = tried_on(line, 0.0, tmp_path)
    assert ".detach()" in first.code and torch.equal(plain, changed)
