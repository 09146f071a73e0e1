"""What does `compare` answer to planted differences, and to pairs that are healthy?

A pair is two short training runs that differ in the options of `train()` alone. Each
case has a pattern that its answer must match; healthy ones must have no answer, or one
that says what could not be compared. All run and are written as a table;
`python bench_compare_pairs.py WORD` prints those whose names have the word.
"""
# ruff: noqa: E501 (a case is a line)

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import progress, threads, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import overflow_fast

WIDTH, HEADS, WORDS, LENGTH, BATCH, STEPS = 32, 4, 61, 12, 8, 3
HEALTHY = ""  # the pattern of healthy pairs, but for those whose inputs differ

# The models.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = self.mix(*heads.chunk(3, 1)).transpose(1, 2).flatten(2)
        return self.out(mixed)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A small language model with learned positions and a tied head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """A small convolutional network with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.group, self.act = nn.GroupNorm(2, 8), nn.ReLU()
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.bn1(self.stem(x)))
        x = self.grow(self.group(x + self.act(self.bn2(self.conv(x)))))
        return self.head(x.amax((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(ids).transpose(0, 1))[0].transpose(0, 1))


class Encoder(nn.Module):
    """torch's own encoder, with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.masks = nn.Linear(WIDTH, WORDS), True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids < 6 if self.masks else None
        return self.head(self.layers(self.words(ids), src_key_padding_mask=mask))


class Experts(nn.Module):
    """A router that sends each row to the best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        weights, best = self.router(x).softmax(-1).max(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        chosen = made.gather(-1, best[..., None, None].expand(*x.shape, 1))[..., 0]
        return self.head(x + weights[..., None] * chosen)


def llama(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        **dict(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2)
        | dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS)
        | dict(max_position_embeddings=64, use_cache=False)
        | changes
    )
    return transformers.LlamaForCausalLM(config)


# A run.

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]


def words(step: int, seed: int = 0, num: int = BATCH, length: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(100 * seed + step)
    ids = torch.randint(0, WORDS, (num, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    shape = BATCH, 3, 8, 8
    targets = torch.randint(0, WORDS, (BATCH,), generator=generator)
    return torch.randn(shape, generator=generator), targets


def cross_entropy(model: Any, batch: Batch, **options: Any) -> torch.Tensor:
    found = model(batch[0])
    found = getattr(found, "logits", found)
    if found.dim() == 3:
        found = found.transpose(1, 2)
    return functional.cross_entropy(found.float(), batch[1], **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    defaults = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    return torch.optim.SGD(model.parameters(), **{**defaults, **options})


def train(
    folder: Path,
    make: Callable[[], nn.Module] = Decoder,
    change: Callable[[Any], Any] | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    batches: Callable[[int], Batch] = words,
    loss: Loss = cross_entropy,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    around: Callable[[], Any] = contextlib.nullcontext,
    micro: int = 1,
    share: int | None = None,
    prepare: Callable[[Any, int], Any] = lambda model, step: None,
    clears: bool = True,
    drop: bool = False,
    seed: int = 0,
    first: int = 0,
    after: Callable[[Any, Any, int], Any] = lambda model, optimizer, step: None,
    steps: int = STEPS,
) -> None:
    """Records a run.

    Args:
        folder: Gets the recording.
        make: Makes the model, from a seed of its own.
        change: Changes the model before the run.
        wrap: Wraps the model; the result is called and recorded.
        batches: Makes the batch of a step.
        loss: Calls the model.
        optimizer: Makes the optimizer.
        around: A context manager around the forward.
        micro: In how many parts a batch is given.
        share: What a part's loss is divided by; None: their number.
        prepare: Runs between backward and the optimizer's step.
        clears: Whether gradients are cleared before a step.
        drop: Whether dropout is on.
        seed: Of the random numbers of the run.
        first: The step from which on it is recorded, with number 0.
        after: Runs after a step.
        steps: How many steps are run.
    """
    torch.manual_seed(1)
    model = make().train()
    for each in model.modules():
        if isinstance(each, nn.Dropout) and not drop:
            each.p = 0.0
    model = (change and change(model)) or model
    called = wrap(model) if wrap else model
    stepper = optimizer(model)
    run = contextlib.ExitStack()
    torch.manual_seed(seed)
    for step in range(steps):
        if step == first:
            record = run.enter_context(overflow_fast.recording(folder, called))
        elif step > first:
            record.step()
        if clears:
            stepper.zero_grad()
        parts = zip(*(each.chunk(micro) for each in batches(step)), strict=True)
        for part in parts:
            with around():
                value = loss(called, part)
            (value / (share or micro)).backward()
        prepare(model, step)
        stepper.step()
        after(model, stepper, step)
    run.close()


# Changes of a model.


def at(path: str, **values: Any) -> Callable[[nn.Module], None]:
    """Sets attributes of a module."""

    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)

    return change


def method(path: str, code: Callable[..., Any], name: str = "forward") -> Any:
    """Gives a module another method: the original is the first argument, `self` next."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(path)
        own = getattr(module, name)
        bound = types.MethodType(lambda self, *args: code(own, self, *args), module)
        setattr(module, name, bound)

    return change


