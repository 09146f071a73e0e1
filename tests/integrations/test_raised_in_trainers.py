"""Trainers whose own code raises at what a nan has led to."""

import sys

import pytest
import torch
from lightning_fits import Lit, Manual, guard_callback, make_trainer
from torch import nn
from torch.distributions import Normal

from overflow_fast import NonFiniteError

transformers = pytest.importorskip("transformers")
BAD_STEP = 1
pytestmark = pytest.mark.usefixtures("validated")


def assert_reported(guard, error, step=BAD_STEP):
    report = guard.last_report
    assert not isinstance(error, NonFiniteError)
    assert report is not None and report.step == step
    assert report.raised == type(error).__qualname__ and report.moment == "raised"
    assert guard.metrics()["bad_steps_total"] == 1
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        assert report.headline() in note
    return report


def rows():
    torch.manual_seed(0)
    found = [torch.randn(2) for _ in range(4)]
    found[BAD_STEP] = torch.full((2,), 3e38)
    return found


class OfLoss(Lit):
    """Its loss is a distribution's, which refuses a nan."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.layer.weight, 2.0)

    def training_step(self, batch, index):
        out = self.layer(batch)
        return -Normal(out - out.detach(), 1.0).log_prob(torch.zeros(1)).mean()


class OfBackward(OfLoss):
    """A hook refuses the gradient of its output."""

    def training_step(self, batch, index):
        out = self.layer(batch.clamp(-1, 1))
        out.register_hook(refuse)
        return (out - out.detach()).sqrt().mean() if batch.max() > 9 else out.mean()


def refuse(gradient):
    if not gradient.isfinite().all():
        raise ValueError("constraint")


class ByHand(Manual):
    """It steps two optimizers by hand."""

    def loss_of(self, output):
        return -Normal(output - output.detach(), 1.0).log_prob(torch.zeros(1)).mean()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("kind", [OfLoss, OfBackward, ByHand])
def test_lightnings_exceptions_get_the_report(kind, policy, tmp_path):
    callback = guard_callback(on_overflow=policy)
    module = kind()
    nn.init.constant_(module.layer.weight, 2.0)
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(ValueError, match="constraint") as raised:
        trainer.fit(module, torch.utils.data.DataLoader(rows()))
    step = 2 * BAD_STEP if kind is ByHand else BAD_STEP
    assert_reported(callback.guard, raised.value, step)
    assert not callback.guard.enabled


class Regression(nn.Module):
    """A model for Trainer, whose loss is a distribution's, or whose gradient is bad."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(2, 1), how
        nn.init.constant_(self.layer.weight, 2.0)

    def forward(self, x, labels=None):
        if self.how == "forward":
            out = self.layer(x)
            Normal(out - out.detach(), 1.0)
            return {"loss": out.mean()}
        out = self.layer(x.clamp(-1, 1))
        out.register_hook(refuse)
        return {"loss": (out - out.detach()).sqrt().mean() + 0 * out.mean()}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_transformers_exceptions_get_the_report(how, policy, tmp_path):
    from overflow_fast.integrations.trainer import TrainerGuardCallback

    callback = TrainerGuardCallback(on_overflow=policy)
    data_rows = [{"x": x, "labels": torch.zeros(1)} for x in rows()]
    trainer = transformers.Trainer(
        Regression(how),
        transformers.TrainingArguments(
            *(str(tmp_path),),
            per_device_train_batch_size=4,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=data_rows,
        callbacks=[callback],
    )
    with pytest.raises(ValueError, match="constraint") as raised:
        trainer.train()
    report = assert_reported(callback.guard, raised.value, step=0)
    assert report.explanation is not None
    callback.remove_guard()
    assert "training_step" not in vars(trainer)
    assert "compute_loss" not in vars(trainer)


class OwnLoss(transformers.Trainer):
    """Its loss decomposes a covariance, or its metrics refuse a nan."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model.layer(inputs["x"])
        loss = torch.linalg.cholesky((out - out.detach()) * 0 + torch.eye(1)).sum()
        return (loss, {"logits": out}) if return_outputs else loss


def metrics_of(prediction):
    if not torch.as_tensor(prediction.predictions).isfinite().all():
        raise ValueError("Input contains NaN.")
    return {}


def own_trainer(tmp_path, callback, **arguments):
    data_rows = [{"x": x, "labels": torch.zeros(1)} for x in rows()]
    evaluated = arguments.pop("evaluated", data_rows)
    trainer = OwnLoss(
        Regression("forward"),
        transformers.TrainingArguments(
            *(str(tmp_path),),
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=evaluated,
        eval_dataset=data_rows,
        compute_metrics=metrics_of,
        callbacks=[callback],
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
        evaluated
    )
    return trainer


@pytest.mark.slow
def test_a_decomposition_in_a_loss_of_ones_own_gets_the_report(tmp_path):
    from overflow_fast.integrations.trainer import TrainerGuardCallback

    callback = TrainerGuardCallback()
    trainer = own_trainer(tmp_path, callback, max_steps=4)
    with pytest.raises(torch.linalg.LinAlgError) as raised:
        trainer.train()
    report = assert_reported(callback.guard, raised.value)
    assert report.verdict.first.fqn == "layer"
    callback.remove_guard()


@pytest.mark.slow
def test_metrics_that_refuse_a_nan_are_of_an_evaluation_that_was_logged(tmp_path):
    from overflow_fast.integrations.trainer import TrainerGuardCallback

    callback = TrainerGuardCallback()
    good = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 4
    trainer = own_trainer(
        tmp_path, callback, max_steps=2, evaluated=good, eval_strategy="epoch"
    )
    trainer.compute_loss = lambda model, inputs, return_outputs=False, **kwargs: (
        (model.layer(inputs["x"]).mean(), {"logits": model.layer(inputs["x"])})
        if return_outputs
        else model.layer(inputs["x"]).mean()
    )
    with pytest.raises(ValueError, match="NaN"):
        trainer.train()
    assert callback.guard.last_report.moment == "evaluation"
    callback.remove_guard()


class OfClipping(OfLoss):
    """Its own clipping refuses a norm that is a nan."""

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_gradient_clipping(self, *args, **kwargs):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        assert all(norm.isfinite() for norm in norms), "constraint"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_clipping_of_ones_own_gets_the_report(policy, tmp_path):
    callback = guard_callback(on_overflow=policy)
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(AssertionError, match="constraint") as raised:
        trainer.fit(OfClipping(), torch.utils.data.DataLoader(rows()))
    assert_reported(callback.guard, raised.value)
