"""Numbers that grow from call to call: recurrences, unrolled loops and deep models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn

RANGE = ("forward", "range overflow")
EXPLOSION = ("backward", "gradient explosion")


def rotation(gain):
    """A 4 x 4 orthogonal matrix times a number."""
    return torch.linalg.qr(randn(4, 4, seed=3))[0] * gain


@failure("ageron/handson-ml2#32", *RANGE, "aten.addmm", "cell.layer")
def state_of_a_linear_recurrence(cured):
    """The recurrent weights are larger than 1, and the state grows with each of 300
    steps of time. Make them orthogonal, or squash the state.
    """
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    layer.weight.data = rotation(1.0 if cured else 1.4)

    def cell(self, x):
        state = x[:, 0]
        for i in range(300):
            state = self.layer(state) + 0.1 * x[:, i % 4]  # <-
        return state

    model = Chain(cell=Fn(cell, layer=layer), head=nn.Linear(4, 2))

    def loss(model, x):
        return model(x).abs().mean()

    return Run(model, loss, lambda step: randn(5, 4, 4, seed=step))


@failure("thu-ml/tianshou#19", *EXPLOSION, "aten.mm", "cell")
def gradient_through_time(cured):
    """The state is damped in the forward, and its gradient grows by 2 with each of 150
    steps of time. Make the recurrent weights orthogonal.
    """
    torch.manual_seed(0)

    def cell(self, x):
        state = x[:, 0]
        for _ in range(150):
            state = torch.remainder(state @ self.weight, 1.0)  # <-
        return state

    weight = nn.Parameter(rotation(1.0 if cured else 2.0))
    model = Chain(cell=Fn(cell, weight=weight), head=nn.Linear(4, 2))

    def loss(model, x):
        return model(x).pow(2).mean()

    return Run(model, loss, lambda step: randn(5, 4, 4, seed=step))


@failure("layer6ai-labs/T-Fixup#3", *EXPLOSION, "aten.mul", "block12")
def gradient_through_depth(cured):
    """Each of 40 layers normalizes what it returns, and multiplies the gradient by 10.
    Scale the layers down, or take residual connections.
    """
    torch.manual_seed(0)

    def block(self, x):
        x = x @ self.weight
        return torch.sin(x * (1.0 if cured else 30.0))  # <-

    blocks = {
        f"block{i}": Fn(block, weight=nn.Parameter(randn(8, 8, seed=i) / 2))
        for i in range(40)
    }
    model = Chain(**blocks, head=nn.Linear(8, 2))

    def loss(model, x):
        return model(x).pow(2).mean()

    return Run(model, loss, lambda step: randn(5, 8, seed=step))


@failure("VincentStimper/normalizing-flows#73", *RANGE, "aten.exp", "flow", sample=4)
def scales_of_a_deep_flow(cured):
    """The scale of each coupling block is the exponential of what the block computes of
    the outputs before. Bound it, such as by a tanh.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))

    def flow(self, x):
        first, second = x.chunk(2, -1)
        for layer in self.layers:
            scale = layer(first)
            scale = scale.tanh() if cured else scale
            first, second = second * scale.exp(), first  # <-
        return torch.cat([first, second], -1)

    model = Chain(flow=Fn(flow, layers=layers), head=nn.Linear(4, 1))

    def loss(model, x):
        return model(x).abs().mean()

    return Run(model, loss, lambda step: 4 * randn(6, 4, seed=step).abs())


@failure("twtygqyy/pytorch-SRDenseNet#2", *RANGE, "aten.addmm", "layer12")
def depth_without_a_normalization(cured):
    """Each of 30 linear layers doubles its input, until float16 overflows. Normalize,
    or initialize with smaller weights.
    """
    torch.manual_seed(0)
    model = Chain(**{f"layer{i}": nn.Linear(16, 16) for i in range(30)})
    for each in model:
        nn.init.normal_(each.weight, std=0.25 if cured else 0.6)
    model.half()

    def loss(model, x):
        output = model(x)  # <-
        return F.smooth_l1_loss(output.float(), torch.zeros(8, 16))

    return Run(model, loss, lambda step: randn(8, 16, seed=step).half())
