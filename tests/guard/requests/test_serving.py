"""Generation, pipelines, caches: what serves a model, without autograd."""

import sys

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.explains

transformers = pytest.importorskip("transformers")
IDS = ["a", "b", "c"]


def small_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def llama():
    """A float16 Llama that overflows in its second feed-forward."""
    model = small_llama()
    with torch.no_grad():
        mlp = model.model.layers[1].mlp
        for each, factor in ((mlp.gate_proj, 30), (mlp.up_proj, 30)):
            each.weight.mul_(factor)
        mlp.down_proj.weight.mul_(1e5)
    return model.half()


# What is watched is read before the cache is: of each test one half of the product.
@pytest.mark.slow
@pytest.mark.parametrize("watch, cache", [("tripwire", "static"), (None, None)])
def test_generation_is_explained(watch, cache):
    model, prompt = llama(), torch.randint(0, 50, (3, 5))
    options = {} if watch is None else {"watch": watch}
    settings = {"max_new_tokens": 3, "do_sample": True, "pad_token_id": 0}
    if cache is not None:
        settings |= {"cache_implementation": cache, "disable_compile": True}
    with OverflowGuard(model, **options) as guard:
        with pytest.raises((RuntimeError, NonFiniteError)) as raised:
            with guard.request(ids=IDS):
                model.generate(prompt, **settings)
    report = guard.last_report
    found = report.explanation
    assert (found.cause, found.module) == (
        "range overflow",
        "model.layers.1.mlp.down_proj",
    )
    assert report.requests == IDS and report.forward == 0
    best = found.remedies[0]
    assert best.until == ("model.norm",) and best.error < 0.01
    # The argument is `cache` from transformers 5.24 on.
    assert any(".layers[" in name for name in report.poisoned)
    if sys.version_info >= (3, 11) and isinstance(raised.value, RuntimeError):
        assert "overflowed" in raised.value.__notes__[0]


class Up(Assembled):
    def forward(self, x):
        return x + self.conv(nn.functional.silu(self.norm(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_blocks = nn.ModuleList(
            Up(norm=nn.GroupNorm(2, 4), conv=nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(3)
        )
        self.conv_norm_out, self.conv_out = nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1)

    def forward(self, z):
        for block in self.up_blocks:
            z = block(z)
        return self.conv_out(self.conv_norm_out(z))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 4, 1), Decoder()

    def decode(self, z):
        return self.decoder(z)


class Pipeline:
    """Two models and a loop, as pipelines of diffusers are built."""

    def __init__(self):
        torch.manual_seed(0)
        self.unet, self.vae, self.steps = nn.Conv2d(4, 4, 1).half(), Vae(), 2
        with torch.no_grad():
            self.vae.decoder.up_blocks[1].conv.weight.mul_(3e5)
        self.vae.half()

    def __call__(self, count):
        z = torch.randn(count, 4, 8, 8).half()
        for _ in range(self.steps):
            z = z - self.unet(z) * 0.1
        return self.vae.decode(z)


def test_the_model_of_a_pipeline_is_named_and_cured():
    pipe = Pipeline()
    with OverflowGuard(pipe) as guard:
        with pytest.raises(NonFiniteError) as raised, torch.no_grad():
            with guard.request(ids=["one", "two"]):
                pipe(2)
    report = raised.value.report
    found = report.explanation
    assert (report.forward, report.num_forwards) == (2, 3)
    assert found.module == "vae.decoder.up_blocks.1.conv"
    assert found.remedies[0].code == (
        "overflow_fast.keep_in_fp32(vae, ['decoder.up_blocks.1.conv', "
        "'decoder.up_blocks.2'], until=['decoder.conv_norm_out'])"
        "  # `vae` of the guard's models"
    )
    line, *_ = found.remedies[1].code.splitlines()
    assert line == "vae.to(torch.bfloat16)  # `vae` of the guard's models"


def test_an_object_without_models_is_refused(as_kept):
    as_kept.error(TypeError, OverflowGuard, object())


TRAP = 7  # the token whose row overflows


def trapped():
    """A float16 Llama whose second feed-forward overflows at one token."""
    model = small_llama()
    with torch.no_grad():
        embeddings, mlp = model.model.embed_tokens.weight, model.model.layers[1].mlp
        embeddings[:, 0] = 0
        embeddings[TRAP] = torch.eye(32)[0] * 5
        for each in (mlp.gate_proj, mlp.up_proj):
            each.weight[0] = torch.eye(32)[0] * 150
    return model.half()


def give_the_trap(ids, scores):
    """Gives the second row the token as its third new one, and others no row."""
    scores = scores.clone()
    scores[:, TRAP] = -1e4
    if ids.shape[1] == 7:
        scores[1, TRAP] = 6e4
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("watch, cache", [("tripwire", None), (None, "static")])
def test_a_token_of_one_row_is_explained_after_the_cache_was_written_on(watch, cache):
    model, prompt = trapped(), torch.randint(8, 50, (3, 5))
    options = {"on_overflow": "warn"} | ({} if watch is None else {"watch": watch})
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    settings["logits_processor"] = [give_the_trap]
    if cache is not None:
        settings |= {"cache_implementation": cache, "disable_compile": True}
    with OverflowGuard(model, **options) as guard, guard.request(ids=IDS):
        model.generate(prompt, **settings)
    report = guard.last_report
    found = report.explanation
    assert (report.requests, report.rows, report.token) == (["b"], [1], 3)
    assert report.line().startswith("Request b, token 3: ")
    assert (found.cause, found.module) == ("range overflow", "model.layers.1.mlp")
    assert found.remedies[0].error < 0.01
    assert set(map(tuple, report.poisoned.values())) == {(1,)}
