"""How far a remedy is from float32 is measured where somebody reads: not on padding."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.explains


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = ((q @ k.mT) / 4 + bias).softmax(-1).to(v.dtype)
        return self.out(scores @ v)


class Net(nn.Module):
    """Sums two masks, which is -inf in half precision for a padded position."""

    def __init__(self, reads=False):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(32, 16)
        self.first, self.second = Attention(), Attention()
        self.head = nn.Linear(16, 4)
        self.reads = reads
        with torch.no_grad():
            self.emb.weight[0], self.emb.weight[:, 0] = 0, 1
            self.emb.weight[0, 0] = self.first.qkv.weight[0, 0] = 6
            self.first.qkv.weight[16] = 0
            self.first.qkv.weight[16, 0] = self.first.qkv.bias[16] = -6

    def tokens(self, ids, keep):
        x = self.emb(ids)
        low = torch.finfo(x.dtype).min
        causal = torch.full((ids.shape[1],) * 2, low, dtype=x.dtype).triu(1)
        pad = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, low)
        bias = causal + pad[:, None]
        x = self.head(x + self.second(x + self.first(x, bias), bias))
        return x + x[:, :1] * 1e-4 if self.reads else x


class Kept(Net):
    def forward(self, ids, keep):
        return self.tokens(ids, keep)


class Ignored(Net):
    def forward(self, ids, ignore):
        return self.tokens(ids, ignore == 0)


def padded():
    torch.manual_seed(1)
    ids = torch.randint(1, 32, (2, 8))
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1, :4], ids[1, :4] = False, 0
    return ids, keep


def remedies(net, *batch):
    with OverflowGuard(net.half().eval()), torch.inference_mode():
        with pytest.raises(NonFiniteError) as caught:
            net(*batch)
    return caught.value.report.explanation.remedies


def in_float32(found):
    return next(each for each in found if "in float32" in each.text)


def test_padding_is_left_out_whichever_value_of_a_mask_it_has():
    ids, keep = padded()
    first, *_ = remedies(Kept(), ids, keep)
    assert first is in_float32([first]) and first.error < 1e-2
    assert "% from float32 where `keep` is not 0" in first.outcome
    first, *_ = remedies(Ignored(), ids, (~keep).long())
    assert first is in_float32([first]) and first.error < 1e-2
    assert "% from float32 where `ignore` is 0" in first.outcome


def test_what_is_read_elsewhere_is_no_padding():
    of_padding = in_float32(remedies(Kept(reads=True), *padded()))
    assert of_padding.misses == "output" and not of_padding.where
