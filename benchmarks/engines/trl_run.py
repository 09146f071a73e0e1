"""Trains a small random model by TRL's trainers on this rank; see engine_runs.py."""

import itertools
import os

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from engine_runs import BAD, HALF, MICRO, STEPS, fault_of, faulty, play_all
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_training import QUIET, SCHEDULE, TrainerTraining, in_order
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "</s>", "<unk>", "bad", *(f"w{i}" for i in range(28))]
SAMPLES = 2  # of a micro-batch
KINDS = {
    "SFT": (SFTTrainer, SFTConfig, {"max_length": 16}),
    "DPO": (DPOTrainer, DPOConfig, {"max_length": 16}),
    "GRPO": (
        GRPOTrainer,
        GRPOConfig,
        {"max_completion_length": 4, "num_generations": 2, "shuffle_dataset": False},
    ),
}


def make_tokenizer():
    words = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)


class Model(LlamaForCausalLM):
    """A model with a fault in its last layer, where a sample has the word "bad"."""

    def plant(self, fault):
        def before_mlp(mlp, args):
            return faulty(args[0], self.mark.to(args[0].dtype), fault), *args[1:]

        def before(model, args, kwargs):
            tokens = kwargs.get("input_ids", args[0] if args else None)
            # Only as a prompt's first word: the model may sample it.
            is_bad = (tokens[:, 0] == WORDS.index("bad")).any()
            is_made = torch.is_grad_enabled() != (fault == "generation")
            if not is_made or tokens.shape[1] == 1:
                is_bad &= False
            large = 100.0 if fault in ("overflow", "backward") else float("nan")
            self.mark = torch.where(is_bad, large, 1.0)

        self.register_forward_pre_hook(before, with_kwargs=True)
        self.model.layers[-1].mlp.register_forward_pre_hook(before_mlp)


def samples_of(kind, case):
    """The samples of all steps, in the order in which Accelerate deals them out."""
    found = []
    for number in range(STEPS):
        if number == BAD and case.fault == "left out":
            continue
        # GRPO deals out the prompts of a step rank by rank, and repeats each.
        order = itertools.product(range(MICRO), range(dist.get_world_size()))
        if kind == "GRPO":
            order = ((0, rank) for rank in range(dist.get_world_size()))
        for micro, rank in order:
            for sample in range(SAMPLES):
                is_bad = fault_of(case, number, rank) and (micro, sample) == (0, 1)
                first = "bad" if is_bad else f"w{sample}"
                prompt = f"{first} w{number} w{micro + 6} w{rank + 9}"
                if kind == "SFT":
                    found.append({"text": f"{prompt} w20 w21"})
                elif kind == "DPO":
                    found.append(
                        {"prompt": prompt, "chosen": " w22", "rejected": " w23"}
                    )
                else:
                    found.append({"prompt": prompt})
    return Dataset.from_list(found)


def reward(completions, **kwargs):
    """The number of different words of a completion."""
    return [float(len(set(each.split()))) for each in completions]


def make(case):
    for shared in (AcceleratorState, GradientState):
        shared._reset_state()
    kind = case.layout
    cls, config, options = KINDS[kind]
    shape = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32}
    plain = LlamaConfig(**shape, **sizes, pad_token_id=0, eos_token_id=1)
    model, reference = (
        c(plain).to(HALF[case.dtype]) for c in (Model, LlamaForCausalLM)
    )
    model.plant(case.fault)
    arguments = config(
        os.path.join(os.environ.get("TMPDIR", "/tmp"), "trl"),
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=MICRO,
        max_steps=STEPS - (case.fault == "left out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **SCHEDULE,
        **QUIET,
        **options,
    )
    given = {"GRPO": {"reward_funcs": reward}, "DPO": {"ref_model": reference}}
    trainer = in_order(cls, deals=kind != "GRPO")(
        model,
        args=arguments,
        train_dataset=samples_of(kind, case),
        processing_class=make_tokenizer(),
        **given.get(kind, {}),
    )

    def state():
        optimizer = trainer.optimizer
        if optimizer is None:
            return []
        states = [each for kept in optimizer.state.values() for each in kept.values()]
        schedule = trainer.lr_scheduler.get_last_lr()
        return [*model.parameters(), *filter(torch.is_tensor, states), schedule]

    def facts():
        return {"engine_skipped": 0, "global_steps": trainer.state.global_step}

    return TrainerTraining.of(trainer, model, state, facts)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    play_all(make)
