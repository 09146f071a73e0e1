"""A vision transformer in float16, with a picture that was not scaled to 0..1.

python examples/vit_float16.py            # the picture is in the batch of step 2
python examples/vit_float16.py --healthy  # 4 steps without it
python examples/vit_float16.py --skip     # leaves the bad step out and goes on

Nothing is downloaded: the model is made from a config, the pictures are random.
"""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

from overflow_fast import NonFiniteError, OverflowGuard


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    parser.add_argument("--skip", action="store_true", help="skip the bad step")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTForImageClassification(ViTConfig(**sizes, **layers)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    policy = "skip" if options.skip else "raise"
    guard = OverflowGuard(model, optimizer, on_overflow=policy)
    for step in range(4):
        pixels, labels = torch.rand(4, 3, 32, 32), torch.randint(2, (4,))
        if step == 2 and not options.healthy:
            pixels[1] *= 65000  # 16 bits a channel, not scaled to 0..1
        loss = model(pixel_values=pixels.half(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped = " (skipped)" if guard.last_step_skipped else ""
        print(f"step {step}: loss {loss.item():.3f}{skipped}")


if __name__ == "__main__":
    try:
        main()
    except NonFiniteError as error:
        raise SystemExit(str(error)) from None
