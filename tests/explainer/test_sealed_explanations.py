"""Explanations on a device without kernels: those of the CPU."""

import re

import pytest
import torch
from assembled import Assembled
from sealed import watched
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.sealed


class Square(Assembled):
    def forward(self, x):
        return self.inner(x).square()


def explained(device, dtype=None):
    """The report of a step that overflows, in the dtype of an autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(Square(inner=nn.Linear(16, 16)), nn.Linear(16, 1))
    x, y = torch.randn(4, 16), torch.randn(4, 1)
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer) as guard:
        for scale in (1, 1, 1000):

            def forward(x=x * scale):
                with torch.autocast(device, dtype, enabled=dtype is not None):
                    return (model(x) - y).square().mean()

            guard.run(forward).backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                return error.report
            optimizer.zero_grad()
    return None


def text_of(report):
    """Without times and samples, which are of the CPU, and with one name for both."""
    timeless = re.sub(r", [\d.]+ s\b|takes [\d.]+%", "", str(report))
    samples = r" \(64 values of [^)]*\)|, and in 64 values of [\w ]* before it"
    return re.sub(samples, "", timeless).replace("sealed", "cpu")


def test_an_overflow_under_autocast_and_its_remedies():
    with watched() as seen:
        there = explained("sealed", torch.float16)
    assert text_of(there) == text_of(explained("cpu", torch.float16))
    assert seen.faults == 0
    tried = [remedy.text for remedy in there.explanation.remedies]
    assert any("bfloat16" in each for each in tried)
