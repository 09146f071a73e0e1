"""A value made in one function, and its logarithm taken in another: lines for both."""

import re

import pytest
import torch
from remedied_files import module_of
from torch import nn

from overflow_fast import explain

HEAD = """import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 3)

    def forward(self, x):
        return {}


def loss_of(model, x, y):
    {}
"""
BINARY = "torch.sigmoid(self.w(x))"
CASES = {
    "both ends": (
        BINARY,
        "p = model(x)\n    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()",
    ),
    "a variable of the rest": (
        BINARY,
        "p = model(x); q = 1 - p\n    return -(y * p.log() + (1 - y) * q.log()).mean()",
    ),
    "read elsewhere, too": (
        "self.w(x).softmax(-1)",
        "p = model(x); hits = (p.argmax(1) == 0).float().mean()\n"
        "    return F.nll_loss(p.log(), y[:, 0].long()) + 0 * hits",
    ),
    "in the line of the call": (
        "torch.softmax(self.w(x), dim=-1)",
        "return F.nll_loss(torch.log(model(x)), y[:, 0].long())",
    ),
}


def run(source, tmp_path, scale=900.0):
    """The explanation of a step, its file, and the loss of the module's own text."""
    module, path = module_of(tmp_path, source)
    torch.manual_seed(0)
    model = module.Model()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 5, generator=generator) * scale
    y = (torch.rand(16, 3, generator=generator) > 0.5).float()
    found = explain(model, (x, y), lambda b: module.loss_of(model, *b))
    return found, path, module.loss_of(model, x, y)


def pasted(path, remedy):
    """The file with all parts of a remedy."""
    lines = path.read_text().splitlines()
    for part in sorted(remedy.parts or (remedy,), key=lambda each: -each.line):
        indent = re.match(r"\s*", lines[part.line - 1])[0]
        lines[part.line - 1 : part.last_line] = [indent + part.code]
    return "\n".join(lines) + "\n"


@pytest.mark.tries_remedies
@pytest.mark.parametrize("name", CASES)
def test_both_places_are_lines_to_paste(name, tmp_path):
    source = HEAD.format(*CASES[name])
    found, path, plain = run(source, tmp_path)
    first = next(each for each in found.remedies if each.is_recommended)
    assert "hands on the argument of" in first.text and first.code, found
    text = pasted(path, first)
    again, _, loss = run(text, tmp_path)
    assert not plain.isfinite() and loss.isfinite()
    assert loss.item() == pytest.approx(first.loss, rel=1e-5)
    assert again.is_finite
    # Where nothing fails, both texts compute the same.
    _, _, one = run(source, tmp_path, scale=1.0)
    _, _, other = run(text, tmp_path, scale=1.0)
    assert one.item() == pytest.approx(other.item(), rel=1e-5)


@pytest.mark.tries_remedies
def test_the_formula_stands_where_no_line_makes_the_value():
    """A module of torch makes it: what is told in words has the right sign."""
    model = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
    nn.init.ones_(model[0].weight)
    x = torch.full((8, 5), 100.0)
    found = explain(model, x, lambda x: -torch.log(1 - model(x)).mean())
    words = next(each for each in found.remedies if "logsigmoid" in each.text)
    assert words.is_recommended and words.code == ""
    assert "`F.logsigmoid(-A)` for `torch.log(1 - model(x))`" in words.text
    assert str(words).count("logsigmoid") == 2  # and not again below
