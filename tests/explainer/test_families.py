"""Steps of transformers' families are run again: no replay ends without a reason."""

import pytest
import torch
import transformers as hf

from overflow_fast import OverflowGuard

pytestmark = pytest.mark.slow

IDS = torch.randint(1, 60, (2, 8), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "labels": IDS}
IMAGES = {"pixel_values": torch.ones(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
BOTH = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32}
EXPERTS = {"num_key_value_heads": 1, "num_local_experts": 4}
CAUSAL, MASKED = hf.AutoModelForCausalLM, hf.AutoModelForMaskedLM
PICTURES = hf.AutoModelForImageClassification
FAMILIES = {
    "gpt2": (CAUSAL, {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": (CAUSAL, SIZES),
    "mixtral": (CAUSAL, {**SIZES, **EXPERTS}),
    "opt": (CAUSAL, {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mamba": (CAUSAL, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "bert": (MASKED, SIZES),
    "deberta-v2": (MASKED, SIZES),
    "modernbert": (MASKED, SIZES),
    "longformer": (MASKED, {**SIZES, "attention_window": 4}),
    "bart": (hf.AutoModelForSeq2SeqLM, BOTH),
    "vit": (PICTURES, {**SIZES, "image_size": 32, "patch_size": 8}),
    "resnet": (PICTURES, {"hidden_sizes": [8, 16], "depths": [1, 1]}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_a_family_is_run_again(name):
    kind, sizes = FAMILIES[name]
    size = {} if kind is PICTURES else {"vocab_size": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    model = kind.from_config(hf.AutoConfig.for_model(name, **size, **sizes))
    model.train()
    batch = IMAGES if kind is PICTURES else TEXT
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = [each for each in model.parameters() if each.dim() > 1]
    middle = len(weights) // 2
    with OverflowGuard(model, optimizer, "skip") as guard:
        for number in range(2):
            with torch.no_grad():
                for each in weights[middle : middle + 2] * number:
                    each.mul_(1e30)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.num_skipped == 1
    found = guard.last_report.explanation
    assert found.op is not None and found.cause != "unknown"
    assert not [each for each in found.notes if "not replayed" in each.lower()]
