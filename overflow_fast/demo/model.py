"""The model that overflows: a T5 of mt5-small's shape, fed real text, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration


class DemoSettings(NamedTuple):
    """The arguments of the demo."""

    dtype: str = "float16"
    batch_size: int = 4
    length: int = 128
    rounds: int = 7
    seed: int = 0
    tiny: bool = False

    @property
    def limit(self) -> float:
        """The largest finite number of the dtype."""
        return torch.finfo(getattr(torch, self.dtype)).max


def build(settings: DemoSettings) -> nn.Module:
    """Makes the model, with drawn weights, ready to train."""
    shape: dict[str, Any] = {
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "num_heads": 6,
    }
    if settings.tiny:
        shape |= {"d_model": 32, "d_kv": 8, "d_ff": 64}
        shape |= {"num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=len(ByT5Tokenizer()),
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        **shape,
    )
    torch.manual_seed(settings.seed)
    model: nn.Module = T5ForConditionalGeneration(config)
    with torch.no_grad():  # logits of a size that a loss in float16 has room for
        model.get_parameter("lm_head.weight").mul_(config.d_model**-0.5)
    return model.to(getattr(torch, settings.dtype)).train()


def read_batch(settings: DemoSettings) -> dict[str, torch.Tensor]:
    """Reads article 1 of the Universal Declaration of Human Rights, a language a row.

    Returns:
        int64 tensors of shape [batch_size, length].
    """
    text = resources.files(__package__).joinpath("humanity.txt").read_text("utf-8")
    lines = text.splitlines()
    chosen = [lines[i % len(lines)] for i in range(settings.batch_size)]
    batch = ByT5Tokenizer()(
        chosen,
        max_length=settings.length,
        truncation=True,
        padding="max_length",
        return_tensors="pt",
    )
    return {**batch, "labels": batch["input_ids"]}


def forward(model: nn.Module, batch: dict[str, torch.Tensor], seed: int) -> float:
    """Runs one training forward, the same one for the same seed; returns its loss."""
    torch.manual_seed(seed)
    loss: torch.Tensor = model(**batch).loss
    return loss.item()


def push_to_the_limit(
    model: nn.Module, batch: dict[str, torch.Tensor], settings: DemoSettings
) -> str:
    """Scales one feed-forward weight so that its output nearly fills the dtype.

    As in transformers' documentation of a real mt5: the output of `wo` still fits,
    and the dropout behind it, which divides what it keeps by 0.9, makes the inf. The
    scale comes from a forward with the same seed, so with the same dropout.

    Returns:
        The name of the layer that was changed.
    """
    outputs: dict[str, float] = {}  # of wo, by the name of its encoder layer
    kept: dict[str, float] = {}  # of the dropout behind it, in parts of that

    def see(name: str, part: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def see_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            largest = output.detach().abs().max().item()
            if part == "dropout":
                kept[name] = largest / outputs[name]
            else:
                outputs[name] = largest

        return see_output

    handles = [
        model.get_submodule(f"{name}.{part}").register_forward_hook(see(name, part))
        for name, _ in model.named_modules()
        if name.startswith("encoder.") and name.endswith(".layer.1")
        for part in ("DenseReluDense.wo", "dropout")
    ]
    forward(model, batch, settings.seed)
    for handle in handles:
        handle.remove()
    late = list(kept)[len(kept) // 2 :]
    chosen = max(late, key=lambda name: kept[name])
    weight = model.get_parameter(f"{chosen}.DenseReluDense.wo.weight")
    with torch.no_grad():
        weight.mul_(0.99 * settings.limit / outputs[chosen])
    return f"{chosen}.DenseReluDense.wo"
