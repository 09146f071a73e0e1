"""advise_precision on models of transformers, from tiny configurations."""

import copy

import pytest
import torch
from small_models import LENGTH, VOCABULARY, gpt2

from overflow_fast import advise_precision, keep_in_fp32

pytestmark = pytest.mark.slow

hf = pytest.importorskip("transformers")


def tokens():
    return torch.randint(
        1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    )


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return hf.T5ForConditionalGeneration(config), batch


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.ViTConfig(
        intermediate_size=32, image_size=8, patch_size=4, num_labels=3, **sizes
    )
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    return hf.ViTForImageClassification(config), batch


def language_model():
    return gpt2(), {"input_ids": tokens(), "labels": tokens()}


@pytest.mark.parametrize("make", [language_model, t5, vit])
def test_healthy_models_may_run_in_all(make):
    model, batch = make()
    state = copy.deepcopy(model.state_dict())
    advice = advise_precision(model, [batch, batch])
    assert advice.float32 == [] and advice.code == ""
    assert all(check.passed and check.runs == 1 for check in advice.checks)
    ratios = [ratio for row in advice.rows for ratio in row.ratios.values()]
    assert len(ratios) >= 18 and all(ratio < 3 for ratio in ratios)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert len(str(advice).splitlines()) <= 24


def test_a_feed_forward_that_overflows_stays_with_what_it_feeds():
    model, batch = t5()
    block = "encoder.block.1.layer.1"
    with torch.no_grad():
        model.get_submodule(f"{block}.DenseReluDense.wo").weight *= 1e6
    advice = advise_precision(model, [batch])
    assert advice.float32 == []  # bfloat16 holds all of it
    stays = {row.name for row in advice.rows} - set(advice.float16)
    expected = {f"{block}.DenseReluDense.wo", f"{block}.dropout"}
    assert stays == expected | {"encoder.final_layer_norm"}
    model.eval()
    with torch.autocast("cpu", torch.float16):
        assert not model(**batch).loss.isfinite()
        with keep_in_fp32(model, stays):
            assert model(**batch).loss.isfinite()


def test_an_activation_whose_backward_overflows_stays_before_the_scale_is_lowered():
    """tanh of a cube is finite in float16; its derivative is 0 times inf."""
    model, batch = language_model()
    mlp = model.eval().transformer.h[0].mlp
    with torch.no_grad():
        mlp.c_fc.weight *= 3e3
        mlp.c_proj.weight *= 3e3
    advice = advise_precision(model, [batch])
    check = next(each for each in advice.checks if each.dtype == "float16")
    assert check.passed and check.widened == ["transformer.h.0.mlp.act"]
    with keep_in_fp32(model, check.kept), torch.autocast("cpu", torch.float16):
        loss = model(**batch).loss
    (loss * advice.loss_scale).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_tokenizers_batch():
    model, batch = t5()
    encoding = hf.BatchEncoding(batch)
    advice = advise_precision(model.eval(), [encoding])
    assert advice.loss == pytest.approx(float(model(**batch).loss.detach()))
    assert encoding["input_ids"] is batch["input_ids"]
