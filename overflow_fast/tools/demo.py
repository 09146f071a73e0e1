"""The demo: a run turns nan under a guard."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import nn

from ..guard.guard import OverflowGuard
from ..guard.report.report import NonFiniteError

_STEPS = 3  # two that are clean, and the bad one


class Block(nn.Module):
    """A feed-forward block whose square overflows float16 for a large sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the block's result to its input."""
        hidden = self.up(x).relu().square()
        result: torch.Tensor = x + self.down(hidden)
        return result


def train(page: str | os.PathLike[str]) -> NonFiniteError | None:
    """Trains in float16 until a sample overflows, and writes the page of the run.

    Args:
        page: The file of the page.

    Returns:
        The error that the guard has raised, or None.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), Block(32), nn.LayerNorm(32)).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with (
            tempfile.TemporaryDirectory() as folder,
            OverflowGuard(model, optimizer, record=f"{folder}/run.ofr") as guard,
        ):
            found = _loop(guard, model, optimizer)
            guard.to_html(page)
    return found


def _loop(
    guard: OverflowGuard, model: nn.Module, optimizer: torch.optim.Optimizer
) -> NonFiniteError | None:
    for step in range(_STEPS):
        x = torch.randn(4, 8, dtype=torch.float16)
        if step == _STEPS - 1:
            x[1] *= 900  # a sample far beyond the others
        loss = guard.run(lambda x=x: model(x).float().square().mean())  # type: ignore[misc]
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return error
        finally:
            optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    return None
