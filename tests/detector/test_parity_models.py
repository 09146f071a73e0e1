"""The same text as transformers' detector on transformers' own models."""

import pytest
import torch
import transformers as hf
from parity import Original, check_parity, run, spoil

from overflow_fast import DebugUnderflowOverflow

pytestmark = pytest.mark.slow

IDS = torch.tensor([[1, 2, 3, 4]])


def gpt2():
    config = hf.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, pad_token_id=0, eos_token_id=49
    )
    return hf.GPT2LMHeadModel(config).eval()


def t5():
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        vocab_size=50,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).eval()


def bert():
    config = hf.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
    )
    return hf.BertForMaskedLM(config).eval()


def vit():
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
    )
    return hf.ViTForImageClassification(config).eval()


def llama():
    config = hf.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        pad_token_id=0,
    )
    return hf.LlamaForCausalLM(config).eval()


def generate(model, **options):
    model.generate(IDS, max_new_tokens=3, do_sample=False, **options)


@pytest.mark.parametrize("make_model", [gpt2, t5, llama])
@pytest.mark.parametrize("traced", [(), (1, 2)])
def test_generate(make_model, traced):
    def drive(model, detector):
        generate(model)
        spoil(next(m for m in reversed(list(model.modules())) if m._parameters))
        generate(model)

    out, error = check_parity(
        make_model,
        drive,
        only_strict=True,
        max_frames_to_save=60,
        trace_batch_nums=traced,
    )
    assert "inf/nan detected" in error and "abs min" in out


def train(model, detector):
    model.train()
    for step in range(3):
        if step == 2:
            spoil(model)
        inputs = {"input_ids": IDS, "labels": IDS}
        if model.config.model_type == "vit":
            inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
            inputs["labels"] = torch.tensor([0, 1])
        model(**inputs).loss.backward()


@pytest.mark.parametrize(
    "make_model", [bert, vit, pytest.param(gpt2, marks=pytest.mark.day), llama, t5]
)
def test_training_steps_when_strict(make_model):
    check_parity(make_model, train, only_strict=True, max_frames_to_save=None)


def without_outputs_of_dict_kind(text):
    """A report less the lines of a ModelOutput: one in the original, or its fields."""
    kept = [
        line
        for line in text.splitlines()
        if not line.endswith("not a tensor output") and " output." not in line
    ]
    return "\n".join(kept)


@pytest.mark.parametrize("make_model", [bert, vit, gpt2, llama, t5])
def test_training_steps_differ_in_the_lines_of_model_outputs_only(make_model):
    expected = run(Original, make_model, train, max_frames_to_save=None)
    found = run(DebugUnderflowOverflow, make_model, train, max_frames_to_save=None)
    assert found != expected and found[1] == expected[1]
    texts = [without_outputs_of_dict_kind(text) for text in (found[0], expected[0])]
    assert texts[0] == texts[1]
