"""A GPT-2 of two layers, fine-tuned in float16 by transformers' Trainer.

python examples/trainer_finetune.py            # an overflow is planted in step 3
python examples/trainer_finetune.py --healthy  # 6 steps without it

Nothing is downloaded: the model is made from a config, the texts are random. The
planted fault makes a feed-forward layer's weights too large for float16.
"""

import argparse
import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from overflow_fast import NonFiniteError
from overflow_fast.integrations.trainer import TrainerGuardCallback

VOCABULARY, LENGTH = 128, 16


class Plant(TrainerCallback):
    """Makes a layer's weights too large before step 3."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            mlp = model.transformer.h[1].mlp
            mlp.c_fc.weight.data.mul_(200)
            mlp.c_proj.weight.data.mul_(60000)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    words = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **words)).half()
    ids = torch.randint(VOCABULARY, (64, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=4,
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        )
        callbacks = [TrainerGuardCallback()] + ([] if options.healthy else [Plant()])
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()


if __name__ == "__main__":
    try:
        main()
    except NonFiniteError as error:
        raise SystemExit(str(error)) from None
