"""Small models from their configs, and errors to plant in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()


def tokens(generator: torch.Generator, vocabulary: int, length: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, (2, length), generator=generator)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=500)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=300,
        d_model=96,
        d_kv=24,
        d_ff=192,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"GPT-2": gpt2, "ViT": vit, "T5": t5, "Llama": llama}
# Of each the list of blocks, and within one: a product, the norm before the attention,
# the attention.
PARTS = {
    "GPT-2": ("transformer.h", "mlp.c_fc", "ln_1", "attn"),
    "ViT": ("vit.layers", "mlp.fc1", "layernorm_before", "attention"),
    "T5": (
        "encoder.block",
        "layer.1.DenseReluDense.wi",
        "layer.0.layer_norm",
        "layer.0.SelfAttention",
    ),
    "Llama": ("model.layers", "mlp.up_proj", "input_layernorm", "self_attn"),
}
BLOCK = 1


def make(name: str, seed: int) -> nn.Module:
    """A model with dropout off, whose attention is written out."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    model.set_attn_implementation("eager")
    return model


def batch_of(name: str, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The keyword arguments of a step, with labels."""
    generator = torch.Generator().manual_seed(seed)
    if name == "ViT":
        pixels = torch.randn(2, 3, 32, 32, generator=generator).to(dtype)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    ids = tokens(generator, 300, 32)
    labels = tokens(generator, 300, 16) if name == "T5" else ids
    return {"input_ids": ids, "labels": labels}


def part(model: nn.Module, name: str, which: int) -> tuple[nn.Module, str]:
    """A part of the block that errors are planted in, and its name."""
    path = f"{PARTS[name][0]}.{BLOCK}.{PARTS[name][which]}"
    return model.get_submodule(path), path


# Errors to plant. Each returns the name of the module that is to be named.


def weight(model: nn.Module, name: str) -> str:
    module, path = part(model, name, 1)
    module.weight.data.mul_(1.01)
    return path


def element(model: nn.Module, name: str) -> str:
    module, path = part(model, name, 1)
    values = module.weight.data.view(-1)
    values[values.abs().argmax()] *= 1.5
    return path


def float8(model: nn.Module, name: str) -> str:
    module, path = part(model, name, 1)
    forward = module.forward

    def rounded(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(x)
        scale = output.detach().abs().max() / 448
        value = (output / scale).to(torch.float8_e4m3fn).to(output.dtype) * scale
        return output + (value - output).detach()

    module.forward = rounded  # type: ignore[method-assign]
    return path


def swapped(model: nn.Module, name: str) -> str:
    blocks: Any = model.get_submodule(PARTS[name][0])
    blocks[BLOCK], blocks[BLOCK + 1] = blocks[BLOCK + 1], blocks[BLOCK]
    return f"{PARTS[name][0]}.{BLOCK}"


def eps(model: nn.Module, name: str) -> str:
    module, path = part(model, name, 2)
    attribute = "eps" if hasattr(module, "eps") else "variance_epsilon"
    setattr(module, attribute, 0.1)
    return path


def with_softmax(module: nn.Module, softmax: Callable[..., torch.Tensor]) -> None:
    """Lets a module's forward run another softmax."""
    forward = module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        own = nn.functional.softmax
        nn.functional.softmax = softmax
        try:
            return forward(*args, **kwargs)
        finally:
            nn.functional.softmax = own

    module.forward = replaced  # type: ignore[method-assign]


def softmax_axis(model: nn.Module, name: str) -> str:
    """Softmax over the queries in place of the keys."""
    module, path = part(model, name, 3)
    own = nn.functional.softmax

    def wrong(x: torch.Tensor, dim: int = -1, dtype: Any = None) -> torch.Tensor:
        return own(x.mT, dim=dim, dtype=dtype).mT

    with_softmax(module, wrong)
    return path


def rotary_base(model: nn.Module, name: str) -> str:
    rotary: Any = model.get_submodule("model.rotary_emb")
    size = len(rotary.inv_freq)
    rotary.inv_freq.data.copy_(50000.0 ** -(torch.arange(size) / size))
    return "model.rotary_emb"


def gradient(model: nn.Module, name: str) -> str:
    module, path = part(model, name, 1)
    module.weight.register_hook(lambda grad: grad * 1.1)
    return path


ERRORS = (weight, element, float8, swapped, eps, softmax_axis, gradient)


def errors_of(name: str) -> tuple[Callable[[nn.Module, str], str], ...]:
    """The errors that a model can have."""
    return (*ERRORS, rotary_base) if name == "Llama" else ERRORS


# Changes that are rounding alone.


def softmax_order(model: nn.Module, name: str) -> None:
    """Softmax as the exponential of its logarithm, in every attention."""

    def other(x: torch.Tensor, dim: int = -1, dtype: Any = None) -> torch.Tensor:
        return nn.functional.log_softmax(x, dim, dtype=dtype).exp()

    for path, module in model.named_modules():
        if path.endswith(PARTS[name][3].rpartition(".")[2]):
            with_softmax(module, other)
