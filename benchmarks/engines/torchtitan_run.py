"""Trains a small Llama by torchtitan's Trainer on this rank; see engine_runs.py."""

import dataclasses
import functools
import logging
import tempfile

import torch
import torch.distributed as dist
import torchtitan_cpu  # noqa: F401
from engine_runs import BAD, MICRO, STEPS, Training, fault_of, faulty, play_all
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, model_registry
from torchtitan.trainer import Trainer

from overflow_fast.integrations.torchtitan import guard_with

LENGTH, SAMPLES = 16, 2


class Model(Llama3Model):
    """A Llama with a fault in its last layer, where a batch has a mark."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        fault: str = ""

    def __init__(self, config):
        super().__init__(config)

        def before(layer, args):
            mark = self.mark.to(args[0].dtype)
            return faulty(args[0], mark, config.fault), *args[1:]

        last = self.layers[str(len(config.layers) - 1)]
        last.feed_forward.register_forward_pre_hook(before)

    def forward(self, tokens, positions=None, attention_masks=None, mark=None):
        self.mark = mark
        return super().forward(tokens, positions, attention_masks)


class Batches(BaseDataLoader):
    """The batches of all steps of a rank; that of a case left out is not there."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        case: object = None

    def __init__(self, config, dp_rank, dp_world_size, **kwargs):
        self.case, self.rank, self.world = config.case, dp_rank, dp_world_size

    def __iter__(self):
        for number in range(STEPS):
            if number == BAD and self.case.fault == "left out":
                continue
            is_last = self.rank == self.world - 1  # the ranks of a TP group share it
            fault = fault_of(self.case, number, dist.get_world_size() - 1) * is_last
            for micro in range(MICRO):
                seed = (number * MICRO + micro) * self.world + self.rank
                words = torch.Generator().manual_seed(seed)
                tokens = torch.randint(0, 64, (SAMPLES, LENGTH + 1), generator=words)
                mark = torch.ones(())
                if fault and micro == 0:
                    mark = mark * (float("nan") if fault == "input" else 100.0)
                yield {"input": tokens[:, :-1], "mark": mark}, tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return 64


class Run(Trainer):
    """Keeps the losses, and leaves a step out where a case does."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    case = losses = None

    def init_distributed(self):
        return dims_of(self.config.parallelism)

    def train_step(self, batches):
        if self.step - 1 != BAD or self.case.fault != "left out":
            super().train_step(batches)

    def forward_backward_step(self, **kwargs):
        loss = super().forward_backward_step(**kwargs)
        self.losses.append(loss.item())
        return loss


made = {}


def dims_of(parallelism):
    """The groups of a layout, made once: gloo has threads for each."""
    sizes = dataclasses.astuple(parallelism)
    if sizes not in made:
        made[sizes] = ParallelDims.from_config(parallelism, dist.get_world_size())
        made[sizes].build_mesh()
    return made[sizes]


def config_of(case):
    spec = model_registry("debugmodel", attn_backend="varlen")
    plain = {
        f.name: getattr(spec.model, f.name) for f in dataclasses.fields(spec.model)
    }
    plain["layers"] = plain["layers"][:2]
    for layer in plain["layers"]:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = Model.Config(**plain, fault=case.fault)
    tensor, replicas = (2 if name in case.layout else 1 for name in ("TP2", "HSDP"))
    num_batches = dist.get_world_size() // tensor * MICRO
    half = "bfloat16" if case.dtype == "bf16" else "float32"
    return Run.Config(
        model_spec=spec,
        dump_folder=tempfile.gettempdir(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(case=case),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=dataclasses.replace(default_adamw(lr=1e-3), implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20, total_steps=40),
        training=TrainingConfig(
            local_batch_size=SAMPLES,
            global_batch_size=SAMPLES * num_batches,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=half,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicas,
            tensor_parallel_degree=tensor,
            spmd_backend="partial_dtensor",  # torch 2.13 has no other
        ),
        metrics=MetricsProcessor.Config(log_freq=BAD + 1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )


@dataclasses.dataclass
class TitanTraining(Training):
    trainer: object = None

    def train(self, case, losses, after_step):
        self.trainer.case, self.trainer.losses = case, losses
        self.trainer.checkpointer.save = lambda *args, **kwargs: after_step()
        self.trainer.train()


def make(case):
    trainer = config_of(case).build()

    def state():
        states = [
            each
            for optimizer in trainer.optimizers
            for kept in optimizer.state.values()
            for each in kept.values()
        ]
        weights = [p for part in trainer.model_parts for p in part.parameters()]
        local = [getattr(t, "_local_tensor", t) for t in [*weights, *states]]
        return [*local, trainer.lr_schedulers.state_dict()]

    def facts():
        world, sharing = dist.get_world_size(), trainer.parallel_dims.tp
        return {
            "engine_skipped": 0,
            "global_steps": trainer.step,
            "bad_rank": f"rank {world - sharing} of {world}",
        }

    with torch.device("meta"):
        model = trainer.model_config.build()  # for its names
    make_guard = functools.partial(guard_with, trainer)
    return TitanTraining(model, make_guard, None, state, facts, 1, trainer=trainer)


if __name__ == "__main__":
    logging.getLogger("torchtitan").setLevel(logging.WARNING)
    dist.init_process_group("gloo")
    play_all(make)
