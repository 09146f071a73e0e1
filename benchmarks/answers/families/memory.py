"""Memory that nobody has written to, and memory that changed behind torch's back."""

from __future__ import annotations

import ctypes
import itertools
import types

import torch
import torch.nn.functional as F
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

UNWRITTEN = dict(kind="unwritten")
TRANSIENT = dict(kind="transient")


def garbage(tensor, cured):
    """Leaves in memory what another program may have left there, unseen by torch."""
    if not cured:
        ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
    return tensor


def strike(tensor, place=0):
    """Sets the exponent of a float32 to ones, unseen by torch, as a fault does."""
    word = ctypes.c_uint32.from_address(tensor.data_ptr() + 4 * place)
    word.value |= 0x7F800000


MACHINE = types.ModuleType("machine")  # its faults: no replay restores what it counts
MACHINE.keys, MACHINE.calls = itertools.count(), {}


def once(when=0):
    """A function that is true in one call alone, also where steps are run again."""
    key = next(MACHINE.keys)

    def is_now():
        calls = MACHINE.calls
        calls[key] = calls.get(key, 0) + 1
        return calls[key] == when + 1

    return is_now


@failure(
    "deepbeepmeep/Wan2GP#1628, vllm-project/vllm#31928",
    *("forward", "not reproducible", "aten.empty", "decoder.cache"),
    **UNWRITTEN,
)
def cache_behind_the_mask(cured):
    """A cache of `torch.empty` holds anything where no token has been written, and
    masked rows still read it. Use `torch.zeros`.
    """

    def cache(self, x):
        keys = (torch.zeros if cured else torch.empty)(3, 8, 4)  # <-
        garbage(keys, cured)
        keys[:, :5] = x
        bias = torch.zeros(8)
        bias[5:] = -torch.inf
        return (x @ keys.transpose(1, 2) + bias).softmax(-1) @ keys.nan_to_num(0.0)

    torch.manual_seed(0)
    decoder = Chain(project=nn.Linear(4, 4), cache=Fn(cache))
    model = Chain(decoder=decoder, head=nn.Linear(4, 2))
    return Run(model, square, lambda step: randn(3, 5, 4, seed=step))


@failure(
    "NVIDIA/apex#1322",
    *("forward", "not reproducible", "aten.empty_like", "fmha"),
    **UNWRITTEN,
)
def padded_rows_of_an_output(cured):
    """A kernel leaves the padded rows of its `torch.empty_like` output unwritten. Use
    `torch.zeros_like`, or write all rows.
    """

    def fmha(self, x):
        output = torch.zeros_like(x) if cured else torch.empty_like(x)  # <-
        garbage(output, cured)
        output[:4] = x[:4].softmax(-1)
        return output

    torch.manual_seed(1)
    model = Chain(embed=nn.Linear(4, 4), fmha=Fn(fmha), out=nn.Linear(4, 2))
    return Run(model, square, lambda step: randn(6, 4, seed=step))


@failure(
    "gordicaleksa/pytorch-GAT#11",
    *("weights", "bad weights", "", "layers.1"),
    tensor="layers.1.attention",
)
def parameter_of_raw_memory(cured):
    """A parameter was made of `torch.empty` and never initialized. Initialize it."""

    def attend(self, x):
        return x + (x @ self.attention).tanh() * x

    def layer(is_raw):
        values = torch.randn(4, 1)
        return Fn(attend, attention=nn.Parameter(garbage(values, cured or not is_raw)))

    torch.manual_seed(2)
    layers = nn.Sequential(layer(False), layer(True), layer(False))
    model = Chain(layers=layers, head=nn.Linear(4, 2))
    return Run(model, square, lambda step: randn(3, 4, seed=step))


@failure(
    "huggingface/transformers#45902, pytorch/torchtitan#4783",
    *("weights", "bad weights", "", "rotary"),
    tensor="rotary.inv_freq",
)
def buffer_that_no_checkpoint_holds(cured):
    """A non-persistent buffer is not in the checkpoint, and loading through the meta
    device left its memory as it was. Compute it after loading.
    """

    def rotary(self, x):
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return x * angle.cos()

    torch.manual_seed(3)
    frequencies = garbage(torch.ones(4), cured)
    model = Chain(
        embed=nn.Linear(4, 4),
        rotary=Fn(rotary, inv_freq=frequencies),
        head=nn.Linear(4, 1),
    )
    return Run(model, square, lambda step: randn(2, 5, 4, seed=step))


