"""Trains a small GPT by Megatron-core on this rank; see engine_runs.py."""

import megatron_cpu  # noqa: F401
import torch
import torch.distributed as dist
from engine_runs import HALF, MICRO, Training, faulty, play_all
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from overflow_fast import OverflowGuard

LENGTH, WORDS = 16, 64


class Model(GPTModel):
    """A GPT with a fault in its last layer, where a batch has a mark."""

    fault = ""

    def forward(self, tokens, positions, mask, mark, labels=None):
        self.mark = mark
        return super().forward(tokens, positions, mask, labels=labels)

    def plant(self, fault):
        def before(mlp, args):
            return faulty(args[0], self.mark.to(args[0].dtype), fault), *args[1:]

        self.decoder.layers[-1].mlp.register_forward_pre_hook(before)


made = []  # the sizes of the groups that there are


def initialize(layout):
    """Makes the groups of a layout, if the case before had others.

    Megatron ends none of its groups, and gloo has threads for each.
    """
    sizes = [2 if name in layout else 1 for name in ("TP2", "PP2")]
    if made != sizes:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(*sizes)
        made[:] = sizes
    model_parallel_cuda_manual_seed(123)
    return sizes


def make(case):
    tensor_size, pipeline_size = initialize(case.layout)
    dtype = HALF[case.dtype]
    shares = case.layout == "distributed optimizer"
    precision = {"bf16": case.dtype == "bf16", "fp16": case.dtype == "fp16"}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **precision,
    )
    model = Model(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    if parallel_state.is_pipeline_last_stage():
        model.plant(case.fault)
    sums = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=shares
    )
    wrapped = DistributedDataParallel(config, sums, Float16Module(config, model))
    power = {"search": 40, "persistent": 1}.get(case.fault, 8)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            params_dtype=dtype,
            use_distributed_optimizer=shares,
            clip_grad=1.0,
            initial_loss_scale=2.0**power,
            min_loss_scale=1.0,
            hysteresis=1,
            **precision,
        ),
        [wrapped],
    )
    schedule = OptimizerParamScheduler(
        *(optimizer, 0.0, 1e-3, 1e-4, 0, 100, "linear"), *(0.01, 0.01, 100, "constant")
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    forward_and_backward = get_forward_backward_func()
    guards = []
    counts = {"engine_skipped": 0, "global_steps": 0}
    positions = torch.arange(LENGTH)[None].expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]

    def batches(number, fault):
        data_rank = parallel_state.get_data_parallel_rank()
        for micro in range(MICRO):
            seed = (number * MICRO + micro) * dist.get_world_size() + data_rank
            words = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, WORDS, (2, LENGTH + 1), generator=words)
            mark = torch.ones(())
            if fault and micro == 0:
                mark = mark * (float("nan") if fault == "input" else 100.0)
            yield tokens, mark

    def forward(batches, model):
        tokens, mark = next(batches)
        labels = tokens[:, 1:]
        output = model(tokens[:, :-1], positions, mask, mark, labels=labels)

        def reduce(output):
            loss = output.float().mean()
            if guards and case.watch == "tripwire":
                guards[-1].record(loss=loss)
            return loss, {"loss": loss.detach()}

        return output, reduce

    def step(number, fault):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = forward_and_backward(
            forward_step_func=forward,
            data_iterator=batches(number, fault),
            model=[wrapped],
            num_microbatches=MICRO,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        is_updated, _norm, _zeros = optimizer.step()
        counts["global_steps"] += 1
        counts["engine_skipped"] += not is_updated
        if is_updated:
            schedule.step(increment=1)
        return [float(each["loss"]) for each in reduced]

    def state():
        tensors = [*wrapped.parameters(), optimizer.get_loss_scale()]
        for each in optimizer.chained_optimizers:
            for group in each.optimizer.param_groups:
                tensors += group["params"]
            for kept in each.optimizer.state.values():
                tensors += filter(torch.is_tensor, kept.values())
            if each.grad_scaler is not None:
                tensors.append(each.grad_scaler.state_dict())
        return [*tensors, schedule.num_steps]

    def make_guard(**options):
        guards.append(OverflowGuard(wrapped, optimizer, **options))
        return guards[-1]

    return Training(model, make_guard, step, state, lambda: counts)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    play_all(make)
