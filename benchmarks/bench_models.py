"""Whole models from their configs: a forward and a training step, watched and not."""

from __future__ import annotations

import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers as hf
from common import QUICK, original, plain_read, progress, race, ratio, summary, write
from torch import nn

from overflow_fast import DebugUnderflowOverflow

COLUMNS = [
    "model",
    "dtype",
    "run",
    "bare ms",
    "ours",
    "original",
    "detect_anomaly",
    "ours adds ms",
    "floor ms",
    "added / floor",
    "MiB scanned",
    "MiB listed",
]
NOTES = (
    "Times over bare, medians of paired rounds, all threads, fused AdamW. `floor` is a "
    "plain read of as many bytes as ours scans, in the same rounds. `MiB listed` is "
    "what the frames list, and what the original reads six times. Goals: 1.3 times the "
    "floor plus the hooks; under 1.05 for the training step of GPT-2 small."
)
Batch = dict[str, torch.Tensor]


def gpt2() -> tuple[nn.Module, Batch]:
    ids = torch.randint(0, 50257, (2, 128))
    return hf.GPT2LMHeadModel(hf.GPT2Config()), {"input_ids": ids, "labels": ids}


def bert() -> tuple[nn.Module, Batch]:
    ids = torch.randint(0, 30522, (2, 128))
    return hf.BertForMaskedLM(hf.BertConfig()), {"input_ids": ids, "labels": ids}


def mt5() -> tuple[nn.Module, Batch]:
    config = hf.MT5Config(vocab_size=32000, decoder_start_token_id=0)
    ids = torch.randint(0, 32000, (2, 128))
    return hf.MT5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, Batch]:
    model = hf.ViTForImageClassification(hf.ViTConfig())
    return model, {
        "pixel_values": torch.randn(2, 3, 224, 224),
        "labels": torch.ones(2).long(),
    }


MODELS = {
    "GPT-2 small": gpt2,
    "BERT base": bert,
    "mt5-small, 32k": mt5,
    "ViT base": vit,
}


def forward_of(model: nn.Module, batch: Batch) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad():
            model(**batch)

    return forward


def step_of(model: nn.Module, batch: Batch) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        # Kept gradients: fresh ones are fresh pages, whose cost varies more than ours.
        optimizer.zero_grad(set_to_none=False)

    return step


def loss_of(model: nn.Module, batch: Batch) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**batch).loss.item()


def bytes_of(model: nn.Module, batch: Batch, memo: bool) -> int:
    """The bytes that one forward scans; the loss is checked on the way."""
    loss = loss_of(model, batch)
    with DebugUnderflowOverflow(model, memo=memo) as detector:
        assert loss_of(model, batch) == loss
    return detector.coverage.bytes_scanned


def race_detectors(
    model: nn.Module, run: Callable[[], object], rounds: int, scanned: int
) -> dict[str, list[float]]:
    """One model and one optimizer for all, so that all work on the same memory."""
    around: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": contextlib.nullcontext,
        "ours": lambda: DebugUnderflowOverflow(model),
        "original": lambda: original(model),
        "detect_anomaly": torch.autograd.detect_anomaly,
    }
    buffer, read = torch.ones(scanned, dtype=torch.uint8), plain_read()
    competitors: dict[str, Callable[[], object]] = dict.fromkeys(around, run)
    competitors["floor"] = lambda: read(buffer)
    return race(competitors, rounds, around=around)


def row_of(times: dict[str, list[float]]) -> dict[str, Any]:
    added = [a - b for a, b in zip(times["ours"], times["bare"], strict=True)]
    row: dict[str, Any] = {n: f"{ratio(times, n, 'bare'):.2f}x" for n in times}
    row["seconds"] = {n: summary(seconds) for n, seconds in times.items()}
    row["bare ms"] = f"{statistics.median(times['bare']) * 1e3:.0f}"
    row["floor ms"] = f"{statistics.median(times['floor']) * 1e3:.1f}"
    row["ours adds ms"] = f"{statistics.median(added) * 1e3:.1f}"
    of_floor = statistics.median(added) / statistics.median(times["floor"])
    return row | {"added / floor": f"{of_floor:.2f}"}


def measure(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model = model.to(dtype).train()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    scanned, listed = bytes_of(model, batch, True), bytes_of(model, batch, False)
    rows = []
    for kind, make, rounds in (
        ("forward", forward_of, 9),
        ("training step", step_of, 7),
    ):
        times = race_detectors(model, make(model, batch), rounds, scanned)
        row = {"model": name, "dtype": str(dtype)[6:], "run": kind, **row_of(times)}
        if kind == "forward":
            row["detect_anomaly"] = ""  # it looks at backward only
        row["MiB scanned"] = f"{scanned / 2**20:.0f}"
        row["MiB listed"] = f"{listed / 2**20:.0f}"
        rows.append(row)
    return rows


def main() -> None:
    hf.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "Anomaly Detection")
    rows = []
    chosen = [n for n in MODELS if n in sys.argv] or list(MODELS)
    for name in chosen[: 1 if QUICK else None]:
        for dtype in (torch.float32, torch.bfloat16):
            progress(f"{name}, {dtype}")
            rows += measure(name, dtype)
    write("models", "Whole models", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
