"""A small model with many kinds of layers, and a training run whose parts can change.

`Run` has one field for each thing that a run can do otherwise.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import overflow_fast

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 8, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.scale = 1 / math.sqrt(8)
        self.causal = True
        self.fused = False
        self.axis = -1
        self.masked = -math.inf

    def forward(self, x, keep=None):
        q, k, v = (f(x).unflatten(-1, (2, 8)) for f in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        if self.causal:
            allowed = allowed.tril()
        allowed = allowed[None, None].expand(len(x), 1, -1, -1)
        if keep is not None:
            allowed = allowed & keep[:, None, None, :]
        if self.fused:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, scale=self.scale
            )
        else:
            scores = q @ k.transpose(-1, -2) * self.scale
            scores = scores.masked_fill(~allowed, self.masked)
            y = scores.softmax(self.axis) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.0)
        self.mix = lambda x, y: x + y
        self.recomputed = False

    def branch(self, x):
        return self.drop(self.down(self.act(self.up(self.norm2(x)))))

    def forward(self, x, keep=None):
        x = x + self.attention(self.norm1(x), keep)
        if self.recomputed:
            return self.mix(x, checkpoint(self.branch, x, use_reentrant=False))
        return self.mix(x, self.branch(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.offset = 0
        self.factor = 1.0

    def forward(self, ids, keep=None):
        at = torch.arange(ids.shape[1]) + self.offset
        x = self.token(ids) + self.position(at)
        for block in self.blocks:
            x = block(x, keep)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x * self.factor)


def ids_of(step: int, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def keep_of(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    keep = torch.ones(batch, length, dtype=torch.bool)
    keep[1, -2:] = False
    return keep


def adam(parameters, **options):
    return torch.optim.AdamW(
        parameters, **{"lr": 1e-2, "betas": (0.9, 0.95), **options}
    )


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 1e-2, **options})


def cross_entropy(logits, ids, **options):
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), **options
    )


def nothing(*_: Any) -> None:
    """Changes nothing."""


@dataclass
class Run:
    """A training run, and what differs in it from the default one.

    Attributes:
        model: Changes the model; may return another one.
        optimizer: Makes the optimizer.
        loss: Computes the loss of logits and tokens.
        gradients: Called with model and step before the optimizer's step.
        batch: Changes the tokens of a step, and what to keep of them.
        before: Called with model and step before the forward.
        context: Entered around the forward.
        seed: The seed of the weights; `drawn`, of what the steps draw.
        steps: The number of steps.
        zero: Whether gradients are set to None before each step.
    """

    model: Callable[[Net], Any] = nothing
    optimizer: Callable[..., torch.optim.Optimizer] = adam
    loss: Callable[..., torch.Tensor] = cross_entropy
    gradients: Callable[[nn.Module, int], None] = nothing
    batch: Callable[..., Any] = lambda step: (ids_of(step), keep_of())
    before: Callable[[nn.Module, int], None] = nothing
    context: Callable[[], Any] = contextlib.nullcontext
    seed: int = 0
    drawn: int = 0
    steps: int = 3
    zero: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def record(self, folder: Any) -> None:
        """Trains, and records it."""
        torch.manual_seed(self.seed)
        model: Any = Net()
        model = self.model(model) or model
        optimizer = self.optimizer([p for p in model.parameters()])
        torch.manual_seed(self.drawn)
        with overflow_fast.recording(folder, model, **self.options) as recording:
            for step in range(self.steps):
                if step:
                    recording.step()
                ids, keep = self.batch(step)
                if self.zero:
                    optimizer.zero_grad()
                self.before(model, step)
                with self.context():
                    logits = model(ids, keep)
                    loss = self.loss(logits, ids)
                loss.backward()
                self.gradients(model, step)
                optimizer.step()