def weight(path: str, code: Callable[[torch.Tensor], Any]) -> Any:
    """Changes a parameter or buffer in place."""

    def change(model: nn.Module) -> None:
        module, _, name = path.rpartition(".")
        with torch.no_grad():
            tensor = getattr(model.get_submodule(module), name)
            made = code(tensor)
            if made is not None:
                tensor.copy_(made)

    return change


def put(path: str, make: Callable[[Any], nn.Module]) -> Callable[[nn.Module], None]:
    """Puts another module in the place of one."""

    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return change


def several(*changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for each in changes:
            each(model)

    return change


def result(path: str, code: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Changes what a module returns, in its own code."""
    return method(path, lambda own, self, *args: code(own(*args)))


def rounded(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounds float32 to fewer bits of mantissa; gradients pass."""

    def code(x: torch.Tensor) -> torch.Tensor:
        whole = x.detach().view(torch.int32)
        kept = (whole + (1 << (22 - bits))) & -(1 << (23 - bits))
        return x + (kept.view(torch.float32) - x).detach()

    return code


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is off by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.02


def attend(scale: float | None = None, mask: int | None = 0) -> Any:
    """Attention by hand: another scale, or a mask that is off by so many positions."""

    def code(own: Any, self: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        if mask is not None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(mask)
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ v

    return code


def positions(begin: int) -> Any:
    def code(own: Any, self: Any, ids: torch.Tensor) -> torch.Tensor:
        return own(ids + begin)

    return method("places", code)


def block(residual: Callable[[Any], Any], branch: Callable[[Any], Any]) -> Any:
    """Block 1 with other residual connections around its feed-forward."""

    def code(own: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        made = self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return residual(x) + branch(made)

    return method("blocks.1", code)


def swap(parent: str, *names: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner = model.get_submodule(parent)
        a, b = (getattr(owner, name) for name in names)
        setattr(owner, names[0], b)
        setattr(owner, names[1], a)

    return change


def gradients(code: Callable[[torch.Tensor], Any], only: str = "") -> Any:
    """Changes gradients between backward and step."""

    def prepare(model: nn.Module, step: int) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(only) and parameter.grad is not None:
                code(parameter.grad)

    return prepare


def clip(norm: float, **options: Any) -> Any:
    return lambda model, step: nn.utils.clip_grad_norm_(
        model.parameters(), norm, **options
    )


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def int8(factor: float = 1.0) -> Callable[[Any], None]:
    """Quantizes a decoder's feed-forwards; one scale may be wrong."""

    def change(model: Any) -> None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        is_up = lambda module, name: name.endswith(".up")  # noqa: E731
        quantize_(model, Int8WeightOnlyConfig(), is_up)
        model.blocks[1].up.weight.scale.mul_(factor)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dtype.is_floating_point)

    return change


def float8(x: torch.Tensor) -> torch.Tensor:
    return x + (x.detach().to(torch.float8_e4m3fn).to(x.dtype) - x.detach())


def to(dtype: torch.dtype) -> Any:
    return lambda model: model.to(dtype)


def autocast(dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda: torch.autocast("cpu", dtype)


def compiled(backend: Any, path: str = "blocks.1") -> Any:
    return lambda model: model.get_submodule(path).compile(backend=backend)


def bad_backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler that takes a GELU for a SiLU."""
    for node in graph.graph.nodes:
        if node.target is functional.gelu or node.target is torch._C._nn.gelu:
            node.target, node.kwargs = functional.silu, {}
    graph.recompile()
    return graph


def recompute(**options: Any) -> Any:
    return method(
        "blocks.1", lambda own, self, x: checkpoint(own, x, **options), "forward"
    )


# The pairs.


@dataclass
class Case:
    """A pair.

    Attributes:
        name: Its name.
        expected: A pattern of the answer.
        run: The options of the run, see `train()`.
        reference: Those of the reference.
        ranks: On how many ranks each of them runs; 0 for one process.
    """

    name: str
    expected: str
    run: dict[str, Any]
    reference: dict[str, Any]
    ranks: tuple[int, int] = (0, 0)
    is_healthy: bool = False


def pair(
    name: str, expected: str, both: Any = None, ranks: Any = 0, **run: Any
) -> Case:
    """A case: options of both runs, and those of the first one or of each as a tuple."""
    options: tuple[dict[str, Any], dict[str, Any]] = dict(both or {}), dict(both or {})
    for key, value in run.items():
        mine, its = value if isinstance(value, tuple) else (value, None)
        options[0][key] = mine
        if its is not None:
            options[1][key] = its
    whole = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    found = [{k: v for k, v in each.items() if v is not None} for each in options]
    return Case(name, expected, found[0], found[1], whole)


def layers(at: str) -> str:
    """The pattern of a forward that differs in a module."""
    return rf"^(In step 0, .*)?{at} \(.*\) (computes differently|gives)"


VISION = {"make": Vision, "batches": images}
BETWEEN = "Made between backward and step"
UPDATE = "the update"


def planted() -> Iterator[Case]:
    """Differences of one process."""
    # fmt: off
    yield pair('eps of one norm', 'norm2.*eps is 0\\.001', change=at('blocks.1.norm2', eps=0.001))
    yield pair('eps of one norm, 1e-5 against 1e-6', 'norm1.*eps is 1e-06', change=at('blocks.0.norm1', eps=1e-06))
    yield pair('p of dropout', 'blocks\\.1\\.drop.*p is 0\\.2', {'drop': True}, change=at('blocks.1.drop', p=0.2))
    yield pair('dropout in one layer is off', 'blocks\\.1\\.drop.*training is False', {'drop': True}, change=at('blocks.1.drop', training=False))
    yield pair('batch norm in eval mode', 'bn2.*training is False', VISION, change=at('bn2', training=False))
    yield pair('momentum of a batch norm', 'bn1.*momentum is 0\\.01', VISION, change=at('bn1', momentum=0.01))
    yield pair('running variance of a batch norm', 'bn1\\.running_var.*differs', {**VISION, 'change': lambda m: m.eval() and None}, change=several(lambda m: m.eval(), weight('bn1.running_var', lambda v: v * 1.1)))
    yield pair('groups of a group norm', 'group.*num_groups is 4', VISION, change=at('group', num_groups=4))
    yield pair('mode of an upsampling', 'grow.*mode is', VISION, change=at('grow', mode='nearest'))
    yield pair('padding of a convolution', 'conv.*padding_mode', VISION, change=put('conv', lambda m: _conv(m)))
    yield pair('GELU by tanh', 'blocks\\.2\\.act.*approximate', change=at('blocks.2.act', approximate='tanh'))
    yield pair('another activation', layers('blocks\\.2\\.act'), change=put('blocks.2.act', lambda m: nn.SiLU()))
    yield pair("attention's scale, in code", layers('blocks\\.1\\.attention'), change=method('blocks.1.attention', attend(1 / 8), 'mix'))
    yield pair('no mask', layers('blocks\\.0\\.attention'), change=method('blocks.0.attention', attend(mask=None), 'mix'))
    yield pair('a mask that shows the next word', layers('blocks\\.2\\.attention'), change=method('blocks.2.attention', attend(mask=1), 'mix'))
    yield pair('no mask for padding', 'masks is False|layers.*(computes|gives)', {'make': Encoder}, change=at('', masks=False))
    yield pair('positions from 1', 'places', change=positions(1))
    yield pair('positions of Llama from 1', 'model|rotary|position', {'make': llama, 'batches': words}, loss=lambda m, b: cross_entropy(lambda ids: m(ids, position_ids=torch.arange(1, LENGTH + 1)[None]), b))
    yield pair("Llama's rotary base", 'rotary_emb', make=(lambda: llama(rope_parameters={'rope_type': 'default', 'rope_theta': 500000.0}), llama))
    yield pair('no residual', layers('blocks\\.1'), change=block(lambda x: x * 0, lambda y: y))
    yield pair('residual by half', layers('blocks\\.1'), change=block(lambda x: x / 2, lambda y: y))
    yield pair('branch by 0.99', layers('blocks\\.1'), change=block(lambda x: x, lambda y: y * 0.99))
    yield pair('residual detached', 'blocks\\.1', change=block(lambda x: x.detach(), lambda y: y))
    yield pair('branch detached', 'no gradient reaches blocks\\.1\\.(drop|down)', change=block(lambda x: x, lambda y: y.detach()))
    yield pair('norm without gradients', 'norm2', change=method('blocks.1.norm2', lambda own, self, x: own(x).detach()))
    yield pair('a frozen layer', r'blocks\.1\.up.*requires_grad is False', change=lambda m: m.blocks[1].up.requires_grad_(False) and None)
    yield pair('wrong gradient of an operation', '^Backward of .*blocks\\.1', change=method('blocks.1.down', lambda own, self, x: Scaled.apply(own(x))))
    yield pair("a hook on a module's gradient", '^Backward of .*blocks\\.2', change=lambda m: m.blocks[2].norm2.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 1.1,)) and None)
    yield pair("a hook on a parameter's gradient", 'blocks\\.1\\.up\\.weight|blocks\\.1\\.up', change=lambda m: m.blocks[1].up.weight.register_hook(lambda g: g * 0.5) and None)
    yield pair('a transposed weight', 'attention\\.out\\.weight', change=weight('blocks.1.attention.out.weight', lambda w: w.t().clone()))
    yield pair('another init of a layer', 'blocks\\.0\\.down\\.weight', change=weight('blocks.0.down.weight', lambda w: w * 2))
    yield pair('one element of a weight', 'blocks\\.2\\.up\\.weight', change=weight('blocks.2.up.weight', lambda w: w.view(-1)[7].add_(0.05) and None))
    yield pair('weights of two blocks swapped', 'blocks\\.[01]\\..*differs', change=swap('blocks', '0', '1'))
    yield pair('two layers swapped in code', layers('blocks\\.1\\.norm2|blocks\\.1|blocks\\.1\\.norm1'), change=method('blocks.1', lambda own, self, x: _parallel(self, x)))
    yield pair('q and k swapped', layers('blocks\\.1\\.attention'), change=method('blocks.1.attention', lambda own, self, q, k, v: own(k, q, v), 'mix'))
    yield pair('tied head untied', 'head|tied|words', change=untied)
    yield pair('an extra norm in a block', 'blocks\\.1\\.act|blocks\\.1', change=put('blocks.1.act', lambda m: nn.Sequential(m, nn.LayerNorm(4 * WIDTH))))
    yield pair('a norm left out', 'blocks\\.1\\.norm2', change=put('blocks.1.norm2', lambda m: nn.Identity()))
    yield pair('a block left out', 'blocks\\.2|not compared|norm', change=lambda m: setattr(m, 'blocks', m.blocks[:2]))
    yield pair('embedding by sqrt(width)', 'words', change=result('words', lambda x: x * WIDTH ** 0.5))
    yield pair('logits with a soft cap', 'head', change=result('head', lambda x: 3 * torch.tanh(x / 3)))
    yield pair("forget gate's bias", 'lstm\\.bias', {'make': Recurrent}, change=weight('lstm.bias_ih_l0', lambda b: b + (torch.arange(4 * WIDTH) // WIDTH == 1)))
    yield pair('experts by the second best', layers('the model'), {'make': Experts}, change=method('', lambda own, self, ids: _second(self, ids)))
    yield pair('router in bfloat16', 'router', {'make': Experts}, change=method('router', lambda own, self, x: functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()))
    yield pair('one layer in TF32', 'blocks\\.1\\.up', change=method('blocks.1.up', lambda own, self, x: rounded(10)(own(rounded(10)(x)))))
    yield pair('one layer in bfloat16', 'blocks\\.0\\.down', change=method('blocks.0.down', lambda own, self, x: own(x.bfloat16().float()).bfloat16().float()))
    yield pair('one layer in float8', 'blocks\\.2\\.down', change=result('blocks.2.down', float8))
    yield pair('one layer in float8, both in bfloat16', 'blocks\\.2\\.down', {'change': to(torch.bfloat16)}, change=(several(to(torch.bfloat16), result('blocks.2.down', float8)), to(torch.bfloat16)))
    yield pair('noise of 1e-3 in a layer', 'blocks\\.1\\.attention', change=result('blocks.1.attention', lambda x: x * (1 + 0.001 * torch.randn_like(x))))
    yield pair('scale of an int8 weight', 'blocks\\.1\\.up\\.weight.*1\\.05', change=(int8(1.05), int8()))
    yield pair('int8 against float32 weights', 'up\\.weight|could not|not compared', change=int8())
    yield pair("attention's softmax over the heads", layers('blocks\\.1\\.attention'), change=method('blocks.1.attention', lambda own, self, q, k, v: (q @ k.transpose(-1, -2)).softmax(1) @ v, 'mix'))
    yield pair('a wrong compiler', layers('blocks\\.1'), change=(compiled(bad_backend), compiled('eager')))
    yield pair('checkpointed without random states', '^Backward of .*blocks\\.1', {'drop': True, 'change': recompute(use_reentrant=False)}, change=recompute(use_reentrant=False, preserve_rng_state=False))
    yield pair('label smoothing', 'gradient that the model was given', loss=lambda m, b: cross_entropy(m, b, label_smoothing=0.1))
    yield pair('loss by 2', 'gradient that the model was given.*2 times', loss=lambda m, b: 2 * cross_entropy(m, b))
    yield pair('labels not shifted', 'gradient that the model was given', loss=lambda m, b: cross_entropy(m, (b[0], b[0])))
    yield pair('ignored labels', 'gradient that the model was given', loss=lambda m, b: cross_entropy(m, b, ignore_index=int(b[1][0, 0])))
    yield pair('another order of the batch', 'given other inputs', batches=lambda step: tuple(t.flip(0) for t in words(step)))
    yield pair('another batch from step 1 on', 'step 1.*given other inputs', batches=lambda step: words(step, seed=min(step, 1)))
    yield pair('longer batches', 'given other inputs', batches=lambda step: words(step, length=LENGTH + 2))
    yield pair('one sample less', 'given other inputs', batches=lambda step: words(step, num=BATCH - 1))
    yield pair('clipping to another norm', BETWEEN, prepare=(clip(0.5), clip(1.0)))
    yield pair('clipping by the largest', BETWEEN, prepare=(clip(0.1, norm_type=float('inf')), clip(0.1)))
    yield pair('clipping by value', BETWEEN, prepare=lambda m, s: nn.utils.clip_grad_value_(m.parameters(), 0.001))
    yield pair('not unscaled', 'gradient that the model was given.*1024 times', loss=lambda m, b: 1024 * cross_entropy(m, b))
    yield pair('a loss by 1024, gradients unscaled', 'gradient that the model was given.*1024 times', **scaled_steps(10))
    yield pair('unscaled by another scale', '.*0\\.5 times.*' + BETWEEN, {'loss': lambda m, b: 1024 * cross_entropy(m, b), 'prepare': gradients(lambda g: g.div_(1024))}, prepare=gradients(lambda g: g.div_(2048)))
    yield pair('one gradient zeroed before the step', BETWEEN, prepare=gradients(torch.Tensor.zero_, 'blocks.1.up'))
    yield pair('parts summed, not averaged', '4 times|given', {'micro': 4}, share=1)
    yield pair('gradients not cleared', 'step 1.*(clear|accumul|gradient)', clears=False)
    yield pair('learning rate', UPDATE, optimizer=lambda m: adamw(m, lr=0.001))
    yield pair('weight decay', UPDATE, optimizer=lambda m: adamw(m, weight_decay=0.1))
    yield pair('betas', UPDATE, optimizer=lambda m: adamw(m, betas=(0.9, 0.95)))
    yield pair('epsilon of Adam', UPDATE, optimizer=lambda m: adamw(m, eps=0.0001))
    yield pair('momentum', UPDATE, optimizer=(lambda m: sgd(m, momentum=0.0), sgd))
    yield pair('Nesterov', UPDATE, optimizer=(lambda m: sgd(m, nesterov=True), sgd))
    yield pair('Adam for AdamW', UPDATE, optimizer=(lambda m: torch.optim.Adam(m.parameters(), 0.003, weight_decay=0.01), adamw))
    yield pair('a block that the optimizer lacks', UPDATE, optimizer=lambda m: torch.optim.AdamW([p for n, p in m.named_parameters() if 'blocks.2' not in n], 0.003))
    yield pair("resumed without the optimizer's state", UPDATE, {'first': 1}, after=(lambda m, o, s: o.state.clear() if s == 0 else None, None))
    yield pair('a weight written to after step 0', '(parameter|update)', after=lambda m, o, s: m.norm.weight.data.mul_(1.01) if s == 0 else None)
    yield pair('another seed of dropout', 'drop|random', {'drop': True}, seed=1)
    # fmt: on


def _conv(own: nn.Conv2d) -> nn.Conv2d:
    made = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
    made.load_state_dict(own.state_dict())
    return made


def _parallel(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward before the attention."""
    x = x + self.drop(self.down(self.act(self.up(self.norm2(x)))))
    return x + self.attention(self.norm1(x))


def _second(self: Any, ids: torch.Tensor) -> torch.Tensor:
    x = self.words(ids)
    weights, best = (each[..., 1] for each in self.router(x).softmax(-1).topk(2))
    made = torch.stack([expert(x) for expert in self.experts], -1)
    chosen = made.gather(-1, best[..., None, None].expand(*x.shape, 1))[..., 0]
    return self.head(x + weights[..., None] * chosen)


# Healthy pairs.


class Renamed(nn.Module):
    """A decoder with other names and another tree of modules."""

    def __init__(self) -> None:
        super().__init__()
        own = Decoder()
        self.embed = nn.ModuleDict({"token": own.words, "position": own.places})
        self.trunk = nn.Sequential(*own.blocks, own.norm)
        self.output = own.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = self.embed["position"](torch.arange(ids.shape[1]))
        return self.output(self.trunk(self.embed["token"](ids) + place))


class Wrapped(nn.Module):
    """A decoder within a module that computes the loss, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.inner(ids)
        loss = functional.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss, "logits": logits}


class SplitAttention(nn.Module):
    """Attention with three projections in place of one."""

    def __init__(self, own: Attention) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        parts = zip(own.qkv.weight.chunk(3), own.qkv.bias.chunk(3), strict=True)
        for layer, (w, b) in zip((self.q, self.k, self.v), parts, strict=True):
            layer.weight.data.copy_(w)
            layer.bias.data.copy_(b)
        self.out = own.out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter that is still zero."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.base = own
        self.a = nn.Linear(own.in_features, 2, bias=False)
        self.b = nn.Linear(2, own.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@dataclass
class Answer:
    logits: torch.Tensor


def parametrized(model: Any) -> None:
    """A weight that is computed of another, which is equal."""
    nn.utils.parametrize.register_parametrization(
        model.blocks[1].up, "weight", nn.Identity()
    )


def scaled_steps(power: int) -> dict[str, Any]:
    scale = 2.0**power
    loss = lambda m, b: scale * cross_entropy(m, b)  # noqa: E731
    return {"loss": loss, "prepare": gradients(lambda g: g.div_(scale))}


def whole_loss(model: Any, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(*batch)["loss"]
    return found


def frozen_bn(model: Any) -> None:
    model.eval()


def healthy() -> Iterator[Case]:
    # fmt: off
    yield pair('the same run twice', HEALTHY)
    yield pair('attention by hand', HEALTHY, change=method('blocks.1.attention', attend(), 'mix'))
    yield pair('attention by einsum in bfloat16', HEALTHY, {'change': to(torch.bfloat16)}, change=(several(to(torch.bfloat16), method('blocks.1.attention', attend(), 'mix')), to(torch.bfloat16)))
    yield pair('products by parts of the width', HEALTHY, change=method('blocks.1.up', lambda own, self, x: x[..., :20] @ self.weight[:, :20].t() + (x[..., 20:] @ self.weight[:, 20:].t() + self.bias)))
    yield pair('a norm by its formula', HEALTHY, change=method('blocks.1.norm2', lambda own, self, x: (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + self.eps).sqrt() * self.weight + self.bias))
    yield pair('GELU by its formula', HEALTHY, change=method('blocks.1.act', lambda own, self, x: x * 0.5 * (1 + torch.erf(x * 0.5 ** 0.5))))
    yield pair('two threads', HEALTHY, around=lambda: threads(2))
    yield pair('deterministic algorithms', HEALTHY, VISION, around=deterministic)
    yield pair('channels last', HEALTHY, VISION, change=lambda m: m.to(memory_format=torch.channels_last))
    yield pair('ReLU in place', HEALTHY, VISION, change=at('act', inplace=True))
    yield pair('frozen batch norms, folded', HEALTHY, {**VISION, 'change': frozen_bn}, change=(several(frozen_bn, method('bn1', lambda own, self, x: functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0, self.eps))), frozen_bn))
    yield pair('blocks compiled with eager', HEALTHY, change=compiled('eager'))
    yield pair('a block compiled with inductor', HEALTHY, change=compiled('inductor'))
    yield pair('the model compiled', HEALTHY, wrap=lambda m: torch.compile(m, backend='aot_eager'))
    yield pair('a block checkpointed', HEALTHY, change=recompute(use_reentrant=False))
    yield pair('a block checkpointed, with dropout', HEALTHY, {'drop': True}, change=recompute(use_reentrant=True))
    yield pair('AdamW, fused', HEALTHY, optimizer=lambda m: adamw(m, fused=True))
    yield pair('AdamW, one parameter at a time', HEALTHY, optimizer=(lambda m: adamw(m, foreach=False), lambda m: adamw(m, foreach=True)))
    yield pair('SGD, fused', HEALTHY, optimizer=(lambda m: sgd(m, fused=True), sgd))
    yield pair('two parts against a whole batch', 'given other inputs.*shapes', micro=2)
    yield pair('four parts against two', 'given other inputs.*shapes', micro=(4, 2))
    yield pair('gradients set to zero', HEALTHY, optimizer=zeroing)
    yield pair('clipping that clips nothing', HEALTHY, prepare=clip(1000000.0))
    yield pair('clipping with foreach', HEALTHY, prepare=(clip(0.1, foreach=True), clip(0.1, foreach=False)))
    yield pair('other names and tree', HEALTHY, make=(Renamed, Decoder))
    yield pair('within another module, loss inside', HEALTHY, make=(Wrapped, Decoder), loss=(whole_loss, cross_entropy))
    yield pair('three projections for one', HEALTHY, change=put('blocks.1.attention', SplitAttention))
    yield pair('a zero adapter', HEALTHY, change=put('blocks.1.up', Adapted), optimizer=(lambda m: sgd(m, lr=0.0001), lambda m: sgd(m, lr=0.0001)), steps=(1, 1))
    yield pair('an identity more', HEALTHY, change=put('blocks.1.act', lambda m: nn.Sequential(m, nn.Identity())))
    yield pair('dropout of 0 left out', HEALTHY, change=put('blocks.1.drop', lambda m: nn.Identity()))
    yield pair('a parametrized weight', HEALTHY, change=parametrized)
    yield pair('results in a data class', HEALTHY, change=result('', Answer))
    yield pair('autocast against float32', HEALTHY, around=autocast())
    yield pair('bfloat16 against float32', HEALTHY, change=to(torch.bfloat16))
    yield pair('float16 autocast against bfloat16', HEALTHY, around=(autocast(torch.float16), autocast()))
    yield pair('float64 against float32', HEALTHY, change=to(torch.float64), loss=lambda m, b: cross_entropy(m, b))
    yield pair('another seed, nothing drawn', HEALTHY, seed=3)
    yield pair('resumed from a checkpoint', HEALTHY, {'first': 1}, after=(resume, None))
    yield pair('Llama, eager attention', HEALTHY, make=(lambda: llama(attn_implementation='eager'), lambda: llama(attn_implementation='sdpa')))
    yield pair('Llama, positions given', HEALTHY, {'make': llama}, loss=lambda m, b: cross_entropy(lambda ids: m(ids, position_ids=torch.arange(LENGTH)[None]), b))
    yield pair('Llama, a mask of ones given', HEALTHY, {'make': llama}, loss=lambda m, b: cross_entropy(lambda ids: m(ids, attention_mask=torch.ones_like(ids)), b))
    yield pair("an encoder's fast path off", HEALTHY, {'make': Encoder, 'change': lambda m: m.eval() and None}, around=slow_path)
    yield pair('an LSTM in float64', HEALTHY, {'make': Recurrent}, change=to(torch.float64))
    yield pair('experts by loops', 'of another shape', {'make': Experts}, change=method('', lambda own, self, ids: _looped(self, ids)))
    # fmt: on


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def zeroing(model: nn.Module) -> torch.optim.Optimizer:
    made = adamw(model)
    own = made.zero_grad
    made.zero_grad = lambda: own(set_to_none=False)  # type: ignore[method-assign]
    return made


def resume(model: Any, optimizer: Any, step: int) -> None:
    """Writes a checkpoint and reads it."""
    if step:
        return
    path = Path(tempfile.mkstemp()[1])
    torch.save([model.state_dict(), optimizer.state_dict()], path)
    for each, state in zip((model, optimizer), torch.load(path), strict=True):
        each.load_state_dict(state)
    path.unlink()


def _looped(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Only the chosen expert's rows."""
    x = self.words(ids)
    weights, best = self.router(x).softmax(-1).max(-1)
    chosen = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        chosen[best == i] = expert(x[best == i])
    return self.head(x + weights[..., None] * chosen)


# Pairs with several ranks.


def ddp(**options: Any) -> Any:
    return lambda model: DistributedDataParallel(model, **options)


def summed(model: nn.Module) -> nn.Module:
    """Data parallel with a hook that sums gradients."""
    made = DistributedDataParallel(model)
    reduce = lambda bucket: dist.all_reduce(bucket.buffer(), async_op=True)  # noqa: E731
    made.register_comm_hook(
        None,
        lambda _, bucket: reduce(bucket).get_future().then(lambda f: f.value()[0]),
    )
    return made


def fsdp(model: Any, **options: Any) -> Any:
    for each in model.blocks:
        fully_shard(each, **options)
    return fully_shard(model, **options)


def tensor_parallel(change: Any = None) -> Any:
    """Feed-forwards split over the ranks."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def wrap(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for each in model.blocks:
            parallelize_module(each, mesh, plan)
        if change is not None:
            change(model)
        return model

    return wrap


def own_part(step: int) -> Batch:
    """The rank's part of a batch."""
    ids, labels = words(step)
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in (ids, labels))  # type: ignore[return-value]


def on_rank(rank: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: change(model) if dist.get_rank() == rank else None


def local(model: Any) -> None:
    """The gradients of FSDP2, clipped by the norm of a rank's part alone."""
    found = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack([g.norm() for g in found]).norm()
    for each in found:
        each.mul_(0.1 / norm)


def not_synchronized(model: Any) -> Any:
    made = DistributedDataParallel(model)
    made.require_backward_grad_sync = False
    return made


def stale_shard(model: Any) -> Any:
    made = fsdp(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            made.blocks[1].up.weight.to_local().mul_(1.05)
    return made


def doubled_bias(model: Any) -> None:
    """Each rank adds the bias of a row-wise layer."""
    with torch.no_grad():
        bias = model.blocks[1].down.bias
        bias.copy_(bias * 2)


SHARDED = {"batches": own_part, "wrap": fsdp}
REPLICATED = {"batches": own_part, "wrap": ddp()}


def planted_ranks() -> Iterator[Case]:
    # fmt: off
    yield pair('2 ranks: gradients summed', '(?=.*2 times).*(between backward and step|all-reduce)', REPLICATED, 2, wrap=summed)
    yield pair('2 ranks: rank 1 from another seed', 'rank 1|ranks 1', {**REPLICATED, 'wrap': ddp(init_sync=False)}, 2, change=on_rank(1, weight('blocks.1.up.weight', lambda w: w * 1.1)))
    yield pair("2 ranks: rank 1 has rank 0's batch", 'given other inputs on rank 1', REPLICATED, 2, batches=lambda step: tuple(t[:BATCH // 2] for t in words(step)))
    yield pair('2 ranks: gradients not averaged', 'between backward and step|all-reduce', REPLICATED, 2, wrap=not_synchronized)
    yield pair('2 ranks: eps on rank 1', 'norm2.*rank 1.*eps|eps.*rank 1', REPLICATED, 2, change=on_rank(1, at('blocks.1.norm2', eps=0.001)))
    yield pair('2 ranks: dropout of both alike', 'drop.*rank 1|random', {**REPLICATED, 'drop': True}, 2, around=(contextlib.nullcontext, seeded_by_rank))
    yield pair('2 ranks: FSDP2, a stale part', 'blocks\\.1\\.up\\.weight.*differs', SHARDED, 2, wrap=stale_shard)
    yield pair('2 ranks: FSDP2, gradients by 2', '(?=.*2 times).*Made between', SHARDED, 2, prepare=gradients(lambda g: g.mul_(2)))
    yield pair("2 ranks: FSDP2, clipped by a rank's norm", 'between backward and step', {**SHARDED, 'prepare': clip(0.1)}, 2, prepare=lambda m, s: local(m))
    yield pair('2 ranks: tensor parallel, a bias twice', 'blocks\\.1\\.down\\.bias', {'wrap': tensor_parallel()}, 2, wrap=tensor_parallel(doubled_bias))
    yield pair('2 ranks: tensor parallel, eps', 'blocks\\.1\\.norm2.*eps', {'wrap': tensor_parallel()}, 2, change=at('blocks.1.norm2', eps=0.001))
    yield pair('2 ranks: buffers not broadcast', 'bn1.*rank 1', {**VISION, 'batches': lambda s: images(s + 9 * dist.get_rank())}, 2, wrap=(ddp(broadcast_buffers=False), ddp()))
    yield pair('2 ranks against 1: a weight off in tensor parallel', 'blocks\\.1\\.up\\.weight', {}, (2, 0), wrap=tensor_parallel(weight('blocks.1.up.weight', lambda w: w * 1.1)), optimizer=(frozen_sgd, frozen_sgd))
    yield pair('2 ranks: learning rate on rank 1', 'rank 1.*update|update.*rank 1', REPLICATED, 2, optimizer=lambda m: adamw(m, lr=0.001 if dist.get_rank() else 0.003))
    # fmt: on


def frozen_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.0)


@contextlib.contextmanager
def seeded_by_rank() -> Iterator[None]:
    torch.manual_seed(dist.get_rank())
    yield


def healthy_ranks() -> Iterator[Case]:
    # fmt: off
    yield pair('2 ranks: small buckets', HEALTHY, REPLICATED, 2, wrap=ddp(bucket_cap_mb=0.01, gradient_as_bucket_view=True))
    yield pair('2 ranks: static graph', HEALTHY, REPLICATED, 2, wrap=ddp(static_graph=True))
    yield pair('2 ranks against 1: the same batch on both', HEALTHY, {}, (2, 0), wrap=ddp())
    yield pair('2 ranks against 1: half a batch each', HEALTHY, {}, (2, 0), wrap=ddp(), batches=own_part)
    yield pair('2 ranks: FSDP2 against data parallel', HEALTHY, {'batches': own_part}, 2, wrap=(fsdp, ddp()))
    yield pair('2 ranks: FSDP2 keeps its weights', HEALTHY, SHARDED, 2, wrap=lambda m: fsdp(m, reshard_after_forward=False))
    yield pair('2 ranks against 1: FSDP2', HEALTHY, {}, (2, 0), wrap=fsdp)
    yield pair('2 ranks against 1: tensor parallel', HEALTHY, {}, (2, 0), wrap=tensor_parallel())
    yield pair('2 ranks: tensor parallel against copies', HEALTHY, {}, 2, wrap=(tensor_parallel(), None))
    # fmt: on


# Running them.


def record_ranks(cases: Iterable[Case], top: Path, num: int) -> None:
    """Records the runs of all cases that have so many ranks, in forked processes."""
    cases, address = list(cases), top / f"store{num}"
    children = []
    for rank in range(num):
        child = os.fork()
        if not child:
            code = 0
            try:
                dist.init_process_group(
                    "gloo", f"file://{address}", rank=rank, world_size=num
                )
                for i, case in enumerate(cases):
                    try:
                        record_case(case, top, i, num)
                    except Exception:  # of both ranks; the others go on
                        traceback.print_exc()
                    dist.barrier()
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def record_case(case: Case, top: Path, i: int, num: int) -> None:
    """Records those runs of a case that have so many ranks."""
    for name, options, ranks in (
        ("a", case.run, case.ranks[0]),
        ("b", case.reference, case.ranks[1]),
    ):
        if ranks == num:
            train(top / f"{i}{name}", **options)
            torch._dynamo.reset()


OPEN = "could not be compared|or rounding"  # of an answer that leaves its cause open
COLUMNS = ["pair", "ranks", "differs", "answer", "first difference"]
NOTES = (
    "Two runs of three training steps of small models (a decoder with a tied head, a "
    "convolutional one, an LSTM, torch's encoder, a mixture of experts, Llama; AdamW or "
    "SGD, float32 if not said otherwise), recorded with fingerprints and compared. They "
    "are equal but for what `pair` says. `named`: the first difference is what was "
    "planted; `open`: the answer says that the cause may be what could not be compared, "
    "that the batch or a module's input has another shape, or rounding; `silent`: none "
    "is named; `false`: another one is. Ranks are those of the run and of the reference, over gloo.\n\n"
)


def answer_of(case: Case, top: Path, i: int) -> dict[str, Any]:
    """Compares the runs of a case, and judges the answer."""
    found = overflow_fast.compare(top / f"{i}a", top / f"{i}b")
    text = "" if found.first is None else str(found.first)
    answer = "false"
    if found.first is None:
        answer = "silent" if found.num_computed else "open"
    elif case.expected and re.search(case.expected, text):
        answer = "open" if case.is_healthy else "named"
    elif re.search(OPEN, text):
        answer = "open"
    return {
        "pair": case.name,
        "ranks": ""
        if case.ranks == (0, 0)
        else f"{case.ranks[0]} / {case.ranks[1] or 1}",
        "differs": "" if case.is_healthy else "yes",
        "answer": answer,
        "first difference": text,
        "verdict": found.verdict(),
        "said": " ".join(found.said),
    }


def answers(cases: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """The answers to all cases."""
    cases = list(cases)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        if any(2 in case.ranks for case in cases):
            record_ranks(cases, top, 2)
        for i, case in enumerate(cases):
            progress(case.name)
            record_case(case, top, i, 0)
            yield answer_of(case, top, i)


def count_text(rows: list[dict[str, Any]]) -> str:
    """How many planted and healthy pairs have each answer."""
    texts = []
    for differs, name in (("yes", "planted"), ("", "healthy")):
        own = [row for row in rows if row["differs"] == differs]
        counts = Counter(row["answer"] for row in own)
        ranks = sum(bool(row["ranks"]) for row in own)
        found = ", ".join(f"{n} {answer}" for answer, n in counts.most_common())
        texts.append(f"{len(own)} {name} pairs, {ranks} of them of ranks: {found}.")
    return " ".join(texts)


def main() -> None:
    warnings.simplefilter("ignore")
    cases = [*planted_ranks(), *planted()]
    cases += [replace(case, is_healthy=True) for case in (*healthy_ranks(), *healthy())]
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = []
    with threads(1):
        for row in answers(case for case in cases if re.search(word, case.name)):
            rows.append(row)
            if word:
                print(*row.values(), sep="\n    ", flush=True)
    counts = count_text(rows)
    print(counts)
    if not word:
        title = "Planted differences and healthy pairs"
        write("compare-pairs", title, f"{NOTES}{counts}", rows, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
