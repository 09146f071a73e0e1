"""The operation that compare_live names as the first that differs."""

import copy

import torch
from assembled import Assembled
from torch import nn

from overflow_fast import compare_live


class FromEmpty(Assembled):
    """Hands memory that nobody has written to an operation that does not read it."""

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        room = torch.empty(x.shape[0], x.shape[1], x.shape[1], dtype=x.dtype)
        return self.o(torch.baddbmm(room, q, k.mT, beta=0, alpha=0.25).softmax(-1))


def test_memory_that_nobody_has_written_to_is_no_difference():
    torch.manual_seed(0)
    model = FromEmpty(q=nn.Linear(16, 16), k=nn.Linear(16, 16), o=nn.Linear(8, 8))
    with torch.no_grad():
        model.q.weight.mul_(2000)
        model.k.weight.mul_(2000)
    half, x = copy.deepcopy(model).half(), torch.randn(2, 8, 16)
    scrap = [torch.full((2, 8, 8), 7.0) for _ in range(50)]
    del scrap
    found = compare_live(half, model, x.half(), reference_batch=x)
    assert found.first.op.startswith("aten.baddbmm")


class Filled(Assembled):
    def forward(self, x, keep):
        scores = self.q(x) @ x.mT
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~keep[:, None, :], lowest)
        scores = scores.contiguous().view(scores.shape)
        return self.down(scores.softmax(-1) @ x)


def test_a_fill_value_that_follows_the_dtype_is_no_difference():
    torch.manual_seed(0)
    model = Filled(q=nn.Linear(16, 16), down=nn.Linear(16, 16)).eval()
    with torch.no_grad():
        model.down.weight.mul_(2e5)
    x = torch.randn(2, 6, 16).half()
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 3:] = False
    wide = copy.deepcopy(model)
    found = compare_live(model.half(), wide, (x, keep))
    assert found.first.op.startswith("aten.addmm")


def test_what_overflows_behind_a_fill_value_is_named():
    class Adds(nn.Module):
        def forward(self, x):
            keep = torch.ones_like(x, dtype=torch.bool).tril()
            scores = x.masked_fill(~keep, torch.finfo(x.dtype).min)
            return scores.clamp(min=-100) * 1000

    x = torch.randn(4, 4)
    found = compare_live(Adds(), Adds(), x.half(), reference_batch=x)
    assert found.first.op.startswith("aten.mul")


class Divides(Assembled):
    def forward(self, x):
        h = self.a(x)
        return self.b(h / h.abs().amax(-1, keepdim=True))


def test_nans_of_both_are_told(as_kept):
    torch.manual_seed(0)
    model = Divides(a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with torch.no_grad():
        model.a.bias.zero_()
    half, x = copy.deepcopy(model).bfloat16(), torch.randn(3, 4)
    x[1] = 0
    as_kept(str(compare_live(half, model, x.bfloat16(), reference_batch=x)))


def test_the_look_at_operations_compiles_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(1.5)
    compiled = torch.compile(model, backend="aot_eager")
    other = torch.compile(other, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert compare_live(compiled, other, torch.randn(2, 4)).first is not None
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) <= 2
