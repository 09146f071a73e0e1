"""What a hooked module costs the host, beside the scan: a chain of small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import NO_ORIGINAL, Original, Results, progress, require_kernels, silence
from timing import DEVICE, ON_GPU, QUICK, host_time, race, ratio, summary, synchronize
from torch import nn

from overflow_fast import DebugUnderflowOverflow

LENGTH = 20 if QUICK else 200 if ON_GPU else 1000  # below the depth of a GPU's queue
COLUMNS = [
    "chain of",
    "watched by",
    "ns a module",
    "added ns",
    "added / empty hook's",
    "host waits in 10 steps",
    "bytes added",
]
NOTES = (
    f"A chain of {LENGTH} modules and a tensor of 64 bytes, forward without gradients: "
    "the host's time. `added` is over the bare chain; the goal is 1.0 empty hook on "
    "the CPU, and under 5 us on a GPU, where a launch is part of it."
)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Linear(16, 16)": lambda: nn.Linear(16, 16, bias=False),
}
# Names and arguments of our detectors. On the CPU nothing is deferred.
OURS: dict[str, dict[str, Any]] = {"ours": {}, "ours, memo=False": {"memo": False}}
if ON_GPU:
    OURS = {f"ours, {sync}": {"sync": sync} for sync in ("step", "lagged", "frame")}


def empty(module: nn.Module, inputs: object, output: object) -> None:
    pass


def chain(make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(LENGTH))).to(DEVICE)


def watched(make: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    names = ["nothing", "an empty Python hook", *OURS]
    models = {name: chain(make) for name in names}
    for module in models["an empty Python hook"].modules():
        module.register_forward_hook(empty)
    for name, arguments in OURS.items():
        DebugUnderflowOverflow(models[name], **arguments)
    if Original is not None:
        models["the original"] = chain(make)
        Original(models["the original"])
    return models


@torch.no_grad()
def host_cost(kind: str) -> list[dict[str, Any]]:
    models, x = watched(KINDS[kind]), torch.ones(1, 16, device=DEVICE)
    with silence():
        for model in models.values():
            model.load_state_dict(models["nothing"].state_dict())
            assert torch.equal(model(x), models["nothing"](x))
        runs = {name: lambda m=model: m(x) for name, model in models.items()}
        most = 1 if ON_GPU else 2**62  # a second call would fill the queue
        times = race(runs, 25, timer=host_time, max_calls=most)
    bare = summary(times["nothing"])["median"]
    hook = summary(times["an empty Python hook"])["median"] - bare
    rows = []
    for name, seconds in times.items():
        spread = summary(seconds)
        added = spread["median"] - bare
        row = {"chain of": kind, "watched by": name, "seconds": spread}
        row["ns a module"] = f"{spread['median'] / LENGTH * 1e9:.0f}"
        row["added ns"] = f"{added / LENGTH * 1e9:.0f}"
        row["added / empty hook's"] = f"{added / hook:.2f}"
        rows.append(row | {"over bare": ratio(times, name, "nothing")})
    return rows


def waits_and_memory(sync: str) -> dict[str, Any]:
    """How often the host waits in a training step, and the memory of the slots."""
    model, x = chain(KINDS["Linear(16, 16)"]), torch.ones(4, 16, device=DEVICE)

    def steps(count: int) -> None:
        for _ in range(count):
            model(x).sum().backward()

    steps(1)
    synchronize()
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    detector = DebugUnderflowOverflow(model, sync=sync)
    steps(3)
    detector.check()
    row: dict[str, Any] = {"chain of": "Linear, with backward"}
    row["watched by"] = f"ours, {sync}"
    if ON_GPU:
        row["bytes added"] = torch.cuda.memory_allocated() - before
    count = detector.recorder.num_syncs
    steps(10)
    row["host waits in 10 steps"] = detector.recorder.num_syncs - count
    detector.check()
    return row


def main() -> None:
    require_kernels()
    results = Results("hooks", "Cost of a hooked module", NOTES, COLUMNS)
    if Original is None:
        results.lacks(NO_ORIGINAL)
    for kind in KINDS:
        progress(kind)
        results.add(*host_cost(kind))
    for row in results.rows:
        if row["chain of"] != "Identity" and row["watched by"] in OURS:
            results.headline(f"{row['watched by']}: {row['added ns']} ns a module")
    for sync in ("step", "lagged"):
        progress(f"waits, {sync}")
        results.add(waits_and_memory(sync))
        waits = results.rows[-1]["host waits in 10 steps"]
        results.headline(f"{sync}: {waits} waits of the host in 10 steps")
    results.finish()


if __name__ == "__main__":
    main()
