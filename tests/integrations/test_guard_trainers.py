"""The guard in the trainers that people use: it skips, and schedules stand still."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from guarding import INF, NAN, batches, hooks_of, make, plant, train_step
from ranks import on_ranks

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.integrations.trainer import TrainerGuardCallback

pytestmark = pytest.mark.slow

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning.pytorch")
of_accelerate = pytest.importorskip("overflow_fast.integrations.accelerate")
of_lightning = pytest.importorskip("overflow_fast.integrations.lightning")


def test_accelerates_schedulers_stand_still():
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i, (x, y) in enumerate(batches(4)):
            with plant(model.head, NAN) if i == 2 else torch.enable_grad():
                loss = model(x, y=y)["loss"]
            accelerator.backward(loss)
            before = model.blocks[0].fc1.weight.detach().clone()
            optimizer.step()
            assert optimizer.step_was_skipped == (i == 2)
            assert before.equal(model.blocks[0].fc1.weight) == (i == 2)
            scheduler.step()
            optimizer.zero_grad()
    assert guard.num_skipped == 1
    assert scheduler.scheduler.last_epoch == 3


def test_accelerates_schedulers_stand_still_under_a_scaler():
    accelerate.Accelerator(cpu=True)  # the state that its parts ask for
    model, inner = make()
    model.eval()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    scheduler = accelerate.scheduler.AcceleratedScheduler(schedule, optimizer)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i, (x, y) in enumerate(batches(4)):
            loss = model(x, y=y)["loss"]
            if i == 2:
                guard.record(aside=loss * INF)  # which no gradient tells of
            scaler.scale(loss).backward()
            optimizer.step()
            assert optimizer.step_was_skipped == (i == 2)
            scheduler.step()
            optimizer.zero_grad()
    assert guard.num_skipped == 1
    assert schedule.last_epoch == 3


def accelerated(tmp_path, **options):
    project = accelerate.utils.ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(*make())
    guard = of_accelerate.guard_with(accelerator, model, optimizer, **options)
    return accelerator, model, optimizer, guard


def test_accelerate_keeps_the_last_good_checkpoint(tmp_path):
    accelerator, model, optimizer, guard = accelerated(tmp_path)
    train_step(model, optimizer, batches(1)[0])
    accelerator.save_state()
    folder = tmp_path / "checkpoints"
    before = sorted(path.name for path in folder.rglob("*"))
    model.blocks[1].fc1.weight.data[2, 3] = NAN
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.fc1\.weight"):
        accelerator.save_state()
    assert sorted(path.name for path in folder.rglob("*")) == before
    guard.remove()
    accelerator.save_state()  # what nobody guards is saved


def test_accelerate_is_guarded_as_usual(tmp_path):
    accelerator, model, optimizer, guard = accelerated(tmp_path, on_overflow="skip")
    x, y = batches(1)[0]
    accelerator.backward(model(x * INF, y=y)["loss"])
    optimizer.step()
    assert guard.num_skipped == 1
    assert optimizer.step_was_skipped


def test_wrong_set_ups_of_accelerate_are_told(tmp_path, monkeypatch, as_kept):
    guard_with = of_accelerate.guard_with
    as_kept.error(TypeError, guard_with, None, *make())
    name = "overflow_fast.integrations.accelerate"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    as_kept.error(ImportError, __import__, name)


@pytest.fixture
def trainer(tmp_path):
    """Makes a Trainer of a small GPT-2 with a callback, and arguments of its own."""

    config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=8)
    model = hf.GPT2LMHeadModel(config)
    ids = torch.randint(0, 50, (8,))
    data = [{"input_ids": ids, "labels": ids}] * 5

    def make_trainer(callback, **arguments):
        arguments = {
            "output_dir": str(tmp_path),
            "max_steps": 5,
            "per_device_train_batch_size": 1,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            **arguments,
        }
        return hf.Trainer(
            model,
            hf.TrainingArguments(**arguments),
            train_dataset=data,
            eval_dataset=data[:1],
            callbacks=[callback],
        )

    return make_trainer


class SpoilThird(hf.TrainerCallback):
    """Makes a layer's output bad in the third step."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            self.plant = plant(model.transformer.h[1].mlp.act, INF).__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.plant.__exit__()


