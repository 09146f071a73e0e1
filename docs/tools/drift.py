"""Trains until a sensor that drifts overflows float16, and writes the page of that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overflow_fast import NonFiniteError, OverflowGuard


class MLP(nn.Module):
    """A feed-forward layer whose activation is the square of a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu().square()
        return x + self.down(hidden)


class Net(nn.Module):
    """A few of them on top of an embedding of sensors."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.Sequential(MLP(width), nn.LayerNorm(width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        head: Tensor = self.head(x)
        return head


torch.manual_seed(1)
model = Net().half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
with OverflowGuard(model, optimizer, record="run.ofr") as guard:
    for step in range(200):
        x = (torch.randn(8, 8) * 1.07**step).half()  # a sensor that drifts
        try:
            loss = guard.run(lambda x=x: model(x).float().pow(2).mean())
            loss.backward()
            optimizer.step()
        except NonFiniteError:
            break
        optimizer.zero_grad()
    guard.to_html("run.html")
