"""Whole models from their configs: a forward and a training step, watched and not."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers as hf
from common import QUICK, plain_read, progress, race, ratio, silence, summary, write
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow as Original

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
    "ours / floor",
    "MiB scanned",
    "MiB listed",
]
NOTES = (
    "Times over bare, medians of paired rounds, all threads. `floor` is what a plain "
    "read of the bytes that ours scans takes, from memory. `MiB listed` is what the "
    "frames list and the original reads six times. Goals: 1.3 times the floor plus the "
    "cost of the hooks; under 1.05 for the training step of GPT-2 small at 2 x 128."
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """The original, whose hooks it cannot take off itself."""
    Original(model)
    try:
        with silence():
            yield
    finally:
        for module in model.modules():
            module._forward_hooks.clear()


def race_detectors(
    model: nn.Module, run: Callable[[], object], rounds: int
) -> dict[str, list[float]]:
    """One model and one optimizer for all, so that all work on the same memory."""
    around: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": contextlib.nullcontext,
        "ours": lambda: DebugUnderflowOverflow(model),
        "original": lambda: original(model),
        "detect_anomaly": torch.autograd.detect_anomaly,
    }
    return race(dict.fromkeys(around, run), rounds, around=around)


def bytes_of(model: nn.Module, batch: Batch, memo: bool) -> int:
    with DebugUnderflowOverflow(model, memo=memo) as detector, torch.no_grad():
        model(**batch)
    return detector._recorder.bytes_scanned


def seconds_to_read(num_bytes: int) -> float:
    """A plain read from memory, at the speed of a buffer no cache holds."""
    buffer = torch.ones(1 << (24 if QUICK else 29), dtype=torch.uint8)
    read = plain_read()
    times = race({"read": lambda: read(buffer)})["read"]
    return summary(times)["median"] / buffer.nbytes * num_bytes


def measure(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model = model.to(dtype).train()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    scanned, listed = bytes_of(model, batch, True), bytes_of(model, batch, False)
    floor = seconds_to_read(scanned)
    rows = []
    for kind, make, rounds in (
        ("forward", forward_of, 9),
        ("training step", step_of, 7),
    ):
        times = race_detectors(model, make(model, batch), rounds)
        row: dict[str, Any] = {"model": name, "dtype": str(dtype)[6:], "run": kind}
        row["seconds"] = {n: summary(seconds) for n, seconds in times.items()}
        row["bare ms"] = f"{row['seconds']['bare']['median'] * 1e3:.0f}"
        for competitor in ("ours", "original", "detect_anomaly"):
            row[competitor] = f"{ratio(times, competitor, 'bare'):.2f}x"
        medians = {n: s["median"] for n, s in row["seconds"].items()}
        added = medians["bare"] * (ratio(times, "ours", "bare") - 1)
        row |= {"ours adds ms": f"{added * 1e3:.1f}", "floor ms": f"{floor * 1e3:.1f}"}
        row["ours / floor"] = f"{added / floor:.2f}"
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
