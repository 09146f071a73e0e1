"""Values that the dtype has lost before: probabilities of 0 and 1, and their logs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn

UNDERFLOW, ROUNDING = ("forward", "underflow"), ("forward", "rounding")
RANGE = ("forward", "range overflow")


def spread(value=150.0):
    """A linear layer whose outputs are as far apart as a value."""
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.copy_(torch.tensor([-value, 0.0, value]))
    return layer


@failure("allenai/allennlp#2797", *UNDERFLOW, "aten.log")
def logarithm_of_a_softmax(cured):
    """A probability below 1e-45 becomes 0, and its logarithm is -inf. Take
    `log_softmax`, which never forms the probability.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), head=spread())

    def loss(model, x):
        logits = model(x)
        if cured:
            return -logits.log_softmax(-1).mean()
        label_probs = F.softmax(logits, dim=-1)
        return -torch.log(label_probs).mean()  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("deepspeedai/DeepSpeedExamples#501", *UNDERFLOW, "aten.log")
def logarithm_of_a_sigmoid(cured):
    """A reward that is far below the other one has a probability of 0. Take
    `logsigmoid`.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), head=spread())

    def loss(model, x):
        rewards = model(x)
        margin = rewards[:, 0] - rewards[:, 2]
        if cured:
            return -F.logsigmoid(margin).mean()
        return -torch.log(torch.sigmoid(margin)).mean()  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("graytowne/caser_pytorch#2", *ROUNDING, "aten.log")
def logarithm_of_a_sigmoid_of_one(cured):
    """A sigmoid above 17 is 1 in float32, and 1 minus it is 0. Take `logsigmoid` of the
    negative logit.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), head=spread(25.0))

    def loss(model, x):
        negative = model(x)
        if cured:
            return -F.logsigmoid(-negative).mean()
        return -torch.mean(torch.log(1 - torch.sigmoid(negative)))  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("rlworkgroup/garage#1174", *ROUNDING, "aten.log")
def density_of_a_squashed_action(cured):
    """`tanh` of 12 is 1 in float32, and 1 - tanh(x)^2 is 0. Write the logarithm as
    2 (log 2 - x - softplus(-2 x)).
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), mean=spread(12.0))

    def loss(model, x):
        raw = model(x)
        if cured:
            return (2 * (0.6931471805599453 - raw - F.softplus(-2 * raw))).mean()
        return torch.log(1 - torch.tanh(raw).pow(2)).mean()  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("tskit-dev/tsdate#171", *UNDERFLOW, "aten.log", "mixture")
def likelihood_of_a_mixture(cured):
    """The densities of all components underflow, and the logarithm of their sum is
    -inf. Take `logsumexp` of the logarithms.
    """

    def mixture(self, x):
        logs = -((x[:, None] - self.centers) ** 2).sum(-1)
        if cured:
            return torch.logsumexp(logs, 1)
        return torch.log(torch.exp(logs).sum(1))  # <-

    torch.manual_seed(0)
    mixture = Fn(mixture, centers=nn.Parameter(8 + randn(3, 4)))
    model = Chain(body=nn.Linear(4, 4), mixture=mixture)
    return Run(model, lambda m, x: -m(x).mean(), lambda step: randn(5, 4, seed=step))


@failure("mlberkeley/scae-pytorch#4", *UNDERFLOW, "aten.log", sample=3)
def scale_of_a_normal_distribution(cured):
    """A scale of exp(-150) is 0 in float32, and its logarithm is -inf. Bound the scale
    below.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(1, 1))
    model.body.weight.data.fill_(-150.0)
    model.body.bias.data.zero_()

    def loss(model, x):
        scale = model(x).exp()
        scale = scale.clamp(min=1e-3) if cured else scale
        normal = torch.distributions.Normal(0 * scale, scale, validate_args=False)
        return -normal.log_prob(scale.detach()).mean()  # <-

    def batch(step):
        return torch.tensor([[0.01], [0.0], [-0.01], [1.0]])

    return Run(model, loss, batch)