def kernels(is_now, change):
    """A module that now and then does what a race or a fault does to its output."""

    def forward(self, x):
        output = self.inner(x)
        if is_now():
            change(output.detach())
        return output

    return forward


@failure(
    "mrphys/tensorflow-nufft#20",
    *("forward", "not reproducible", "", "layers.1"),
    **TRANSIENT,
)
def kernel_that_fails_once(cured):
    """The same step is finite when it is run again: a race, or hardware. Run the step
    on another machine; update drivers and kernels.
    """
    torch.manual_seed(4)
    is_now = once(1)
    faulty = Fn(kernels(lambda: is_now() and not cured, strike), inner=nn.Linear(4, 4))
    model = Chain(
        layers=nn.Sequential(nn.Linear(4, 4), faulty, nn.Tanh()), head=nn.Linear(4, 1)
    )
    return Run(model, square, lambda step: randn(3, 4, seed=step), 3)


@failure(
    "paiml/aprender#2251",
    *("forward", "not reproducible", "", "scores"),
    **TRANSIENT,
)
def scores_that_are_read_while_written(cured):
    """The same step is finite when it is run again: the scores were read by one stream
    while another one wrote them. Synchronize the streams.
    """
    torch.manual_seed(5)
    is_now = once()
    faulty = Fn(
        kernels(lambda: is_now() and not cured, lambda output: garbage(output, False)),
        inner=nn.Linear(4, 4),
    )
    model = Chain(
        norm=nn.LayerNorm(4),
        scores=faulty,
        softmax=nn.Softmax(-1),
        head=nn.Linear(4, 1),
    )
    return Run(model, square, lambda step: randn(3, 4, seed=step))


@failure(
    "pytorch/pytorch#193633, huggingface/transformers#48205",
    *("backward", "not reproducible", "aten.empty", "experts"),
    **UNWRITTEN,
)
def rows_behind_the_last_expert(cured):
    """The rows behind the last expert's tokens are never written, and backward
    multiplies them by a gradient of 0. Use `torch.zeros`.
    """

    def experts(self, x):
        up = (torch.zeros if cured else torch.empty)(8, 4)  # <-
        garbage(up, cured)
        up[:6] = self.up(x)
        gate = self.gate(F.pad(x, (0, 0, 0, 2)))
        return (F.silu(gate) * up)[:6]

    torch.manual_seed(6)
    experts = Fn(experts, up=nn.Linear(4, 4), gate=nn.Linear(4, 4))
    model = Chain(embed=nn.Linear(4, 4), experts=experts, head=nn.Linear(4, 1))
    return Run(model, square, lambda step: randn(6, 4, seed=step))


@failure(
    "pvjosue/pytorch_convNd#4, karpathy/nanochat#686",
    *("weights", "bad weights", "", "conv"),
    tensor="conv.bias",
)
def bias_of_raw_memory(cured):
    """A bias was made of `torch.empty` and only partly initialized. Initialize all of
    it.
    """
    torch.manual_seed(7)
    model = Chain(
        conv=nn.Conv1d(1, 3, 3), act=nn.GELU(), flat=nn.Flatten(), head=nn.Linear(12, 1)
    )
    garbage(model.conv.bias.data[2:], cured)
    return Run(model, square, lambda step: randn(2, 1, 6, seed=step))


@failure(
    "huggingface/transformers#45621",
    *("backward", "not reproducible", "", "scale"),
    tensor="scale.weight",
    **TRANSIENT,
)
def gradient_that_is_struck_once(cured):
    """Only one gradient is bad, and not when the step is run again: memory or hardware.
    Run the step on another machine.
    """
    torch.manual_seed(8)
    model = Chain(
        body=nn.Linear(4, 4), scale=nn.Linear(4, 4, bias=False), head=nn.Linear(4, 1)
    )
    is_now = once(1)

    def fault(gradient):
        if is_now() and not cured:
            strike(gradient, 5)

    model.scale.weight.register_hook(fault)
    return Run(model, square, lambda step: randn(3, 4, seed=step), 3)
