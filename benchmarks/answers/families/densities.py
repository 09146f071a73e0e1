"""Densities, divergences and distances: losses of distributions and of pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn

UNDERFLOW, ROUNDING = ("forward", "underflow"), ("forward", "rounding")
RANGE, UNDEFINED = ("forward", "range overflow"), ("forward", "undefined")


def outputs(*values):
    """A linear layer with almost no weight, and biases of some values."""
    layer = nn.Linear(4, len(values))
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.copy_(torch.tensor(values))
    return layer


@failure(
    "vanderschaarlab/synthcity#331, pyg-team/pytorch_geometric#500", *RANGE, "aten.exp"
)
def variance_of_an_encoder(cured):
    """The logarithm of a variance is not bounded, and its exponential overflows in the
    divergence. Clamp it, such as to -30 to 20.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), encoder=outputs(0.0, 0.1, 95.0, -2.0))

    def loss(model, x):
        mean, logvar = model(x).chunk(2, -1)
        logvar = logvar.clamp(-30, 20) if cured else logvar
        return -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure(
    "anthonytorlucci/rlevo#1053, leggedrobotics/rsl_rl#190", *UNDERFLOW, "aten.div"
)
def action_over_a_deviation_of_zero(cured):
    """A learned logarithm of the deviation falls below -104, whose exponential is 0 in
    float32. Clamp it to at least -20.
    """
    torch.manual_seed(0)
    log_std = nn.Parameter(torch.tensor([-1.0, -110.0]))
    model = Chain(policy=Fn(lambda self, x: self.net(x), net=nn.Linear(4, 2)))
    model.policy.log_std = log_std

    def loss(model, batch):
        state, action = batch
        log_std = model.policy.log_std
        log_std = log_std.clamp(-20, 2) if cured else log_std
        scaled = (action - model(state)) / log_std.exp()  # <-
        return (0.5 * scaled.pow(2) + log_std).mean()

    def batch(step):
        return randn(5, 4, seed=step), randn(5, 2, seed=step + 1)

    return Run(model, loss, batch)


@failure("emited/VariationalRecurrentNeuralNetwork#2", *ROUNDING, "aten.log")
def likelihood_of_pixels(cured):
    """A decoder's sigmoid is rounded to 1, and the logarithm of 1 minus it is -inf.
    Take `binary_cross_entropy_with_logits`.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), decoder=outputs(0.3, 30.0, -0.4))

    def loss(model, batch):
        x, pixels = batch
        logits = model(x)
        if cured:
            return F.binary_cross_entropy_with_logits(logits, pixels)
        theta = torch.sigmoid(logits)
        dark = torch.log(1 - theta)  # <-
        return -(pixels * torch.log(theta) + (1 - pixels) * dark).mean()

    def batch(step):
        return randn(5, 4, seed=step), (randn(5, 3, seed=step) > 0).float()

    return Run(model, loss, batch)


@failure("pytorch/pytorch#184030", *UNDEFINED, "aten.log")
def rate_of_a_poisson_below_zero(cured):
    """The rate is the output of a linear layer, which may be negative, and its
    logarithm is nan. Give the logarithm of the rate (`log_input=True`), or take
    `softplus`.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), rate=outputs(2.0, -1.0))

    def loss(model, batch):
        x, count = batch
        rate = model(x)
        rate = F.softplus(rate) if cured else rate
        return F.poisson_nll_loss(rate, count, log_input=False)  # <-

    def batch(step):
        return randn(5, 4, seed=step), randn(5, 2, seed=step).abs().round()

    return Run(model, loss, batch)


@failure("huggingface/sentence-transformers#625", *UNDEFINED, "aten.div", sample=2)
def cosine_of_unknown_words(cured):
    """The embedding of a sentence without any known word is 0, and it is divided by its
    norm. Take `F.normalize`.
    """
    torch.manual_seed(0)
    model = Chain(words=nn.EmbeddingBag(8, 4, mode="sum", padding_idx=0))

    def loss(model, ids):
        vectors = model(ids)
        if cured:
            unit = F.normalize(vectors, dim=-1)
        else:
            unit = vectors / vectors.norm(dim=-1, keepdim=True)  # <-
        return (unit @ unit.detach().T).mean()

    def batch(step):
        ids = torch.arange(12).reshape(4, 3) % 7 + 1
        ids[2] = 0
        return ids

    return Run(model, loss, batch)


