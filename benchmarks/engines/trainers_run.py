"""Trains a small model by DeepSpeed under Trainer or Accelerate; see engine_runs.py."""

import os

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
import deepspeed
import torch
import torch.distributed as dist
import transformers.training_args
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.accelerator import get_accelerator
from deepspeed_run import Net, config_of, groups_of, state_of
from engine_runs import BAD, HALF, MICRO, STEPS, Training, fault_of, play_all
from torch.utils.data import Dataset
from trainer_training import QUIET, SCHEDULE, TrainerTraining, in_order
from transformers import Trainer, TrainingArguments

from overflow_fast.integrations.accelerate import guard_with

SAMPLES = 4  # of a micro-batch


def batch_of(case, number, micro, rank):
    """A micro-batch of a rank, with the case's fault on the last one."""
    world = dist.get_world_size()
    seed = (number * MICRO + micro) * world + rank
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(seed))
    fault = fault_of(case, number, rank)
    if fault and micro == 0:
        x[1, 2] = float("nan") if fault == "input" else 500.0
    return x


class Batches(Dataset):
    """The samples of all steps, in the order in which Accelerate deals them out."""

    def __init__(self, case):
        numbers = [n for n in range(STEPS) if n != BAD or case.fault != "left out"]
        self.samples = [
            sample
            for number in numbers
            for micro in range(MICRO)
            for rank in range(dist.get_world_size())
            for sample in batch_of(case, number, micro, rank)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {"x": self.samples[index]}


class Model(Net):
    """The model as Trainer wants it: it casts its input and returns a dict."""

    def forward(self, x):
        return {"loss": super().forward(x.to(HALF[self.dtype]))}


def make_model(case):
    model = Model(case.fault)
    model.dtype = case.dtype
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


# Accelerate.


def make_accelerate(case):
    accelerator = Accelerator(
        gradient_accumulation_steps=MICRO,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(case)),
        mixed_precision="no" if case.dtype == "fp32" else case.dtype,
    )
    model, optimizer, schedule = make_model(case)
    engine, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def step(number, fault):
        losses = []
        for micro in range(MICRO):
            with accelerator.accumulate(engine):
                loss = engine(batch_of(case, number, micro, dist.get_rank()))["loss"]
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return losses

    def make_guard(**options):
        return guard_with(accelerator, engine, optimizer, **options)

    def state():
        return [*state_of(engine, optimizer.optimizer), schedule.state_dict()]

    return Training(model, make_guard, step, state, lambda: counts(engine))


def counts(engine):
    return {"engine_skipped": engine.skipped_steps, "global_steps": engine.global_steps}


# Trainer.


def make_trainer(case):
    model, optimizer, _ = make_model(case)
    is_left_out = case.fault == "left out"
    arguments = TrainingArguments(
        os.path.join(os.environ.get("TMPDIR", "/tmp"), "trainer"),
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=MICRO,
        max_steps=STEPS - is_left_out,
        deepspeed=config_of(case),
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        accelerator_config={"use_configured_state": True},
        remove_unused_columns=False,
        **SCHEDULE,
        **QUIET,
    )
    trainer = in_order(Trainer)(
        model, arguments, train_dataset=Batches(case), optimizers=(optimizer, None)
    )

    def state():
        engine = trainer.deepspeed
        if engine is None:
            return []
        schedule = trainer.lr_scheduler.get_last_lr()
        return [*state_of(engine, engine.optimizer), schedule]

    def facts():
        skipped = counts(trainer.deepspeed)
        return {**skipped, "global_steps": trainer.state.global_step}

    return TrainerTraining.of(trainer, model, state, facts)


def make(case):
    for shared in (AcceleratorState, GradientState):
        shared._reset_state()
    makes = {"Accelerate": make_accelerate, "Trainer": make_trainer}
    return makes[case.layout.split()[0]](case)


if __name__ == "__main__":
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow, but there
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles it
    PartialState(backend="gloo")
    play_all(make)
