"""Updates that make weights non-finite, and runs that diverge."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square


@failure("ml-explore/mlx#3712", "optimizer", "undefined", "aten.addcdiv")
def root_mean_square_of_no_gradient(cured):
    """RMSprop divides by the root of the mean square, which is 0 for a weight without a
    gradient, and `eps` is 0. Give an `eps`.
    """
    torch.manual_seed(0)
    model = Chain(embed=nn.Embedding(6, 3), head=nn.Linear(3, 1))
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=0.01, eps=1e-8 if cured else 0.0
    )
    return Run(model, square, lambda step: torch.tensor([[0, 1, 2]]), 2, optimizer)


@failure("microsoft/dion#24", "optimizer", "undefined", "aten.div")
def rescaled_update_of_zero(cured):
    """The optimizer divides by the norm of its update, which is 0 where the gradient
    is. Clamp the norm.
    """

    class Muon(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.02})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                update = parameter.grad
                after = (0.9 * update).norm()
                after = after.clamp(min=1e-8) if cured else after
                ratio = update.norm() / after  # <-
                parameter.add_(update * ratio, alpha=-0.02)

    torch.manual_seed(1)
    model = Chain(up=nn.Linear(3, 4), act=nn.ReLU(), down=nn.Linear(4, 2, bias=False))
    model.down.weight.data.zero_()
    return Run(
        model,
        lambda m, x: m(x).mean() + m(x).pow(2).mean(),
        lambda step: randn(4, 3, seed=step),
        2,
        Muon(model.parameters()),
    )


@failure("CanReader/FastNN#12", "optimizer", "undefined", "aten.sqrt")
def centered_variance_below_zero(cured):
    """The variance is computed as a difference of two averages and comes out negative
    by rounding. Clamp it at 0.
    """

    class Centered(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state, gradient = self.state[parameter], parameter.grad
                square = state.setdefault("square", torch.zeros_like(gradient))
                mean = state.setdefault("mean", torch.zeros_like(gradient))
                square.lerp_(gradient**2, 0.3)
                mean.lerp_(gradient, 0.3)
                variance = square - mean**2
                variance = variance.clamp(min=0) if cured else variance
                root = (variance + 1e-8).sqrt()  # <-
                parameter.addcdiv_(gradient, root + 1.0, value=-1e-6)

    torch.manual_seed(2)
    model = Chain(regression=nn.Linear(9, 4))

    def loss(model, x):
        return (1e4 * model(x)).sum()

    def batch(step):
        return (1 + torch.arange(9.0)[None] / 7) * (1 + 1e-6 * (step % 3))

    return Run(model, loss, batch, 60, Centered(model.parameters()))


@failure("lessw2020/FAdam_PyTorch#1", "optimizer", "undefined", "aten.div")
def epsilon_of_a_zero_gradient(cured):
    """The `eps` is proportional to the size of the gradient, so both are 0 for a
    gradient of 0. Use a constant.
    """

    class FAdam(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                gradient = parameter.grad
                size = gradient.pow(2).mean().sqrt()
                eps = 1e-8 if cured else 1e-8 * size.clamp(max=1)
                natural = gradient / (gradient.abs() + eps)  # <-
                parameter.add_(natural, alpha=-1e-3)

    torch.manual_seed(3)
    model = Chain(
        embed=nn.Linear(3, 4),
        gate=Fn(lambda self, x: x * 0 + x.detach()),
        head=nn.Linear(4, 1),
    )
    return Run(
        model, square, lambda step: randn(4, 3, seed=step), 2, FAdam(model.parameters())
    )


@failure(
    "deepspeedai/DeepSpeed#7171",
    "optimizer",
    "range overflow|undefined",
    "aten.pow|aten.mul",
)
def norm_of_infinity_times_zero(cured):
    """The norm of the gradients overflows, and clipping multiplies inf by 0. Use
    `torch.where`, and skip the step where the norm is not finite.
    """
    torch.manual_seed(4)
    model = Chain(up=nn.Linear(4, 4), head=nn.Linear(4, 1))

    def clip():
        gradients = [p.grad for p in model.parameters()]
        total = torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt()
        is_bad = total.isinf() | total.isnan()
        if cured:
            total = torch.where(is_bad, -1.0, total)
        else:
            total = is_bad.logical_not() * total + is_bad * -1.0
        for gradient in gradients:
            gradient.mul_(1 / total.clamp(min=1.0))

    def loss(model, x):
        return (1e19 * model(x)).sum()

    return Run(
        model, loss, lambda step: 9 * randn(4, 4, seed=step), 1, before_step=clip
    )


@failure(
    "facebookresearch/maskrcnn-benchmark#295, BobLiu20/FaceRecognition_PyTorch#2",
    "forward",
    "divergence",
    "aten.addmm",
    "head.fc",
)
def rate_for_sixteen_times_the_batch(cured):
    """The learning rate was meant for a batch sixteen times as large, and the weights
    grow in each step. Lower the rate in proportion.
    """
    torch.manual_seed(5)
    head = Chain(fc=nn.Linear(4, 8), act=nn.ReLU(), box=nn.Linear(8, 2))
    model = Chain(backbone=nn.Linear(3, 4), head=head)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if cured else 3.0)

    def loss(model, x):
        return F.smooth_l1_loss(model(x), 5 * x[:, :2])

    return Run(model, loss, lambda step: 2 * randn(4, 3, seed=step), 200, optimizer)


@failure("CharlieDinh/pFedMe#11", "forward", "divergence", "aten.pow")
def personal_rate_that_is_too_large(cured):
    """The learning rate is so high that each step overshoots by more than the last.
    Lower it.
    """
    torch.manual_seed(6)
    model = Chain(body=nn.Linear(3, 6), act=nn.Tanh(), head=nn.Linear(6, 1))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01 if cured else 2.0, momentum=0.9
    )

    def loss(model, x):
        return ((model(x).squeeze(1) - x.sum(1)) ** 2).mean()  # <-

    return Run(model, loss, lambda step: 3 * randn(8, 3, seed=step), 200, optimizer)
