"""Finite forwards whose derivatives are not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

SINGULAR = ("backward", "singular gradient")


@failure("papagina/RotationContinuity#11", *SINGULAR, "aten.acos")
def geodesic_angle_of_equal_rotations(cured):
    """The derivative of `acos` is infinite at 1, the cosine between equal rotations.
    Clamp the argument to less than 1, or use `atan2`.
    """
    torch.manual_seed(0)
    model = Chain(encode=nn.Linear(3, 6), decode=nn.Linear(6, 9))
    model.decode.weight.data.zero_()
    model.decode.bias.data = torch.eye(3).flatten()

    def loss(model, x):
        rotation = model(x).view(-1, 3, 3)
        cosine = (rotation.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
        cosine = cosine.clamp(-1, 1) * (0.999 if cured else 1)
        return torch.acos(cosine).mean()  # <-

    return Run(model, loss, lambda step: randn(4, 3, seed=step))


@failure(
    "kornia/kornia#918, liuyuisanai/Focal-Loss#11",
    *("backward", "rounding|singular gradient", "aten.pow", ""),
    sample=1,
)
def focal_weight_below_one(cured):
    """The derivative of a power below 1 is infinite at 0, which a sure prediction
    reaches. Clamp the base away from 0.
    """
    torch.manual_seed(1)
    model = Chain(backbone=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 1))

    def loss(model, batch):
        x, target = batch
        p = model(x).squeeze(1).sigmoid()
        p = p.clamp(1e-4, 1 - 1e-4) if cured else p
        pt = torch.where(target == 1, p, 1 - p)
        weight = (1 - pt) ** 0.5  # <-
        return (-weight * pt.clamp(min=1e-6).log()).mean()

    def batch(step):
        x = randn(3, 4, seed=step)
        return x, torch.tensor([1.0, 1.0, 0.0])

    def sharp(step):
        x, target = batch(step)
        x[1] = 0
        return x, target

    hook = torch.zeros(8)
    hook[0] = 1.0
    model.head.weight.data = 20 * hook[None]
    model.backbone.bias.data[0] = 5.0
    model.backbone.weight.data[0] = torch.tensor([-6.0, 0, 0, 0])

    def data(step):
        x, target = sharp(step)
        x[0, 0] = x[2, 0] = 5 / 6  # their probability is not 0 or 1
        return x, target

    return Run(model, loss, data)


@failure("speechbrain/speechbrain#181", *SINGULAR, "aten.pow", "features", sample=2)
def compressed_magnitude_of_silence(cured):
    """The derivative of a power below 1 is infinite at 0, the power of silence. Add a
    small number below the power.
    """

    def features(self, x):
        spectrum = torch.fft.rfft(x)
        power = spectrum.real**2 + spectrum.imag**2
        return (power + (1e-8 if cured else 0)).pow(0.25)  # <-

    torch.manual_seed(2)
    enhance = nn.Conv1d(1, 1, 3, padding=1, bias=False)
    model = Chain(enhance=enhance, features=Fn(features))

    def batch(step):
        x = randn(4, 1, 16, seed=step)
        x[2] = 0
        return x

    return Run(model, square, batch)


@failure("pytorch/pytorch#108618", *SINGULAR, "aten.log2", "rate", sample=0)
def logarithm_that_where_leaves_out(cured):
    """`torch.where` leaves the logarithm of 0 out of the forward; backward multiplies
    its derivative, inf, by 0. Clamp the argument of the logarithm instead.
    """

    def rate(self, x):
        y = x * (x > 0)
        safe = y.clamp(min=1e-3) if cured else y
        return torch.where(y > 0, torch.log2(safe), torch.zeros_like(y))  # <-

    torch.manual_seed(3)
    model = Chain(inner=nn.Linear(4, 4), rate=Fn(rate), out=nn.Linear(4, 1))
    model.inner.bias.data.fill_(9.0)

    def batch(step):
        x = randn(3, 4, seed=step)
        x[0] = -100 * model.inner.weight.data[0]
        return x

    return Run(model, square, batch)


@failure("pytorch/pytorch#16317, pytorch/pytorch#36923", *SINGULAR, "aten.div", "pool")
def quotient_that_where_leaves_out(cured):
    """`torch.where` leaves the quotient by 0 out of the forward; backward multiplies
    its derivative, inf, by 0. Make the divisor non-zero instead.
    """

    def pool(self, x):
        count = (x > -0.5).sum(1, keepdim=True).clamp(max=3).float()
        count = (count * (x.mean(1, keepdim=True) > -1)).detach()
        total = x.sum(1, keepdim=True)
        mean = total / (count.clamp(min=1) if cured else count)  # <-
        return torch.where(count == 0, torch.zeros_like(mean), mean)

    torch.manual_seed(4)
    model = Chain(project=nn.Linear(3, 4), pool=Fn(pool), head=nn.Linear(1, 1))

    def batch(step):
        x = randn(3, 3, seed=step)
        x[1] = -20 * model.project.weight.data.sum(0)
        return x

    return Run(model, square, batch)


@failure(
    "pytorch/pytorch#68425, pytorch/pytorch#156212",
    "backward",
    "range overflow",
    "aten.exp",
    "flow.0",
    sample=3,
)
def exponential_that_where_leaves_out(cured):
    """`torch.where` leaves the overflowing `exp` out of the forward; backward
    multiplies it by 0. Clamp the argument of the `exp` instead.
    """

    def elu(self, x):
        low = torch.exp(x.clamp(max=0) if cured else x)  # <-
        return torch.where(x <= 0, low, 1 + x)

    torch.manual_seed(5)
    flow = nn.Sequential(Fn(elu), nn.Tanh())
    model = Chain(start=nn.Linear(2, 3), flow=flow, end=nn.Linear(3, 1))

    def batch(step):
        x = randn(5, 2, seed=step)
        x[3] *= 500
        return x

    return Run(model, square, batch)


@failure("pytorch/pytorch#187297", *SINGULAR, "aten.sqrt", "distance")
def root_of_a_negative_that_where_leaves_out(cured):
    """`torch.where` leaves the root of a negative number out of the forward; its
    derivative is nan all the same. Clamp the argument of the root instead.
    """

    def distance(self, x):
        square = (x * x).sum(-1) - 4
        safe = square.clamp(min=1e-6) if cured else square
        return torch.where(square > 0, safe.sqrt(), square)  # <-

    torch.manual_seed(6)
    model = Chain(embed=nn.Linear(3, 4), distance=Fn(distance))
    return Run(model, square, lambda step: randn(4, 3, seed=step))


@failure("pytorch/pytorch#2534, keras-team/keras-io#910", *SINGULAR, "aten.sqrt")
def gradient_penalty_of_a_dead_critic(cured):
    """A critic whose units are all dead has a gradient of 0, and the derivative of the
    norm's root is infinite there. Add a small number inside the root.
    """
    torch.manual_seed(7)
    model = Chain(first=nn.Linear(4, 8), act=nn.ReLU(), last=nn.Linear(8, 1))
    model.first.bias.data.fill_(-50.0)

    def loss(model, real):
        mixed = (0.5 * real).requires_grad_()
        score = model(mixed).sum()
        (gradient,) = torch.autograd.grad(score, mixed, create_graph=True)
        squared = gradient.pow(2).sum(1) + (1e-12 if cured else 0)
        return ((squared.sqrt() - 1) ** 2).mean() - model(real).mean()  # <-

    return Run(model, loss, lambda step: randn(4, 4, seed=step))


@failure(
    "pytorch/FBGEMM#5754",
    "backward",
    "not reproducible",
    "aten.empty",
    "segments",
    kind="unwritten",
)
def unpacked_gradient_with_a_gap(cured):
    """A backward allocates its result with `torch.empty` and writes to only a part of
    it. Use `torch.zeros`.
    """

    from .memory import garbage

    class Pack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x[:4] * 1.0

        @staticmethod
        def backward(ctx, gradient):
            new = torch.zeros if cured else torch.empty
            full = new(6, 4)  # <-
            garbage(full, cured)
            full[:4] = gradient
            return full

    torch.manual_seed(9)
    model = Chain(events=nn.Linear(4, 4), segments=Fn(lambda self, x: Pack.apply(x)))
    return Run(model, square, lambda step: randn(6, 4, seed=step))


@failure("pytorch/pytorch#94700", *SINGULAR, "aten.log|aten.mul")
def nan_to_num_behind_a_logarithm(cured):
    """`nan_to_num` hides the logarithm of a negative number in the forward, and not its
    derivative in backward. Make the argument positive, here by `softplus`.
    """
    torch.manual_seed(10)
    model = Chain(body=nn.Linear(4, 4), rate=nn.Linear(4, 1))

    def loss(model, batch):
        x, truth = batch
        rate = model(x).squeeze(1)
        rate = F.softplus(rate) if cured else rate
        cost = rate * torch.log(rate / truth) - rate  # <-
        return cost.nan_to_num(0.0).mean()

    return Run(model, loss, lambda step: (randn(5, 4, seed=step), torch.ones(5)))


@failure(
    "Pzoom522/ProcrustEs-KGE#2, naver/roma#6",
    "backward",
    "singular gradient",
    "aten._linalg_svd",
    "align",
)
def rotation_of_equal_singular_values(cured):
    """The derivative of an SVD divides by the differences of singular values, which are
    0 where two are equal. Perturb the matrix, or use a method without an SVD.
    """

    def align(self, x):
        moment = x.transpose(1, 2) @ x / x.shape[1]
        if cured:
            moment = moment + torch.diag(torch.tensor([0.1, 0.2, 0.3]))
        u, _, v = torch.linalg.svd(moment)  # <-
        return u @ v

    torch.manual_seed(8)
    model = Chain(map=nn.Linear(3, 3, bias=False), align=Fn(align))
    model.map.weight.data = torch.eye(3)

    def loss(model, x):
        return (model(x) * torch.arange(9.0).view(3, 3)).sum()

    return Run(model, loss, lambda step: torch.eye(3).repeat(2, 1, 1))
