"""Trainers give their own step function to replays: the loss is replayed too."""

import pytest
import torch
import transformers as hf
from assembled import Assembled
from torch import nn

pytestmark = pytest.mark.slow

lightning = pytest.importorskip("lightning.pytorch")

from overflow_fast.integrations.lightning import LightningGuardCallback  # noqa: E402
from overflow_fast.integrations.trainer import TrainerGuardCallback  # noqa: E402


class Net(Assembled):
    def forward(self, x, labels=None):
        return {"logits": self.fc(x)}


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"x": torch.full((4,), float(i)), "labels": torch.tensor(i % 2)}


class OwnLoss(hf.Trainer):
    """Takes the root of 0 for one batch, outside of the model."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.logged, self.calls = [], 0

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        self.calls += 1
        self.log({"calls": self.calls})
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        loss = nn.functional.cross_entropy(logits, labels)
        if (inputs["x"][:, 0] == 4).any():
            loss = loss + (logits * 0).abs().sqrt().sum()
        return loss

    def log(self, logs, *_):
        self.logged.append(dict(logs))


@pytest.mark.parametrize("explain", [True, False])
def test_transformers_loss_is_replayed(tmp_path, explain):
    callback = TrainerGuardCallback(on_overflow="skip", explain=explain)
    trainer = OwnLoss(
        Net(fc=nn.Linear(4, 2)),
        hf.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Items(),
        callbacks=[callback],
    )
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(Items(), 2)
    trainer.train()
    assert callback.guard.num_skipped == 1
    assert trainer.calls == 4
    assert [each["calls"] for each in trainer.logged if "calls" in each] == [1, 2, 3, 4]
    assert "compute_loss" not in vars(trainer)
    found = callback.guard.last_report.explanation
    if not explain:
        assert found is None
        return
    assert (found.phase, found.cause) == ("backward", "singular gradient")
    assert found.op.name == "aten.sqrt"
    assert any(each.elsewhere is not None for each in found.remedies)
    assert "sqrt().sum()" in found.op.code


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(fc=nn.Linear(4, 2))
        self.calls = 0
        self.logged = []

    def training_step(self, batch, index):
        self.calls += 1
        self.log("calls", float(self.calls))
        logits = self.net(batch["x"])["logits"]
        loss = nn.functional.cross_entropy(logits, batch["labels"])
        if index == 1:
            loss = loss + (logits * 0).abs().sqrt().sum()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting(lightning.Callback):
    def __init__(self):
        self.seen = []

    def on_before_backward(self, *_):
        self.seen.append("backward")

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(float(trainer.callback_metrics["calls"]))


def test_lightnings_step_is_replayed(tmp_path):
    callback, counting = LightningGuardCallback(on_overflow="skip"), Counting()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[callback, counting],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = Lit()
    trainer.fit(model, torch.utils.data.DataLoader(Items(), 2))
    assert callback.guard.num_skipped == 1
    found = callback.guard.last_report.explanation
    assert (found.phase, found.cause) == ("backward", "singular gradient")
    assert "sqrt().sum()" in found.op.code
    assert any(each.elsewhere is not None for each in found.remedies)
    assert model.calls == 4
    assert counting.seen == [each for i in range(4) for each in ("backward", i + 1.0)]
    assert "training_step" not in vars(model)
    assert "log" not in vars(model)


class Pairs(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.fc(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_part_of_lightnings_batch_has_the_name_of_the_argument(tmp_path):
    callback = LightningGuardCallback(on_overflow="skip")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    target = torch.tensor([[0.0], [float("nan")]])
    loader = torch.utils.data.DataLoader([(torch.ones(2, 4), target)], None)
    trainer.fit(Pairs(), loader)
    found = callback.guard.last_report.explanation
    assert (found.cause, found.tensor, found.sample) == ("bad data", "batch[1]", 1)
