"""Layers whose forward has no value: normalizations, routers, policies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

UNDEFINED = ("forward", "undefined")
EMPTY = ("forward", "empty reduction")


@failure(
    "avalonstrel/GatedConvolution_pytorch#27",
    *UNDEFINED,
    "aten.div",
    "rescale",
    sample=1,
)
def contrast_of_a_blank_picture(cured):
    """A picture of one colour has no contrast, and is divided by 0. Divide by at least
    1e-6.
    """

    def rescale(self, x):
        low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
        width = (high - low).clamp(min=1e-6) if cured else high - low
        return (x - low) / width - 1  # <-

    torch.manual_seed(3)
    model = Chain(rescale=Fn(rescale), conv=nn.Conv2d(1, 2, 3), head=nn.Flatten())

    def batch(step):
        x = randn(3, 1, 4, 4, seed=step)
        x[1] = 255.0
        return x

    return Run(model, square, batch)


@failure(
    "cpnota/autonomous-learning-library#139",
    *UNDEFINED,
    "aten.log",
    "actor",
)
def density_of_a_scaled_action(cured):
    """The density of a tanh needs the action before it is scaled: 1 minus the square of
    a scaled action is negative. Use the unscaled action.
    """

    def actor(self, x):
        mean, spread = self.mean(x), self.spread(x).clamp(-2, 1).exp()
        raw = mean + spread * torch.randn_like(mean)
        action = torch.tanh(raw)
        scaled = action if cured else action * 2.0
        density = -((raw - mean) ** 2) / (2 * spread**2)
        return density - torch.log(1 - scaled.pow(2) + 1e-6)  # <-

    torch.manual_seed(6)
    model = Chain(
        body=nn.Linear(3, 6),
        actor=Fn(actor, mean=nn.Linear(6, 2), spread=nn.Linear(6, 2)),
    )
    return Run(model, lambda m, x: m(x).mean(), lambda step: randn(4, 3, seed=step))


@failure(
    "vanderschaarlab/synthcity#331",
    "forward",
    "range overflow",
    "aten.exp",
    "encoder.latent",
    sample=3,
)
def deviation_of_an_unbounded_logarithm(cured):
    """A network predicts the logarithm of a variance without a bound, and its `exp`
    overflows for an unusual sample. Clamp the logarithm.
    """

    def latent(self, x):
        mean, logvar = self.mean(x), self.logvar(x)
        logvar = logvar.clamp(-30, 20) if cured else logvar
        deviation = torch.exp(0.5 * logvar)  # <-
        return mean + deviation * torch.randn_like(mean)

    torch.manual_seed(8)
    encoder = Chain(
        body=nn.Linear(3, 4),
        latent=Fn(latent, mean=nn.Linear(4, 2), logvar=nn.Linear(4, 2)),
    )
    model = Chain(encoder=encoder, decoder=nn.Linear(2, 3))

    def batch(step):
        x = randn(5, 3, seed=step)
        x[3] *= 4000
        return x

    return Run(model, square, batch)


@failure(
    "google-deepmind/deepmind-research#346",
    *("forward", "rounding|undefined", "aten.sqrt", "normalizer"),
)
def deviation_by_a_difference_of_squares(cured):
    """The mean of squares minus the square of the mean loses all digits where the mean
    is large, and comes out negative. Clamp it at 0, or subtract the mean first.
    """

    def normalizer(self, x):
        mean, square_mean = x.mean(0), (x**2).mean(0)
        variance = square_mean - mean**2
        variance = variance.clamp(min=1e-8) if cured else variance
        return (x - mean) / torch.sqrt(variance).clamp(min=1e-4)  # <-

    torch.manual_seed(10)
    model = Chain(normalizer=Fn(normalizer), net=nn.Linear(16, 2))

    def batch(step):
        constants = 1000 + 41.4 * torch.arange(16.0)
        return constants + 1e-3 * randn(7, 16, seed=step)

    return Run(model, square, batch)


@failure("facebookresearch/SparseConvNet#190", *EMPTY, "aten.var", "norm")
def running_variance_of_one_sample(cured):
    """The unbiased variance of one sample divides by 0. Use the biased one, or drop a
    last batch of one sample.
    """

    def norm(self, x):
        mean, biased = x.mean(0), x.var(0, unbiased=False)
        if self.training:
            variance = x.var(0, unbiased=not cured)  # <-
            self.running_var.lerp_(variance.detach(), 0.1)
        return (x - mean) / torch.sqrt(biased + 1e-5)

    torch.manual_seed(11)
    model = Chain(
        body=nn.Linear(3, 4),
        norm=Fn(norm, running_var=torch.ones(4)),
        head=nn.Linear(4, 1),
    )
    return Run(model, square, lambda step: randn(1, 3, seed=step))


@failure(
    "pytorch/pytorch#106605, shicai/MobileNet-Caffe#87",
    *(
        "forward",
        "undefined|bad weights",
        "aten.native_batch_norm|aten._native_batch_norm_legit_no_training",
        "stem.1",
    ),
)
def negative_running_variance(cured):
    """A running variance of the checkpoint is negative, and batch normalization takes
    its root. Load or compute the statistics again.
    """
    torch.manual_seed(12)
    stem = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    stem[1].running_var[2] = 1e-5 if cured else -1e-4
    stem[1].eval()
    return Run(
        Chain(stem=stem, head=nn.Linear(4, 1)),
        square,
        lambda step: randn(4, 3, seed=step),
    )


@failure(
    "apple/axlearn#1375",
    *("forward", "underflow|undefined", "aten.div", "moe.router"),
    sample=1,
)
def gates_that_sum_to_zero(cured):
    """All gates of a token are 0 after the sigmoid, and they are divided by their sum.
    Add a small number to the sum.
    """

    def router(self, x):
        score, _ = self.gate(x).sigmoid().topk(2, -1)
        total = score.sum(-1, keepdim=True)
        return score / (total + 1e-20 if cured else total)  # <-

    torch.manual_seed(13)
    router = Fn(router, gate=nn.Linear(4, 6))
    model = Chain(embed=nn.Linear(4, 4), moe=Chain(router=router), head=nn.Linear(2, 1))
    model.moe.router.gate.weight.data.fill_(1.0)
    model.embed.weight.data = torch.eye(4)
    model.embed.bias.data.zero_()

    def batch(step):
        x = randn(3, 4, seed=step)
        x[1] = -99.0
        return x

    return Run(model, square, batch)


@failure(
    "pytorch/pytorch#19126",
    "forward",
    "undefined",
    "aten._weight_norm_interface",
    "head.parametrizations.weight.0",
)
def weight_norm_of_a_zero_row(cured):
    """Weight normalization divides a row by its norm, which is 0 for a row of zeros.
    Initialize each row with something else than zeros.
    """
    torch.manual_seed(8)
    head = nn.Linear(4, 3)
    head.weight.data[1] = 1e-3 if cured else 0.0
    model = Chain(
        body=nn.Linear(4, 4), head=nn.utils.parametrizations.weight_norm(head)
    )
    return Run(model, square, lambda step: randn(3, 4, seed=step))


@failure("KohakuBlueleaf/LyCORIS#166", "forward", "undefined", "aten.div", "adapter")
def decomposed_weight_of_norm_zero(cured):
    """An adapter divides each row of the weight by its norm, which is 0 for a row of
    zeros. Add a small number to the norm.
    """

    def adapter(self, x):
        weight = self.weight + self.up @ self.down
        norm = weight.norm(dim=1, keepdim=True)
        norm = norm + 1e-6 if cured else norm
        return F.linear(x, self.scale * (weight / norm))  # <-

    torch.manual_seed(7)
    parts = dict(weight=torch.randn(4, 3), up=torch.zeros(4, 2), down=torch.randn(2, 3))
    parts["weight"][1] = 0
    parts = {name: nn.Parameter(value) for name, value in parts.items()}
    model = Chain(
        adapter=Fn(adapter, scale=nn.Parameter(torch.ones(4, 1)), **parts),
        head=nn.Linear(4, 1),
    )
    return Run(model, square, lambda step: randn(3, 3, seed=step))
