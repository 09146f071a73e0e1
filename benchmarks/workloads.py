"""Small training runs in which what is not finite is meant: masks, experts, scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn

INF = float("inf")
VOCABULARY = 64
LENGTH = 12


@dataclass
class Workload:
    """A model in training.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        make_batch: Makes a batch: keyword arguments.
        loss: Calls the model with a batch and returns the loss.
        scaler: The GradScaler, or None.
        allow: What a guard has to allow.
    """

    model: nn.Module
    make_batch: Callable[[], dict[str, Any]]
    loss: Callable[[dict[str, Any]], torch.Tensor]
    scaler: torch.amp.GradScaler | None = None
    allow: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Trains one step."""
        loss = self.loss(self.make_batch())
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (4, LENGTH))


def lengths_mask() -> torch.Tensor:
    """1 for the tokens of texts of different lengths, 0 behind them."""
    lengths = torch.randint(2, LENGTH + 1, (4, 1))
    return (torch.arange(LENGTH) < lengths).long()


def padded_texts() -> dict[str, Any]:
    text = tokens()
    return {"input_ids": text, "labels": text, "attention_mask": lengths_mask()}


class Translator(nn.Module):
    """An nn.Transformer with additive masks of -inf, one of them a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("causal", causal)

    def forward(self, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(text)
        padding = torch.zeros(mask.shape).masked_fill(mask == 0, -INF)
        out = self.transformer(
            embedded,
            embedded,
            tgt_mask=self.causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(out)


class Router(nn.Module):
    """Sends each token to its best experts; the others' logits are -inf."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(32, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        least = logits.topk(2).values[..., -1:]
        return logits.masked_fill(logits < least, -INF)


class Experts(nn.Module):
    """Experts of which many get no token: they are called with nothing."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.router = Router(num_experts)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = weights[:, i].nonzero().squeeze(1)
            share = weights[rows, i : i + 1]
            out = out.index_add(0, rows, expert(x[rows]) * share)
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Experts(16) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text).flatten(0, 1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), text.flatten())


def transformer() -> Workload:
    model = Translator()

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        return next_token_loss(model(batch["text"], batch["mask"]), batch["text"])

    return Workload(model, lambda: {"text": tokens(), "mask": lengths_mask()}, loss)


def gpt2() -> Workload:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    model = hf.GPT2LMHeadModel(config)

    return Workload(model, padded_texts, lambda batch: model(**batch).loss)


def t5() -> Workload:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = hf.T5ForConditionalGeneration(config)

    return Workload(model, padded_texts, lambda batch: model(**batch).loss)


def moe() -> Workload:
    model = MixtureOfExperts()
    return Workload(
        model,
        lambda: {"text": tokens()[:1]},
        lambda batch: next_token_loss(model(batch["text"]), batch["text"]),
        allow={"layers.*.router:output": "-inf"},
    )


def scaled() -> Workload:
    """In float16 under a GradScaler that begins far too high and tries again soon."""
    model = Translator()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=20)

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = model(batch["text"], batch["mask"])
        return next_token_loss(logits, batch["text"])

    make = lambda: {"text": tokens(), "mask": lengths_mask()}  # noqa: E731
    return Workload(model, make, loss, scaler)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nn.Transformer, -inf masks": transformer,
    "GPT-2, padded": gpt2,
    "T5, padded": t5,
    "mixture of experts, many empty": moe,
    "float16 under GradScaler": scaled,
}