@pytest.mark.day
def test_transformers_trainer_is_guarded(trainer):
    callback = TrainerGuardCallback(on_overflow="skip")
    trainer = trainer(callback)
    trainer.add_callback(SpoilThird())
    trainer.train()
    assert callback.guard.num_skipped == 1
    assert callback.guard.step == 5
    verdict = callback.guard.last_report.verdict
    assert verdict.origin.maker == "transformer.h.1.mlp.act"
    assert trainer.lr_scheduler.last_epoch == 4
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert hooks_of(trainer.model) == 0


def test_transformers_trainer_is_stopped(trainer):
    callback = TrainerGuardCallback()
    trainer = trainer(callback)
    trainer.add_callback(SpoilThird())
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert trainer.state.global_step == 2


class SpoilWeights(hf.TrainerCallback):
    """Makes a weight bad after a step, behind the guard's back."""

    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.after:
            model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = NAN


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("save", ["steps", "best"])
def test_trainer_keeps_the_last_good_checkpoint(
    trainer, tmp_path, save, caplog, as_kept
):
    callback = TrainerGuardCallback(on_overflow="warn")
    trainer = trainer(
        SpoilWeights(3),
        save_strategy=save,
        save_steps=1,
        save_total_limit=1,
        eval_strategy="steps" if save == "best" else "no",
        eval_steps=1,
        metric_for_best_model="loss" if save == "best" else None,
    )
    trainer.add_callback(callback)
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    as_kept(next(each for each in caplog.messages if "No checkpoint" in each))


def test_trainer_is_stopped_where_it_would_save(trainer, tmp_path, as_kept):
    trainer = trainer(SpoilWeights(2), save_strategy="steps", save_steps=1)
    trainer.add_callback(TrainerGuardCallback(watch=["gradients"]))
    as_kept.error(NonFiniteError, trainer.train)
    assert checkpoints(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("hides", [True, False])
def test_what_trainers_log_hides_is_pointed_out(trainer, caplog, hides):
    trainer = trainer(
        TrainerGuardCallback(on_overflow="skip"),
        logging_nan_inf_filter=hides,
        logging_steps=1,
    )
    trainer.add_callback(SpoilThird())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    # Without the filter Trainer logs nan for the bad step and for all behind it.
    is_nan = torch.tensor(losses).isnan().tolist()
    assert is_nan == [False, False, *([not hides] * 3)]
    told = [
        r for r in caplog.records if "logging_nan_inf_filter=True" in r.getMessage()
    ]
    assert len(told) == hides


def test_what_trainers_log_shows_is_not_pointed_out(trainer, caplog):
    class SpoilGradient(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            model.lm_head.weight.grad[0] = INF

    trainer = trainer(TrainerGuardCallback(on_overflow="skip"))
    trainer.add_callback(SpoilGradient())
    trainer.train()
    assert "logging_nan_inf_filter" not in caplog.text


def test_names_of_modules_are_asked_for_when_training_begins(trainer, as_kept):
    callback = TrainerGuardCallback(
        include=["transformer.h.*"], allow={"*.mlp:output": "inf"}
    )
    trainer(callback).train()
    assert callback.guard.step == 5
    wrong = TrainerGuardCallback(allow={"*.nlp:output": "inf"})
    as_kept.error(ValueError, trainer(wrong).train)


class Lit(lightning.LightningModule):
    def __init__(self, bad_step):
        super().__init__()
        self.net, _ = make()
        self.bad_step = bad_step

    def training_step(self, batch, index):
        is_bad = index == self.bad_step
        with plant(self.net.blocks[0], INF) if is_bad else torch.enable_grad():
            return self.net(batch[0], y=batch[1])["loss"]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        interval = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": interval}


def fit(callback, bad_step, tmp_path, *others, **arguments):
    module = Lit(bad_step)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback, *others],
        default_root_dir=tmp_path,
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **arguments,
        },
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(5), batch_size=None))
    return module, trainer


