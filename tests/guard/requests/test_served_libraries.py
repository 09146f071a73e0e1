"""Pipelines of libraries and exported graphs, run under a guard."""

import pytest
import torch
from small_models import Block
from torch import nn

from overflow_fast import OverflowGuard

pytestmark = pytest.mark.explains


def stable_diffusion():
    """A pipeline from configurations, whose float16 VAE overflows in one block."""
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=32,
    )
    with torch.no_grad():
        vae.decoder.up_blocks[0].resnets[1].conv2.weight.mul_(1e5)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
    )
    text = transformers.CLIPTextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1
    )
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=None,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_the_block_of_a_diffusers_pipeline_is_named_and_cured(options):
    pipe, prompt = stable_diffusion(), torch.randn(2, 77, 32).half()
    with OverflowGuard(pipe, on_overflow="warn", **options) as guard:
        with guard.request(ids=["cat", "dog"]):
            pipe(
                prompt_embeds=prompt,
                negative_prompt_embeds=prompt,
                num_inference_steps=2,
                height=32,
                width=32,
                output_type="np",
            )
    report = guard.last_report
    found = report.explanation
    assert (found.cause, found.module) == (
        "range overflow",
        "vae.decoder.up_blocks.0.resnets.1.conv2",
    )
    assert (report.forward, report.num_forwards) == (3, 4)
    assert found.remedies[0].until == ("decoder.conv_norm_out",)
    assert found.remedies[0].error < 0.01


def test_an_exported_graph_is_explained_by_its_own_lines():
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block()).eval()
    with torch.no_grad():
        net[1].up.weight.mul_(1.8e5)
    net, x = net.half(), torch.randn(2, 8).half()
    exported = torch.export.export(net, (x,)).module()
    with OverflowGuard(exported, on_overflow="warn") as guard, torch.no_grad():
        exported(x)
    found = guard.last_report.explanation
    assert found.cause == "range overflow"
    assert "torch.ops.aten.linear" in found.op.code
    assert found.remedies[0].is_recommended
