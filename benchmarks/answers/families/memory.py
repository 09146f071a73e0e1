"""Memory that nobody has written to, and memory that changed behind torch's back."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from ..failure import Chain, Fn, Run, failure, randn, square

UNWRITTEN = dict(kind="unwritten")
TRANSIENT = dict(kind="transient")


def garbage(tensor, cured):
    """Leaves in memory what another program may have left there, unseen by torch."""
    if not cured:
        ctypes.memset(tensor.data_ptr(), 0xFF, tensor.nbytes)
    return tensor


def flip(tensor, cured, place=0):
    """Flips the highest bit of an exponent below 1.0, unseen by torch."""
    if cured:
        return
    address = tensor.data_ptr() + 4 * place
    word = ctypes.c_uint32.from_address(address)
    word.value |= 0x7F800000


@failure(
    "deepbeepmeep/Wan2GP#1628, vllm-project/vllm#31928",
    *("forward", "not reproducible", "aten.empty", "decoder.cache"),
    **UNWRITTEN,
)
def cache_behind_the_mask(cured):
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
