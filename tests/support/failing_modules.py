"""Modules that fail alone, with all kinds of state."""

import enum
import types

import torch
import torch.nn.functional as F
from torch import nn


class Mode(enum.Enum):
    SUM = "sum"


class Config:
    def __init__(self, **settings):
        vars(self).update(settings)


class Gate(nn.Module):
    """Divides 0 by 0; needs its attributes, a submodule, a buffer and a function."""

    def __init__(self, size, config, must_be_given):
        super().__init__()
        assert must_be_given
        self.config, self.mode, self.act = config, Mode.SUM, F.relu
        self.sizes, self.dtype, self.options = (size, size), torch.float32, {"eps": 0.0}
        self.project = nn.Sequential(nn.Linear(size, size), nn.GELU())
        self.register_buffer("shift", torch.full((size,), 1e4))
        self.register_buffer("cache", None)
        self.register_parameter("bias", None)

    def forward(self, x, *, mask):
        y = self.act(self.project(x) - self.shift).view(-1, *self.sizes[:1])
        total = y.sum() if self.mode is Mode.SUM else y.mean()
        return {"out": (y * mask).to(self.dtype) / (total + self.config.eps)}


class Overflows(nn.Module):
    """Overflows in float16, given by autocast."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 300.0))

    def forward(self, x):
        return x @ self.weight


class Local(nn.Module):
    """Cannot be written: it holds what is no literal."""

    def __init__(self):
        super().__init__()
        self.lock = types.SimpleNamespace(free=lambda: 0)

    def forward(self, x):
        return (x - x) / (x - x)


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x, **kwargs):
        found = self.inner(x * self.w, **kwargs)
        return found["out"] if isinstance(found, dict) else found
