"""Models for the benchmarks, made from their configs, and their training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from timing import DEVICE, ON_GPU, QUICK, free_bytes
from torch import nn

try:
    import transformers as hf

    hf.logging.set_verbosity_error()
except ImportError:
    hf = None

NO_MODELS = "transformers is missing: only a model of torch's own is measured"
Batch = dict[str, torch.Tensor]


def words(size: int, shape: tuple[int, int]) -> Batch:
    ids = torch.randint(0, size, shape)
    return {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[nn.Module, Batch]:
    return hf.GPT2LMHeadModel(hf.GPT2Config()), words(50257, (2, 128))


def bert() -> tuple[nn.Module, Batch]:
    return hf.BertForMaskedLM(hf.BertConfig()), words(30522, (2, 128))


def mt5() -> tuple[nn.Module, Batch]:
    config = hf.MT5Config(vocab_size=32000, decoder_start_token_id=0)
    return hf.MT5ForConditionalGeneration(config), words(32000, (2, 128))


def vit() -> tuple[nn.Module, Batch]:
    model = hf.ViTForImageClassification(hf.ViTConfig())
    return model, {
        "pixel_values": torch.randn(2, 3, 224, 224),
        "labels": torch.ones(2).long(),
    }


def small() -> tuple[nn.Module, Batch]:
    sizes = {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 8192}
    config = hf.GPT2Config(**sizes, use_cache=False)
    return hf.GPT2LMHeadModel(config), words(8192, (4, 64))


def gpt2_medium() -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    batch = 16 if free_bytes() > 2**35 else 2
    return hf.GPT2LMHeadModel(config), words(50257, (batch, 1024))


def llama_1b() -> tuple[nn.Module, Batch]:
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
    return hf.LlamaForCausalLM(config), words(32000, (8, 2048))


class Loss:
    """What the models of transformers return, as far as it is used."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Encoder(nn.Module):
    """A model that needs nothing but torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        depth = 1 if QUICK else 6
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(64, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Loss:
        logits = self.head(self.layers(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten()
        )
        return Loss(loss)


def encoder() -> tuple[nn.Module, Batch]:
    return Encoder(), words(512, (2, 32))


Make = Callable[[], tuple[nn.Module, Batch]]
OF_TORCH: dict[str, Make] = {"encoder of torch, launch-bound": encoder}
ON_CPU: dict[str, Make] = {
    "GPT-2 small": gpt2,
    "BERT base": bert,
    "mt5-small, 32k": mt5,
    "ViT base": vit,
}
# With the memory, in bytes, that parameters, gradients, Adam and activations need.
ON_GPUS: dict[str, tuple[Make, int]] = {
    "GPT-2 of 6 layers, launch-bound": (small, 2**30),
    "GPT-2 medium": (gpt2_medium, 2**33),
    "Llama, 1B": (llama_1b, 3 * 2**34),
}


def chosen_models() -> tuple[dict[str, Make], list[str]]:
    """The models for this device, and why others are left out."""
    if hf is None:
        return OF_TORCH, [NO_MODELS]
    if not ON_GPU:
        return ON_CPU, []
    free = 2 * free_bytes()
    fit = {name: make for name, (make, need) in ON_GPUS.items() if need <= free}
    lacking = [f"{n}: too little memory is free" for n in ON_GPUS if n not in fit]
    return fit or OF_TORCH, lacking


def made(make: Make, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    """A model in training, and its batch, on the device."""
    torch.manual_seed(0)
    model, batch = make()
    model = model.to(DEVICE, dtype).train()
    batch = {
        name: t.to(DEVICE, dtype if t.is_floating_point() else t.dtype)
        for name, t in batch.items()
    }
    return model, batch


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """On a GPU bfloat16 means autocast over float32 weights; on the CPU nothing."""
    if ON_GPU and dtype is torch.bfloat16:
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def step_of(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype = torch.float32,
    before_step: Callable[[], object] = lambda: None,
) -> Callable[[], object]:
    """A training step."""

    def step() -> None:
        with autocast(dtype):
            loss = model(**batch).loss
        loss.backward()
        before_step()
        optimizer.step()
        # Kept gradients: on the CPU fresh ones are fresh pages, whose cost varies.
        optimizer.zero_grad(set_to_none=ON_GPU)

    return step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