@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_is_guarded(tmp_path):
    callback = of_lightning.LightningGuardCallback(on_overflow="skip")
    module, trainer = fit(callback, 2, tmp_path)
    assert callback.guard.num_skipped == 1
    assert callback.guard.step == 5
    assert callback.guard.last_report.verdict.origin.maker == "net.blocks.0"
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert all(p.isfinite().all() for p in module.parameters())
    assert hooks_of(module) == 0
    assert "lr_scheduler_step" not in vars(module)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_is_stopped(tmp_path):
    callback = of_lightning.LightningGuardCallback()
    with pytest.raises(NonFiniteError):
        fit(callback, 1, tmp_path)
    assert not callback.guard.enabled


class SpoilNet(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 3:
            pl_module.net.head.weight.data[0, 0] = NAN


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_only", [False, True])
def test_lightning_keeps_the_last_good_checkpoint(tmp_path, weights_only):
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = of_lightning.LightningGuardCallback(
        on_overflow="warn", watch=["gradients"]
    )
    saver = ModelCheckpoint(
        dirpath=tmp_path,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=1,
        save_weights_only=weights_only,
    )
    with pytest.raises(NonFiniteError, match=r"weight net\.head\.weight"):
        fit(callback, None, tmp_path, SpoilNet(), saver, enable_checkpointing=True)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=2.ckpt"]


@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_saves_again_afterwards(tmp_path):
    module, trainer = fit(of_lightning.LightningGuardCallback(), None, tmp_path)
    assert "save_checkpoint" not in vars(trainer)
    module.net.head.weight.data[0, 0] = NAN
    trainer.save_checkpoint(tmp_path / "any.ckpt")


@pytest.mark.filterwarnings("ignore")
def test_lightnings_loggers_get_the_metrics(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(
        of_lightning.LightningGuardCallback(on_overflow="skip"),
        3,
        tmp_path,
        logger=logger,
        log_every_n_steps=2,
    )
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    head, *lines = text.splitlines()
    column = head.split(",").index("overflow_fast/skipped_steps_total")
    assert [line.split(",")[column] for line in lines] == ["0.0", "1.0"]


@pytest.mark.parametrize(
    "name, callback, library",
    [
        ("trainer", "TrainerGuardCallback", "transformers"),
        ("lightning", "LightningGuardCallback", "lightning"),
    ],
)
def test_wrong_set_ups_are_told(name, callback, library, monkeypatch, as_kept):
    import importlib

    module = importlib.import_module(f"overflow_fast.integrations.{name}")
    with pytest.raises(ValueError, match="on_overflow must be"):
        getattr(module, callback)(on_overflow="stop")
    monkeypatch.delitem(sys.modules, module.__name__)
    needed = {"transformers": "transformers", "lightning": "lightning.pytorch"}
    monkeypatch.setitem(sys.modules, needed[library], None)
    as_kept.error(ImportError, importlib.import_module, module.__name__)


class Aside(torch.nn.Module):
    """Makes a nan beside the loss, on one rank."""

    def __init__(self):
        super().__init__()
        self.linear, self.aside = torch.nn.Linear(2, 1), torch.nn.Identity()
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        is_bad = self.calls == 2 and dist.get_rank() == 1
        self.aside(torch.tensor([NAN if is_bad else 1.0]))
        return {"loss": (self.linear(x) ** 2).mean(), "logits": labels}


def transformers_on_a_rank(folder):
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    # Accelerate asks for these, though the group is there.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.manual_seed(0)
    model = Aside()
    arguments = hf.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    data = [{"x": torch.randn(2), "labels": torch.zeros(1)} for _ in range(16)]
    callback = TrainerGuardCallback(on_overflow="skip")
    trainer = hf.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    return callback.guard.num_skipped, model.linear.weight.detach(), callback.guard.step


@pytest.mark.filterwarnings("ignore")
def test_ranks_of_transformers_trainer_decide_together(tmp_path):
    first, second = on_ranks(2, transformers_on_a_rank, tmp_path)
    assert first[0] == second[0] == 1
    assert first[2] == second[2] == 4
    assert torch.equal(first[1], second[1])
