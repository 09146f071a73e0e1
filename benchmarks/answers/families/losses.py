"""Losses that have no value: likelihoods, overlaps, means of nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn

UNDEFINED = ("forward", "undefined")
EMPTY = ("forward", "empty reduction")


@failure("wenet-e2e/wenet#2299, ypwhs/captcha_break#29", *UNDEFINED, "aten._ctc_loss")
def transcript_longer_than_its_audio(cured):
    """No alignment exists where a transcript has more tokens than the audio has frames,
    and its likelihood is 0. Give `zero_infinity=True`, or drop such samples.
    """
    torch.manual_seed(0)
    model = Chain(encoder=nn.Linear(4, 8), act=nn.Tanh(), head=nn.Linear(8, 6))

    def loss(model, batch):
        x, labels, lengths = batch
        scores = model(x).log_softmax(-1)
        sizes = torch.full((3,), len(x))
        return F.ctc_loss(scores, labels, sizes, lengths, zero_infinity=cured)  # <-

    def batch(step):
        labels = torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0], [5, 5, 5, 5]])
        return randn(5, 3, 4, seed=step), labels, torch.tensor([2, 2, 4])

    return Run(model, loss, batch)


@failure("Project-MONAI/MONAI#120", "forward", "undefined|empty reduction", "aten.div")
def dice_of_an_empty_mask(cured):
    """The overlap of an empty mask and an empty prediction is 0 / 0. Add a small number
    to the denominator.
    """
    torch.manual_seed(1)
    model = Chain(
        down=nn.Conv2d(1, 4, 3, padding=1), up=nn.Conv2d(4, 1, 1), act=nn.ReLU()
    )
    model.up.bias.data.fill_(-9.0)

    def loss(model, batch):
        image, mask = batch
        guess = model(image)
        common = 2 * (guess * mask).sum((1, 2, 3))
        total = guess.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + (1e-6 if cured else 0)
        return 1 - (common / total).mean()  # <-

    def batch(step):
        mask = torch.ones(3, 1, 4, 4)
        mask[2] = 0
        return randn(3, 1, 4, 4, seed=step), mask

    return Run(model, loss, batch)


@failure(
    "open-mmlab/mmdetection#3394, WongKinYiu/ScaledYOLOv4#145", *UNDEFINED, "aten.div"
)
def union_of_boxes_without_area(cured):
    """The union of two boxes without an area is 0, and the overlap is divided by it.
    Clamp the union.
    """
    torch.manual_seed(2)
    model = Chain(neck=nn.Linear(4, 8), act=nn.ReLU(), boxes=nn.Linear(8, 4))
    model.boxes.weight.data.zero_()
    model.boxes.bias.data = torch.tensor([30.0, 75.0, 30.0, 75.0])

    def loss(model, batch):
        x, target = batch
        box = model(x)
        low, high = (
            torch.max(box[:, :2], target[:, :2]),
            torch.min(box[:, 2:], target[:, 2:]),
        )
        common = (high - low).clamp(0).prod(1)
        areas = [(each[:, 2:] - each[:, :2]).prod(1) for each in (box, target)]
        union = areas[0] + areas[1] - common
        iou = common / union.clamp(min=1e-6 if cured else None, max=1e9)  # <-
        return (1 - iou).mean()

    def batch(step):
        target = torch.tensor([[10.0, 10, 50, 90], [40, 40, 40, 60], [0, 0, 99, 99]])
        return randn(3, 4, seed=step), target

    return Run(model, loss, batch)


@failure("tum-ai/number-token-loss#73", *EMPTY, "aten.mean")
def mean_of_no_number_token(cured):
    """A batch without a number token leaves nothing to average. Return 0 for it."""
    torch.manual_seed(4)
    model = Chain(embed=nn.Embedding(10, 4), head=nn.Linear(4, 10))

    def loss(model, ids):
        logits = model(ids)
        numbers = logits[ids >= 8]
        squares = (numbers.softmax(-1) * torch.arange(10.0)).sum(-1)
        if cured and not len(squares):
            return logits.mean() * 0
        return squares.mean()  # <-

    def batch(step):
        return (torch.arange(12).view(3, 4) + step) % (10 if step == 0 else 7)

    return Run(model, loss, batch, 2)


@failure("KevinMusgrave/pytorch-metric-learning#107", *EMPTY, "aten.div", "miner")
def average_over_no_triplet(cured):
    """No triplet is left to average once all are easy. Divide by at least 1."""

    def miner(self, x):
        distance = (x[:, None] - x[None]).pow(2).sum(-1)
        hinge = F.relu(self.margin - distance[0, 1:])
        count = (hinge > 0).sum()
        return hinge.sum() / (count.clamp(min=1) if cured else count)  # <-

    torch.manual_seed(5)
    model = Chain(embed=nn.Linear(3, 8), miner=Fn(miner, margin=torch.tensor(0.01)))
    return Run(model, lambda m, x: m(x), lambda step: 9 * randn(5, 3, seed=step))


@failure("rlworkgroup/garage#2129", *UNDEFINED, "aten.atanh", sample=2)
def expert_at_the_edge_of_the_action_space(cured):
    """`atanh` of 1 is inf, and an expert acts at the edge. Clamp the action to less
    than 1.
    """
    torch.manual_seed(7)
    model = Chain(policy=nn.Linear(3, 6), act=nn.Tanh(), mean=nn.Linear(6, 2))

    def loss(model, batch):
        x, action = batch
        action = action.clamp(-1 + 1e-6, 1 - 1e-6) if cured else action
        raw = torch.atanh(action)  # <-
        return ((raw - model(x)) ** 2).mean()

    def batch(step):
        action = randn(4, 2, seed=step).tanh() * 0.9
        action[2, 1] = 1.0
        return randn(4, 3, seed=step + 9), action

    return Run(model, loss, batch)


@failure(
    "callummcdougall/ARENA_3.0#369, hwalsuklee/tensorflow-mnist-VAE#4",
    *("forward", "underflow|undefined", "aten.log"),
)
def logarithm_of_a_sure_discriminator(cured):
    """A sigmoid of -200 is 0 in float32, and its logarithm -inf. Use `logsigmoid` or
    `binary_cross_entropy_with_logits`.
    """
    torch.manual_seed(9)
    critic = Chain(conv=nn.Linear(4, 4), out=nn.Linear(4, 1))
    critic.out.weight.data.fill_(0.1)
    critic.out.bias.data.fill_(-200.0)
    model = Chain(critic=critic)

    def loss(model, real):
        score = model(real)
        if cured:
            return -F.logsigmoid(score).mean()
        return -torch.log(torch.sigmoid(score)).mean()  # <-

    return Run(model, loss, lambda step: randn(4, 4, seed=step))


@failure(
    "TiankaiHang/Min-SNR-Diffusion-Training#4, kohya-ss/sd-scripts#934",
    *UNDEFINED,
    "aten.div",
    sample=2,
)
def weight_of_pure_noise(cured):
    """A schedule that ends in pure noise has a signal-to-noise ratio of 0, and the
    weight divides by it. Add 1, as predictions of the velocity do, or leave that step
    out.
    """
    torch.manual_seed(14)
    model = Chain(unet=nn.Linear(4, 4))
    alphas = torch.linspace(1, 0, 10) ** 2  # a terminal signal-to-noise ratio of zero

    def loss(model, batch):
        x, noise, t = batch
        alpha = alphas[t][:, None]
        error = (model(alpha.sqrt() * x + (1 - alpha).sqrt() * noise) - noise) ** 2
        snr = alphas[t] / (1 - alphas[t])
        weight = snr.clamp(max=5.0) / (snr + 1 if cured else snr)  # <-
        return (weight * error.mean(1)).mean()

    def batch(step):
        return (
            randn(4, 4, seed=step),
            randn(4, 4, seed=step + 9),
            torch.tensor([2, 5, 9, 7]),
        )

    return Run(model, loss, batch)


@failure("csteinmetz1/auraloss#25", *UNDEFINED, "aten.div", "")
def distortion_of_a_silent_target(cured):
    """A silent target has a power of 0, and the projection divides by it. Add a small
    number to the power.
    """
    torch.manual_seed(11)
    model = Chain(encode=nn.Conv1d(1, 4, 3, padding=1), decode=nn.Conv1d(4, 1, 1))

    def loss(model, batch):
        x, target = batch
        x = model(x).flatten(1)
        eps = 1e-8 if cured else 0.0
        power = (target**2).sum(-1, keepdim=True) + eps
        scale = (x * target).sum(-1, keepdim=True) / power  # <-
        rest = x - scale * target
        ratio = (scale * target).pow(2).sum(-1) / (rest.pow(2).sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()

    def batch(step):
        x = randn(3, 1, 12, seed=step)
        target = x.flatten(1).clone()
        target[1] = 0
        return x, target

    return Run(model, loss, batch)
