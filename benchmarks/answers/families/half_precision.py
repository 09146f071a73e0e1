"""Results beyond the largest number of float16."""

from __future__ import annotations

import torch
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

HALF = torch.float16


@failure(
    "pytorch/pytorch#183605",
    *("forward", "underflow|undefined", "aten.rsqrt", "layers.1.norm"),
)
def epsilon_that_half_rounds_to_zero(cured):
    """An epsilon of 1e-9 is 0 in float16, whose smallest number is 6e-8. Normalize in
    float32, or use an epsilon of at least 1e-4.
    """

    def norm(self, x):
        y = x.float() if cured else x
        variance = y.var(-1, keepdim=True) + (1e-4 if cured else 1e-9)
        return (y * torch.rsqrt(variance)).to(x.dtype)  # <-

    def layer(gain):
        up = nn.Linear(8, 8, bias=False)
        up.weight.data.mul_(gain)
        return Chain(up=up, norm=Fn(norm))

    torch.manual_seed(0)
    layers = nn.Sequential(layer(1.0), layer(0.0), layer(1.0))
    model = Chain(layers=layers, head=nn.Linear(8, 4)).to(HALF)
    return Run(model, square, lambda step: randn(4, 8, seed=step).half(), 2)


@failure(
    "pytorch/pytorch#60939, ultralytics/ultralytics#24990",
    *("forward", "range overflow", "aten.bmm", "encoder.attention"),
    sample=2,
)
def scores_before_their_scale(cured):
    """The product of queries and keys is beyond 65504 before it is divided by the root
    of the width. Scale the queries before the product, or use bfloat16.
    """

    def attention(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scale = q.shape[-1] ** -0.5
        if cured:
            q, scale = q * scale / 8, 8.0
        scores = torch.bmm(q, k.transpose(1, 2))  # <-
        return torch.bmm((scores * scale).float().softmax(-1).to(x.dtype), v)

    torch.manual_seed(1)
    encoder = Chain(attention=Fn(attention, qkv=nn.Linear(64, 192)))
    model = Chain(embed=nn.Linear(4, 64), encoder=encoder, head=nn.Linear(64, 2)).to(
        HALF
    )
    model.encoder.attention.qkv.weight.data[:128].mul_(90)

    def batch(step):
        x = 0.02 * randn(4, 5, 4, seed=step)
        x[2] *= 100
        return x.half()

    model.embed.bias.data.zero_()
    return Run(model, square, batch)


@failure(
    "NVIDIA/kvpress#268",
    *("forward", "range overflow", "aten.mul", "press"),
)
def fake_key_of_a_small_norm(cured):
    """A factor of -1e5 is itself beyond float16. Use a smaller one, and compute in
    float32.
    """

    def press(self, q):
        mean = q.float().mean(0) if cured else q.mean(0)
        key = (-1e2 if cured else -1e5) * mean  # <-
        return q.float() @ (key / mean.norm() ** 2).float()

    torch.manual_seed(2)
    model = Chain(query=nn.Linear(4, 4), press=Fn(press)).to(HALF)
    return Run(
        model,
        square,
        lambda step: 2 + randn(6, 4, seed=step).half(),
    )


@failure(
    "facebookresearch/xformers#98",
    *("forward", "range overflow", "aten.exp", "layers.favor"),
)
def random_features_of_attention(cured):
    """The `exp` of 11.1 is the end of float16, and of 88.7 that of float32. Compute it
    in float32 and subtract the maximum first.
    """

    def favor(self, x):
        y = (x.float() if cured else x) @ self.projection.to(
            torch.float32 if cured else HALF
        )
        features = torch.exp(y)  # <-
        return (features / features.sum(-1, keepdim=True)).to(x.dtype)

    torch.manual_seed(3)
    layers = Chain(project=nn.Linear(6, 6), favor=Fn(favor, projection=4 * randn(6, 6)))
    model = Chain(layers=layers, head=nn.Linear(6, 2)).to(HALF)
    return Run(model, square, lambda step: 3 * randn(3, 4, 6, seed=step).half(), 2)


@failure(
    "pytorch/pytorch#41663, pytorch/pytorch#34372, HKUDS/SSLRec#26",
    *("forward", "undefined", "aten.log", "sampler"),
)
def gumbel_noise_of_zero(cured):
    """`torch.rand` can return exactly 0, in float16 one time in 2,048, and the
    logarithm of 0 is -inf. Clamp the noise.
    """

    def sampler(self, logits):
        noise = torch.rand(logits.shape, dtype=HALF).to(logits.dtype)
        noise = noise.clamp(1e-4, 0.999) if cured else noise
        return logits - torch.log(-torch.log(noise))  # <-

    torch.manual_seed(4)
    model = Chain(logits=nn.Linear(4, 512), sampler=Fn(sampler))
    return Run(model, square, lambda step: randn(32, 4, seed=step), 4)


@failure(
    "facebookresearch/fairscale#263",
    *("optimizer", "range overflow", "aten.pow"),
)
def clipping_by_a_norm_in_half(cured):
    """The sum of the squares of float16 gradients overflows before its root is taken.
    Compute the norm in float32.
    """
    torch.manual_seed(5)
    model = Chain(up=nn.Linear(8, 16), head=nn.Linear(16, 1)).to(HALF)

    def clip():
        gradients = [p.grad.float() if cured else p.grad for p in model.parameters()]
        total = sum(g.pow(2).sum() for g in gradients).sqrt()  # <-
        for parameter in model.parameters():
            parameter.grad.mul_((1 / (total - total.floor() + 1)).to(HALF))

    def loss(model, x):
        return 400 * model(x).float().mean()

    return Run(
        model, loss, lambda step: 30 * randn(4, 8, seed=step).half(), before_step=clip
    )


@failure(
    "pytorch/pytorch#43211",
    *("backward", "underflow|singular gradient", "aten.linalg_vector_norm", "penalty"),
)
def cubic_norm_that_underflows(cured):
    """The third powers of small float16 numbers are 0, so the norm is 0, and its
    derivative divides by it. Compute the norm in float32.
    """

    def penalty(self, x):
        y = x.float() if cured else x
        return y.norm(3)  # <-

    torch.manual_seed(6)
    model = Chain(project=nn.Linear(4, 4), penalty=Fn(penalty)).to(HALF)
    model.project.weight.data.mul_(1e-3)
    model.project.bias.data.zero_()
    return Run(
        model,
        lambda m, x: m(x).float(),
        lambda step: 0.1 * randn(3, 4, seed=step).half(),
    )


@failure(
    "tensorpro/tpu_rwkv#1",
    *("forward", "range overflow", "aten.exp", "blocks.0.time_mix"),
    sample=1,
)
def receptance_of_a_large_key(cured):
    """The `exp` of an unbounded key overflows. Subtract the maximum first, as a softmax
    does.
    """

    def time_mix(self, x):
        key, value = self.key(x), self.value(x)
        top = key.amax(1, keepdim=True) if cured else 0.0
        weight = torch.exp(key - top)  # <-
        return (weight * value).cumsum(1) / weight.cumsum(1).clamp(min=1e-30)

    torch.manual_seed(18)
    mix = Fn(time_mix, key=nn.Linear(4, 4), value=nn.Linear(4, 4))
    model = Chain(blocks=nn.Sequential(Chain(time_mix=mix)), head=nn.Linear(4, 2))

    def batch(step):
        x = randn(3, 6, 4, seed=step)
        x[1, 3] *= 3000
        return x

    return Run(model, square, batch)


@failure(
    "huggingface/transformers#18057",
    *("forward", "range overflow", "aten.add", "layer.attention"),
    sample=1,
)
def mask_added_to_negative_scores(cured):
    """The lowest number of float16 plus a negative score is -inf, and a row of them is
    nan after the softmax. Use `masked_fill` in place of a sum.
    """

    def attention(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        if cured:
            return scores.masked_fill(mask != 0, -6e4).softmax(-1) @ x
        scores = scores + mask  # <-
        return scores.softmax(-1) @ x

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Fn(attention, query=nn.Linear(4, 4), key=nn.Linear(4, 4))

        def forward(self, x, mask):
            return x + self.attention(x, mask)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = Layer(), nn.Linear(4, 2)

        def forward(self, x, mask):
            return self.head(self.layer(x, mask))

    torch.manual_seed(8)

    def batch(step):
        mask = torch.zeros(3, 1, 5)
        mask[1] = torch.finfo(HALF).min  # all of it is padding
        return 2 + randn(3, 5, 4, seed=step).half(), mask.half()

    model = Model().to(HALF)
    model.layer.attention.query.weight.data = torch.eye(4).half() * 5
    model.layer.attention.key.weight.data = -torch.eye(4).half() * 5
    return Run(model, square, batch)
