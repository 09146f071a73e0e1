"""What a hooked module costs, beside the scan: a chain of modules that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import QUICK, progress, race, ratio, silence, summary, write
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

from overflow_fast import DebugUnderflowOverflow

LENGTH = 100 if QUICK else 1000
COLUMNS = ["chain of", "watched by", "ns a module", "added ns", "added / empty hook's"]
NOTES = (
    f"A chain of {LENGTH} modules and a tensor of 64 bytes, forward without gradients. "
    "`added` is over the bare chain; the goal is 1.0 empty hook."
)


def empty(module: nn.Module, inputs: object, output: object) -> None:
    pass


def chain(make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(LENGTH)))


def watched(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    models = {
        name: chain(make)
        for name in ("nothing", "an empty Python hook", "ours", "ours, memo=False")
    }
    for module in models["an empty Python hook"].modules():
        module.register_forward_hook(empty)
    DebugUnderflowOverflow(models["ours"])
    DebugUnderflowOverflow(models["ours, memo=False"], memo=False)
    models["the original"] = chain(make)
    Original(models["the original"])
    return models


def main() -> None:
    rows: list[dict[str, Any]] = []
    kinds: dict[str, Callable[[], nn.Module]] = {
        "Identity": nn.Identity,
        "Linear(16, 16)": lambda: nn.Linear(16, 16, bias=False),
    }
    x = torch.ones(1, 16)
    for kind, make in kinds.items():
        progress(kind)
        models = watched(make)
        with torch.no_grad(), silence():
            for model in models.values():
                model.load_state_dict(models["nothing"].state_dict())
                assert torch.equal(model(x), models["nothing"](x))
            times = race({n: lambda m=m: m(x) for n, m in models.items()}, 25)
        bare = summary(times["nothing"])["median"]
        hook = summary(times["an empty Python hook"])["median"] - bare
        for name in models:
            spread = summary(times[name])
            added = spread["median"] - bare
            rows.append(
                {
                    "chain of": kind,
                    "watched by": name,
                    "ns a module": f"{spread['median'] / LENGTH * 1e9:.0f}",
                    "added ns": f"{added / LENGTH * 1e9:.0f}",
                    "added / empty hook's": f"{added / hook:.2f}",
                    "over bare": ratio(times, name, "nothing"),
                    "seconds": spread,
                }
            )
    write("hooks", "Cost of a hooked module", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