@failure(
    "huggingface/sentence-transformers#4033",
    "backward",
    "singular gradient",
    "aten.sqrt",
    sample=3,
)
def distance_of_equal_sentences(cured):
    """The derivative of a root is inf at 0, the distance of two equal embeddings. Take
    `torch.linalg.vector_norm`, or add a small number within the root.
    """
    torch.manual_seed(0)
    model = Chain(encoder=nn.Linear(4, 4))

    def loss(model, batch):
        one, other = batch
        gap = model(one) - model(other)
        if cured:
            return torch.linalg.vector_norm(gap, dim=-1).mean()
        return gap.pow(2).sum(-1).sqrt().mean()  # <-

    def batch(step):
        one, other = randn(5, 4, seed=step), randn(5, 4, seed=step + 1)
        other[3] = one[3]
        return one, other

    return Run(model, loss, batch)


@failure("qubvel-org/segmentation_models.pytorch#463", *RANGE, "aten.sum")
def dice_of_a_large_picture_in_half(cured):
    """The sum of 131,000 pixels is beyond float16, and inf / inf is nan. Take the sums
    in float32.
    """
    torch.manual_seed(0)
    model = Chain(conv=nn.Conv2d(1, 1, 1).half())
    model.conv.bias.data.fill_(4.0)

    def loss(model, x):
        mask = torch.sigmoid(model(x))
        mask = mask.float() if cured else mask
        shared = (mask * (x > 0)).sum()  # <-
        return 1 - 2 * shared / (mask.sum() + (x > 0).sum())

    return Run(model, loss, lambda step: randn(1, 1, 512, 512, seed=step).half())


@failure("anucvml/ddn#8", *RANGE, "aten.exp", "transport")
def kernel_of_an_optimal_transport(cured):
    """The kernel of Sinkhorn's iteration is the exponential of the scores times a
    sharpness of 20. Iterate on logarithms, by
    `log_softmax`.
    """

    def transport(self, scores):
        scores = 20.0 * scores
        if cured:
            for _ in range(3):
                scores = scores.log_softmax(-1)
                scores = scores.log_softmax(-2)
            return scores.exp()
        plan = torch.exp(scores)  # <-
        for _ in range(3):
            plan = plan / plan.sum(-1, keepdim=True)
            plan = plan / plan.sum(-2, keepdim=True)
        return plan

    torch.manual_seed(0)
    model = Chain(score=nn.Linear(4, 4), transport=Fn(transport))

    def loss(model, x):
        return model(x).pow(2).mean()

    return Run(model, loss, lambda step: 10 * randn(3, 4, 4, seed=step))


@failure("tidymodels/yardstick#634", *RANGE, "aten.exp", sample=1)
def factorial_of_a_large_count(cured):
    """The factorial of 200 is beyond float64, and only its logarithm is wanted. Take
    `lgamma`.
    """
    torch.manual_seed(0)
    model = Chain(rate=nn.Linear(4, 1))

    def loss(model, batch):
        x, count = batch
        log_rate = model(x)
        if cured:
            factorial = torch.lgamma(count + 1)
        else:
            factorial = torch.log(torch.exp(torch.lgamma(count + 1)))  # <-
        return (log_rate.exp() - count * log_rate + factorial).mean()

    def batch(step):
        return randn(3, 4, seed=step), torch.tensor([[3.0], [200.0], [7.0]])

    return Run(model, loss, batch)


@failure("ryanchankh/mcr2#1", *UNDEFINED, "aten.scalar_tensor")
def volume_of_features(cured):
    """The matrix whose logarithm of a determinant is taken has a negative one. Make it
    positive definite: add the product to the identity.
    """
    torch.manual_seed(0)
    model = Chain(features=nn.Linear(4, 3))

    def loss(model, x):
        z = 40 * model(x)
        identity = torch.eye(3)
        matrix = identity + z.T @ z if cured else identity - z.T @ z
        return -torch.logdet(matrix)  # <-

    return Run(model, loss, lambda step: randn(8, 4, seed=step))


@failure("ethanhe42/KL-Loss#4", *RANGE, "aten.exp", sample=1)
def weight_of_a_sure_box(cured):
    """The error of a box is weighted by exp(-a) with a learned a, which is -100 for one
    box. Bound a.
    """
    torch.manual_seed(0)
    model = Chain(box=nn.Linear(2, 2))
    model.box.weight.data.copy_(torch.tensor([[0.5, 0.0], [0.0, 1.0]]))

    def loss(model, x):
        error, a = model(x).unbind(-1)
        a = a.clamp(-10, 10) if cured else a
        return (torch.exp(-a) * F.smooth_l1_loss(error, 0 * error) + a / 2).mean()  # <-

    def batch(step):
        return torch.tensor([[1.0, 0.5], [0.5, -100.0], [1.0, 0.0]])

    return Run(model, loss, batch)