@failure("keras-team/keras#8524", *RANGE, "aten.cosh", sample=1)
def cosh_of_a_large_error(cured):
    """The loss grows like the error, and cosh within it like its exponential. Write
    log cosh x as |x| + log1p(exp(-2 |x|)) - log 2.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 1))

    def loss(model, batch):
        x, target = batch
        error = model(x) - target
        if cured:
            size = error.abs()
            return (
                size + torch.log1p(torch.exp(-2 * size))
            ).mean() - 0.6931471805599453
        return torch.log(torch.cosh(error)).mean()  # <-

    def batch(step):
        target = torch.tensor([[0.5], [120.0], [-0.5], [1.0]])
        return randn(4, 4, seed=step), target

    return Run(model, loss, batch)


@failure("cornellius-gp/gpytorch#775", *RANGE, "aten.exp", "inverse", sample=2)
def inverse_of_softplus(cured):
    """exp(100) overflows, and the logarithm after it would be about 100. Write
    log(exp(x) - 1) as x + log(-expm1(-x)).
    """

    def inverse(self, x):
        x = x.abs() + 0.1
        if cured:
            return x + torch.log(-torch.expm1(-x))
        return torch.log(torch.exp(x) - 1)  # <-

    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), inverse=Fn(inverse))

    def batch(step):
        x = randn(4, 4, seed=step)
        x[2] *= 500
        return x

    return Run(model, lambda m, x: m(x).mean(), batch)


@failure("lightonai/pylate#240", *UNDERFLOW, "aten.div", "scores", sample=2)
def epsilon_of_equal_scores_in_half(cured):
    """An epsilon of 1e-8 is 0 in float16, and a group of equal scores is divided by it.
    Give an epsilon that float16 holds.
    """

    def scores(self, x):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        width = high - low + (1e-4 if cured else 1e-8)
        return (x - low) / width  # <-

    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4, bias=False), scores=Fn(scores)).half()

    def batch(step):
        x = randn(4, 4, seed=step)
        x[2] = 0
        return x.half()

    return Run(model, lambda m, x: m(x).float().mean(), batch)


@failure(
    "Lightning-AI/litgpt#401, suno-ai/bark#270", "forward", "undefined", "aten.div"
)
def temperature_of_zero(cured):
    """Logits are divided by a temperature of 0. Take the largest, or a small number."""
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4))
    temperature = 1e-3 if cured else 0.0

    def loss(model, x):
        return (model(x) / temperature).softmax(-1).pow(2).mean()  # <-

    return Run(model, loss, lambda step: randn(5, 4, seed=step))


@failure("zoomin-lee/SemCity#9", "forward", "undefined", "aten.nll_loss_forward")
def class_weights_of_zero(cured):
    """The class weights of all labels are 0, and the mean divides by their sum. Divide
    the sum of the losses by at least a small number.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 3))
    weight = torch.tensor([1.0, 1.0, 0.0])

    def loss(model, batch):
        x, labels = batch
        logits = model(x)
        if cured:
            total = F.cross_entropy(logits, labels, weight=weight, reduction="sum")
            return total / weight[labels].sum().clamp(min=1e-8)
        return F.cross_entropy(logits, labels, weight=weight)  # <-

    return Run(
        model,
        loss,
        lambda step: (randn(4, 4, seed=step), torch.full((4,), 2)),
    )


@failure("tracel-ai/burn#4697", "forward", "undefined", "aten.sub", "attention")
def softmax_less_its_maximum_of_a_masked_row(cured):
    """The maximum of a row that is masked as a whole is -inf, and -inf - -inf is nan.
    Mask with a large negative number.
    """

    def attention(self, x):
        scores = x @ x.mT
        hidden = torch.arange(4) >= torch.tensor([4, 2, 0])[:, None, None]
        scores = scores.masked_fill(hidden, -1e9 if cured else float("-inf"))
        weight = (scores - scores.amax(-1, keepdim=True)).exp()  # <-
        return weight / weight.sum(-1, keepdim=True) @ x

    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 4), attention=Fn(attention))
    return Run(model, lambda m, x: m(x).mean(), lambda step: randn(3, 4, 4, seed=step))


@failure(
    "pytorch/pytorch#23306",
    "optimizer",
    "bad setting",
    "aten.add",
)
def schedule_that_gives_nan(cured):
    """A schedule divides by a number of steps that is 0, for one step. Check what it
    returns: that step would make all weights nan.
    """
    torch.manual_seed(0)
    model = Chain(body=nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    rates = [0.01, 0.01 if cured else float("nan"), 0.01, 0.01]

    def set_rate(step):
        optimizer.param_groups[0]["lr"] = rates[step + 1]

    def loss(model, x):
        return model(x).pow(2).mean()

    return Run(
        *(model, loss, lambda step: randn(4, 4, seed=step), 3, optimizer),
        after_step=set_rate,
    )
