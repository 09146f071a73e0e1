"""A variational autoencoder under Lightning, with an unbounded logarithm of variance.

python examples/lightning_vae.py            # an unusual sample is planted in step 4
python examples/lightning_vae.py --healthy  # 8 steps without it

The encoder predicts a large logarithm for a sample far from the others, and its `exp`
overflows float32: a clamp cures it, and is what the report recommends.
"""

import argparse
import logging
import warnings

import lightning
import torch
from torch import nn

from overflow_fast import NonFiniteError
from overflow_fast.integrations.lightning import LightningGuardCallback


class VAE(lightning.LightningModule):
    """Encoder, sample, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Linear(4, 8)

    def training_step(self, batch, batch_index):
        mean, logvar = self.encoder(batch).chunk(2, -1)
        deviation = torch.exp(0.5 * logvar)
        guess = self.decoder(mean + deviation * torch.randn_like(mean))
        divergence = 0.5 * (mean**2 + deviation**2 - logvar - 1).mean()
        return nn.functional.mse_loss(guess, batch) + divergence

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    data = torch.randn(64, 8)
    if not options.healthy:
        data[35] *= 5e3  # sample 3 of the batch of step 4
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningGuardCallback()],
    )
    trainer.fit(VAE(), torch.utils.data.DataLoader(data, batch_size=8))


if __name__ == "__main__":
    try:
        main()
    except NonFiniteError as error:
        raise SystemExit(str(error)) from None
