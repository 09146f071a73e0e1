"""Batches and checkpoints that are non-finite before the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

DATA = ("data", "bad data")


class Two(nn.Module):
    """Two inputs, each through its own layer."""

    def __init__(self):
        super().__init__()
        self.wsi, self.omic = nn.Linear(4, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, wsi, omic):
        return self.head(torch.tanh(self.wsi(wsi)) + torch.tanh(self.omic(omic)))


@failure("prs-eth/Marigold#111", *DATA, tensor="image|input", sample=1)
def picture_with_a_hole(cured):
    """One picture holds a pixel without a value. Fill or drop such samples where the
    batch is made.
    """
    torch.manual_seed(0)
    model = Chain(
        conv=nn.Conv2d(1, 2, 3),
        norm=nn.GroupNorm(1, 2),
        flat=nn.Flatten(),
        head=nn.Linear(8, 1),
    )

    def loss(model, batch):
        return (model(batch["image"]).squeeze(1) - batch["depth"]).pow(2).mean()

    def batch(step):
        image = randn(3, 1, 4, 4, seed=step)
        if step == 1 and not cured:
            image[1, 0, 2, 2] = torch.nan
        return {"image": image, "depth": torch.ones(3)}

    return Run(model, loss, batch, 3)


@failure("Innse/MOTCat#8", *DATA, tensor="omic", sample=2)
def omics_of_a_missing_patient(cured):
    """One patient has no measurements, and the table holds nan there. Fill or drop such
    rows where the batch is made.
    """
    torch.manual_seed(1)

    def loss(model, batch):
        risk = model(wsi=batch["wsi"], omic=batch["omic"]).squeeze(1)
        return (risk * batch["event"]).mean()

    def batch(step):
        omic = randn(4, 3, seed=step)
        omic[2] = 0.0 if cured else torch.nan
        return {"wsi": randn(4, 4, seed=step), "omic": omic, "event": torch.ones(4)}

    return Run(Two(), loss, batch)


@failure(
    "KimythAnly/AGAIN-VC#5, kitzeslab/opensoundscape#794",
    *DATA,
    tensor="mel|input",
    sample=0,
)
def logarithm_of_silence(cured):
    """A spectrogram of silence holds 0, whose logarithm is -inf. Add a small number
    before the logarithm, in the code that makes the features.
    """
    torch.manual_seed(2)
    model = Chain(
        conv=nn.Conv1d(4, 4, 3, padding=1), act=nn.ReLU(), head=nn.Conv1d(4, 4, 1)
    )

    def loss(model, batch):
        return F.l1_loss(model(batch["mel"]), batch["target"])

    def batch(step):
        power = randn(2, 4, 8, seed=step).square()
        power[0, :, 5:] = 0
        mel = (power + (1e-5 if cured else 0)).log()
        return {"mel": mel, "target": randn(2, 4, 8, seed=step + 9)}

    return Run(model, loss, batch)


@failure("circleAhn/TESLA-tf#1", *DATA, tensor="batch[0]|input")
def sensor_that_was_off(cured):
    """The series holds nan for the hours in which a sensor was off. Interpolate or mask
    them where the batch is made.
    """
    torch.manual_seed(3)
    model = Chain(
        rnn=Fn(
            lambda self, x: self.gru(x)[0][:, -1], gru=nn.GRU(2, 4, batch_first=True)
        ),
        head=nn.Linear(4, 1),
    )

    def batch(step):
        series = randn(4, 6, 2, seed=step)
        if not cured:
            series[1:3, 2, 0] = torch.nan
        return series, randn(4, 1, seed=step)

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).abs().mean()

    return Run(model, loss, batch)


@failure("ratschlab/DeepSpot#9", *DATA, tensor="batch[1]", sample=3)
def normalized_counts_of_an_empty_cell(cured):
    """A row of counts is divided by its sum, which is 0 for an empty cell. Divide by at
    least 1, or filter such cells.
    """
    torch.manual_seed(4)
    model = Chain(phi=nn.Linear(3, 8), act=nn.GELU(), rho=nn.Linear(8, 5))

    def batch(step):
        counts = torch.arange(20.0).view(4, 5)
        counts[3] = 0
        total = counts.sum(1, keepdim=True)
        return randn(4, 3, seed=step), counts / (total.clamp(min=1) if cured else total)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return Run(model, loss, batch)


@failure(
    "huggingface/transformers#34234, macwiatrak/Bacformer#33",
    "weights",
    "bad weights",
    module="layers.1",
    tensor="layers.1.freqs_cos",
)
def table_that_loading_left_out(cured):
    """A table that is computed in the constructor was not filled when the weights were
    loaded. Compute it after loading.
    """

    def rotate(self, x):
        return x + self.weight * x * self.freqs_cos[: x.shape[1], None]

    def layer(value):
        return Fn(
            rotate,
            weight=nn.Parameter(torch.ones(4)),
            freqs_cos=torch.full((9,), value),
        )

    torch.manual_seed(5)
    layers = nn.Sequential(layer(1.0), layer(1.0 if cured else torch.inf), layer(1.0))
    model = Chain(embed=nn.Linear(4, 4), layers=layers, head=nn.Linear(4, 1))
    return Run(model, square, lambda step: randn(2, 5, 4, seed=step))


@failure(
    "chengtan9907/OpenSTL#137",
    "forward",
    "range overflow",
    "aten.pow",
    "anomaly",
    sample=2,
)
def fill_value_of_a_file(cured):
    """A file's number for what is missing, 9.97e36, is read like any other, and its
    square overflows. Replace it as the file is read.
    """
    torch.manual_seed(0)

    def anomaly(self, x):
        return x.pow(2).mean(-1, keepdim=True).sqrt()  # <-

    model = Chain(anomaly=Fn(anomaly), head=nn.Linear(1, 1))

    def batch(step):
        field = randn(4, 6, seed=step)
        if not cured:
            field[2, 3] = 9.969209968386869e36
        return field

    return Run(model, lambda m, x: m(x).mean(), batch)
