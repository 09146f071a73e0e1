"""Small models for comparisons of runs, and errors to plant in them."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.temperature = 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.out((scores / self.temperature).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = Attention(size)
        self.up, self.act, self.down = (
            nn.Linear(size, 4 * size),
            nn.GELU(),
            nn.Linear(4 * size, size),
        )

    def forward(self, x, *, scale=1.0):
        x = x + self.attention(self.norm(x))
        return x + self.down(self.act(self.up(x))) * scale


class Tower(nn.Module):
    """Blocks over tokens of 32 features, and a loss."""

    def __init__(self, num_blocks=3, size=32, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(8, size)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_blocks))
        self.head = nn.Linear(size, 4)

    def forward(self, x):
        x = self.drop(self.embed(x))
        for block in self.blocks:
            x = block(x, scale=1.0)
        return self.head(x).float().square().mean()


def tower(seed=0, **options):
    torch.manual_seed(seed)
    return Tower(**options)


def batch(seed=1, rows=4):
    return torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(seed))
