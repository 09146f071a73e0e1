"""Compiled models, with inductor and with a backend that lowers operations badly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

COMPILED = dict(kind="compiled")
ONLY = ("forward", "only in compiled code")


def naive(graph, inputs):
    """A backend whose lowerings leave out what keeps these operations in range."""
    lowered = {
        torch.logsumexp: lambda x, *args, **kw: x.exp().sum(*args, **kw).log(),
        F.softplus: lambda x, *args: (1 + x.exp()).log(),
        torch.logaddexp: lambda x, y: (x.exp() + y.exp()).log(),
    }
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = lowered.get(node.target, node.target)
    graph.recompile()
    return graph.forward


def compiled(model, cured, backend="inductor"):
    """The model, compiled; cured, by a backend that changes nothing."""
    return torch.compile(model, backend="eager" if cured else backend)


@failure("apple/coreai-torch#21", *ONLY, **COMPILED)
def lowering_of_logsumexp(cured):
    """A compiler rewrote `logsumexp` as `log(sum(exp(x)))`, which overflows from 88 on
    in float32. Compile that module with another backend, and report the lowering.
    """
    torch.manual_seed(0)
    energy = Fn(lambda self, x: torch.logsumexp(x, -1))
    model = Chain(body=nn.Linear(4, 6), energy=energy)
    model.body.bias.data.fill_(95.0)
    model = compiled(model, cured, naive)
    return Run(model, square, lambda step: randn(3, 4, seed=step))


@failure("llvm/torch-mlir#4751", *ONLY, **COMPILED)
def lowering_of_logaddexp(cured):
    """A compiler rewrote `logaddexp` without subtracting the maximum first. Compile
    that module with another backend, and report the lowering.
    """
    torch.manual_seed(1)
    merge = Fn(lambda self, x: torch.logaddexp(x, x.roll(1, -1)))
    model = compiled(Chain(body=nn.Linear(4, 6), merge=merge), cured, naive)

    def batch(step):
        return randn(3, 4, seed=step) * (1 if step < 2 else 400)

    return Run(model, square, batch, 4)


@failure(
    "pytorch/pytorch#131552",
    *("forward", "undefined", "aten._softmax", "layer"),
    sample=1,
    **COMPILED,
)
def rows_that_see_nothing(cured):
    """The softmax of a row of -inf is 0 / 0; a sample of padding alone has only such
    rows. Mask with a large negative number, such as -1e9 in float32.
    """

    def layer(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        mask = (x.sum(-1) == 0)[:, None]
        least = -1e9 if cured else -torch.inf
        return scores.masked_fill(mask, least).softmax(-1) @ x  # <-

    torch.manual_seed(2)
    layer = Fn(layer, query=nn.Linear(4, 4), key=nn.Linear(4, 4))
    model = compiled(Chain(layer=layer, head=nn.Linear(4, 2)), False)

    def batch(step):
        x = randn(3, 5, 4, seed=step)
        x[1] = 0
        return x

    return Run(model, square, batch)


@failure(
    "pytorch/pytorch#196170",
    *("backward", "singular gradient", "aten._softmax", "layer"),
    **COMPILED,
)
def masked_rows_that_the_loss_leaves_out(cured):
    """The softmax of a row of -inf is 0 / 0. The loss leaves that row out, but backward
    runs through it, and 0 times nan is nan. Mask with a large negative number.
    """

    def layer(self, x):
        scores = self.query(x) @ self.key(x).transpose(0, 1)
        least = -1e9 if cured else -torch.inf
        mask = torch.full((5, 5), least).triu(0)
        return ((scores + mask).softmax(-1) @ x.detach())[1:]  # <-

    torch.manual_seed(3)
    layer = Fn(layer, query=nn.Linear(4, 4), key=nn.Linear(4, 4))
    model = compiled(Chain(layer=layer, head=nn.Linear(4, 2)), False)
    return Run(model, square, lambda step: randn(5, 4, seed=step))
