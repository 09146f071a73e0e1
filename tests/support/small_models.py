"""Small models for tests and the examples of docs/, and what feeds them."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

VOCABULARY, LENGTH = 50, 8


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Small(nn.Module):
    """A language model in little, with the arguments and the output of a large one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids)).flatten(0, 1)
        return Output(nn.functional.cross_entropy(logits, labels.flatten()))


def gpt2():
    import transformers as hf  # not in the processes of `on_ranks`

    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2
        )
    )


def texts(count):
    ids = torch.randint(0, VOCABULARY, (count, LENGTH))
    return [{"input_ids": row, "labels": row} for row in ids]


def loader_of(count):
    return torch.utils.data.DataLoader(texts(count), batch_size=2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def trainer(**arguments):
    hf = pytest.importorskip("transformers")
    options = hf.TrainingArguments(
        output_dir="out", max_steps=4, use_cpu=True, report_to=[], save_steps=2
    )
    return hf.Trainer(gpt2(), options, train_dataset=texts(32), **arguments)


def quiet(lightning):
    quietly = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    return functools.partial(lightning.Trainer, **quietly)


class Block(nn.Module):
    """A layer, and a norm that makes its values small again."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.up(x))
