"""How much slower a training step becomes on a GPU under ours and the original."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers as hf
from common import original, progress, ratio
from timing import DEVICE, DRY, quartiles, save, wall_time
from torch import nn

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

ROUNDS = 2 if DRY else 7


def gpt2_medium() -> tuple[nn.Module, tuple[int, int]]:
    config = hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    return hf.GPT2LMHeadModel(config), (16, 1024)


def llama_1b() -> tuple[nn.Module, tuple[int, int]]:
    config = hf.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config), (8, 2048)


def small() -> tuple[nn.Module, tuple[int, int]]:
    config = hf.GPT2Config(
        n_embd=256, n_layer=6, n_head=4, vocab_size=8192, use_cache=False
    )
    return hf.GPT2LMHeadModel(config), (4, 64)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "small GPT-2, launch-bound": (small, 20),
    "GPT-2 medium": (gpt2_medium, 3),
    "Llama, 1B": (llama_1b, 2),
}


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int]
) -> Callable[[], object]:
    ids = torch.randint(0, model.config.vocab_size, shape, device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str) -> dict[str, Any]:
    make, calls = MODELS[name]
    torch.manual_seed(0)
    model, shape = make()
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = step_of(model, optimizer, shape)
    around: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": contextlib.nullcontext,
        "step": lambda: DebugUnderflowOverflow(model),
        "lagged": lambda: DebugUnderflowOverflow(model, sync="lagged"),
        "guard": lambda: OverflowGuard(model, optimizer),
        "guard, lagged": lambda: OverflowGuard(model, optimizer, "skip", sync="lagged"),
        "guard, gradients": lambda: OverflowGuard(
            model, optimizer, watch=("gradients",)
        ),
        "original": lambda: original(model),
    }
    times: dict[str, list[float]] = {kind: [] for kind in around}
    peaks: dict[str, int] = {}
    for round_number in range(ROUNDS):
        for kind, enter in around.items():
            if kind == "original" and round_number > 2:
                continue  # a factor, not percents: three rounds are enough
            if not DRY:
                torch.cuda.reset_peak_memory_stats()
            with enter():
                step()
                times[kind].append(wall_time(step, 1 if DRY else calls))
            if not DRY:
                peaks[kind] = torch.cuda.max_memory_allocated()
    row: dict[str, Any] = {"kind": "training step", "model": name, "batch": shape}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    for kind, seconds in times.items():
        few = {k: v[: len(seconds)] for k, v in times.items()}
        row[kind] = {
            "seconds": quartiles(seconds),
            "over_bare": ratio(few, kind, "bare"),
            "peak_bytes": peaks.get(kind),
        }
    assert all(math.isfinite(s) for seconds in times.values() for s in seconds)
    return row


def main() -> None:
    hf.logging.set_verbosity_error()
    rows = []
    for name in list(MODELS)[: 1 if DRY else None]:
        progress(name)
        rows.append(measure(name))
        gc.collect()
        if not DRY:
            torch.cuda.empty_cache()
    save("models", rows)


if __name__ == "__main__":
    main()
