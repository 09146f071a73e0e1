"""A small T5 in float16 that overflows, as a real one in transformers' documents."""

import pytest
import torch

WO = "encoder.block.1.layer.1.DenseReluDense.wo"
TEXTS = (
    "All human beings are born free and equal",
    "Tous les êtres humains naissent libres et égaux",
)


def t5():
    """Makes the model and its batch, the beginnings of two texts byte by byte."""
    hf = pytest.importorskip("transformers")
    tokenizer = hf.ByT5Tokenizer()
    config = hf.T5Config(
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=2,
    )
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(config)
    with torch.no_grad():  # logits of a size that a loss in float16 has room for
        model.get_parameter("lm_head.weight").mul_(config.d_model**-0.5)
    batch = tokenizer(list(TEXTS), max_length=32, truncation=True, return_tensors="pt")
    return model.half().train(), {**batch, "labels": batch["input_ids"]}


def forward(model, batch):
    """Runs one training forward, the same one each time; returns its loss."""
    torch.manual_seed(0)
    return model(**batch).loss.item()


def push_to_the_limit(model, batch):
    """Scales `wo` so that its output nearly fills float16.

    The dropout behind it, which divides what it keeps by 0.9, makes the inf.
    """
    largest = []
    handle = model.get_submodule(WO).register_forward_hook(
        lambda module, inputs, output: largest.append(output.abs().max().item())
    )
    forward(model, batch)
    handle.remove()
    with torch.no_grad():
        scale = 0.99 * torch.finfo(torch.float16).max / largest[0]
        model.get_parameter(f"{WO}.weight").mul_(scale)