@failure(
    "ProGamerGov/neural-style-pt#97", *RANGE, "aten.mm|aten.bmm|aten.addmm", "style"
)
def gram_matrix_in_half(cured):
    """The Gram matrix of features of about 10 sums 4096 of their products, which is
    beyond float16. Divide before the product.
    """

    def style(self, x):
        features = x.flatten(1)
        if cured:
            features = features / features.shape[1] ** 0.5
            return features @ features.T
        return (features @ features.T) / features.shape[1]  # <-

    torch.manual_seed(0)
    model = Chain(conv=nn.Conv2d(1, 3, 1), style=Fn(style)).half()

    def loss(model, x):
        return model(x).float().mean()

    return Run(model, loss, lambda step: 10 * randn(1, 64, 64, seed=step).half())


@failure(
    "NVIDIA-NeMo/Automodel#3175",
    "weights",
    "bad weights",
    module="embedding",
    tensor="embedding.weight",
)
def row_of_a_rare_token(cured):
    """A checkpoint holds one row of an embedding that was never trained and is not
    finite; it fails where that token first appears. Repair the row.
    """
    torch.manual_seed(0)
    embedding = nn.Embedding(16, 4)
    if not cured:
        embedding.weight.data[11] = float("nan")
    model = Chain(embedding=embedding, head=nn.Linear(4, 2))

    def loss(model, ids):
        return model(ids).pow(2).mean()

    def batch(step):
        return torch.tensor([[1, 2, 3], [4, 5, 11], [6, 7, 8]])

    return Run(model, loss, batch)


@failure("tracel-ai/burn#5584", *UNDERFLOW, "aten.div", sample=0)
def cosine_with_a_product_of_epsilons(cured):
    """Norms of 0 are clamped to 1e-30 each, and the product of both underflows. Clamp
    to a number whose square the dtype holds.
    """
    torch.manual_seed(0)
    model = Chain(encoder=nn.Linear(4, 4, bias=False))

    def loss(model, batch):
        one, other = batch
        x, y = model(one), model(other)
        norms = [
            each.square().sum(-1).clamp(min=1e-8 if cured else 1e-30) for each in (x, y)
        ]
        dot = (x * y).sum(-1)
        return (dot / (norms[0] * norms[1])).mean()  # <-

    def batch(step):
        one, other = randn(4, 4, seed=step), randn(4, 4, seed=step + 1)
        one[0] = other[0] = 0
        return one, other

    return Run(model, loss, batch)


@failure("NVIDIA-NeMo/Automodel#3850", "backward", "singular gradient", "aten.div")
def temperature_over_masked_negatives(cured):
    """Padded negatives are -inf before they are divided by a learned temperature, whose
    derivative is 0 times -inf. Divide first, and mask then.
    """
    torch.manual_seed(0)
    model = Chain(encoder=nn.Linear(4, 4))
    model.temperature = nn.Parameter(torch.tensor(0.1))

    def loss(model, x):
        scores = model.encoder(x) @ x.T
        padded = torch.arange(5) >= 4
        if cured:
            scores = (scores / model.temperature).masked_fill(padded, float("-inf"))
        else:
            scores = scores.masked_fill(padded, float("-inf"))
            scores = scores / model.temperature  # <-
        return F.cross_entropy(scores, torch.arange(5) % 4)

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("openai/CLIP#46", *RANGE, "aten.exp")
def logit_scale_that_is_not_clipped(cured):
    """The learned logarithm of the logits' scale has grown, and its exponential is
    beyond float16. Clip it to the logarithm of 100.
    """
    torch.manual_seed(0)
    model = Chain(image=nn.Linear(4, 4, bias=False)).half()
    model.logit_scale = nn.Parameter(torch.tensor(12.0, dtype=torch.half))

    def loss(model, x):
        features = F.normalize(model.image(x).float(), dim=-1).half()
        log_scale = model.logit_scale
        log_scale = log_scale.clamp(max=4.6) if cured else log_scale
        logits = log_scale.exp() * features @ features.T  # <-
        return F.cross_entropy(logits.float(), torch.arange(4))

    return Run(model, loss, lambda step: randn(4, 4, seed=step).half())
