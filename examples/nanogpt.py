"""A small GPT on the characters of this file, in float16, in a loop of its own.

python examples/nanogpt.py            # with a planted overflow
python examples/nanogpt.py --healthy  # 10 steps without it

The planted fault initializes one attention with weights so large that its scores
overflow float16. The report names the line of the product, and what was tried.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

LENGTH, WIDTH, HEADS, LAYERS, STEPS = 32, 64, 4, 2, 10


class Attention(nn.Module):
    """Causal attention, written out."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size, length, _ = x.shape
        q, k, v = self.qkv(x).view(size, length, HEADS, -1).transpose(1, 2).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(size, length, WIDTH))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a normalization."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model of characters."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = GPT(vocabulary=256).half()
    if not options.healthy:
        model.blocks[1].attn.qkv.weight.data.mul_(300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    guard = OverflowGuard(model, optimizer)
    for step in range(STEPS):
        begins = torch.randint(len(text) - LENGTH, (8,)).tolist()
        ids = torch.stack([text[i : i + LENGTH + 1] for i in begins])

        def loss_of(ids=ids):
            logits = model(ids[:, :-1]).float()
            return nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten()
            )

        loss = guard.run(loss_of)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    try:
        main()
    except NonFiniteError as error:
        raise SystemExit(str(error)) from None
