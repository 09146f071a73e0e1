"""The scan in compiled code: as an operator, and as a maximum that inductor fuses."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import timing
import torch
import transformers as hf
from bench_guard import KEEPS_MEMORY
from common import Results, progress
from floor import plain_read
from models import Batch, Make, adam, made, step_of, words
from timing import QUICK, race, summary
from torch import fx, nn
from torch._inductor import config, metrics
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import fallbacks
from torch.profiler import ProfilerActivity, profile

from overflow_fast import OverflowGuard

ATEN = torch.ops.aten
ROUNDS = 12
CALLS = 60
ROW = 256  # elements
KINDS = ("bare", "operator", "fused")
NOTES = (
    "A training step with fused AdamW, compiled by inductor for the CPU, one thread: "
    "`bare`, with what a guard of activations and their gradients puts into the "
    "graphs (`operator`), and with `max(abs(x))` in the graph in front of the "
    "operator, which then reads that: of each tensor that inductor makes in flat "
    "loops (`fused`: no reduction stands in the pointwise operations that it can be "
    "fused with), or of each row of every tensor (`rows`, tried for GPT-2 in "
    f"float32: the innermost dimensions with at least {ROW} elements). Each "
    "competitor has a process of its own, since dynamo would let one run the code of "
    "another. `adds` is the sum of the next two columns, in "
    "shares of the fastest bare step: what inductor's kernels take beyond those of "
    "the bare step, and what the operators take; of each kernel and each call the "
    f"fastest of {ROUNDS} steps counts, in changing orders, and libraries' matrix "
    "products, which vary by more than all of it, do not. `plain read` reads as many "
    "bytes as the operator, out of cache. `paired steps` is the CPU time of whole "
    f"steps: the median over {ROUNDS} rounds of the share added to the bare step of "
    "the round, with quartiles. The last three columns are what frames list, by who "
    "makes it. Only floating-point tensors are reduced. Each model is made from its "
    "config, with one block (the convnet: four stages of one)."
)
COLUMNS = [
    *("model", "dtype", "scan", "bare ms", "adds", "kernels", "operators"),
    *("plain read", "paired steps", "quartiles", "kernels made"),
    *("MiB scanned", "MiB inductor", "MiB library", "MiB input"),
]
# Kernels of libraries, to which nothing can be fused, beside inductor's own fallbacks.
LIBRARY = {ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.convolution}
REDUCTIONS = {
    *(ATEN.sum, ATEN.mean, ATEN.var_mean, ATEN.var, ATEN.amax, ATEN.amin, ATEN.prod),
    *(ATEN.any, ATEN.argmax, ATEN.cumsum, ATEN.max, ATEN.min),
}
VIEWS = {
    *(ATEN.view, ATEN._unsafe_view, ATEN.reshape, ATEN.permute, ATEN.transpose),
    *(ATEN.squeeze, ATEN.unsqueeze, ATEN.expand, ATEN.alias, ATEN.t),
}


class Scans(CustomGraphPass):
    """Changes in a graph what the frames' operators are given.

    Args:
        kind: One of `KINDS`.

    Attributes:
        bytes_of: The bytes of the tensors that frames list, by who makes them.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.bytes_of: Counter[str] = Counter()

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if torch.ops.overflow_fast.frame.default in node.args:
                self._change(graph, node)

    def uuid(self) -> None:
        return None

    def _change(self, graph: fx.Graph, node: fx.Node) -> None:
        *others, tensors = node.args
        for tensor in tensors:
            self.bytes_of[maker(tensor)] += tensor.meta["val"].nbytes
        if self.kind in ("fused", "rows"):
            with graph.inserting_before(node):
                tensors = [maximum_of(graph, each, self.kind) for each in tensors]
        node.args = (*others, tensors)


def maximum_of(graph: fx.Graph, tensor: fx.Node, kind: str) -> fx.Node:
    """Returns the node of a tensor's largest magnitudes, or itself if not to be fused.

    They have the tensor's dtype: rounding is monotonic, so they are the maxima of
    what is stored.
    """
    value = tensor.meta["val"]
    if not value.is_floating_point() or value.numel() == 0 or value.dim() == 0:
        return tensor
    dims = inner_dims(value) if kind == "rows" else []
    if not (dims if kind == "rows" else is_flat(tensor)):
        return tensor
    magnitude = graph.call_function(ATEN.abs.default, (tensor,))
    magnitude.meta["val"] = value.abs()
    maximum = graph.call_function(ATEN.amax.default, (magnitude, dims))
    maximum.meta["val"] = magnitude.meta["val"].amax(dims)
    return maximum


def is_flat(tensor: fx.Node) -> bool:
    """True if inductor makes a tensor in loops that reduce nothing else."""
    return maker(tensor) == "inductor" and not any(
        getattr(node.target, "overloadpacket", None) in REDUCTIONS
        for nodes_of in (lambda node: node.all_input_nodes, lambda node: node.users)
        for node in fusible(tensor, nodes_of)
    )


def fusible(
    node: fx.Node, nodes_of: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """The nodes on one side of a node as far as inductor's own kernels go."""
    found, rest = {node}, [node]
    while rest:
        for each in nodes_of(rest.pop()):
            is_ours = torch.ops.overflow_fast.frame.default in each.args
            if each not in found and not is_ours and maker(each) == "inductor":
                found.add(each)
                rest.append(each)
    return found


def inner_dims(value: torch.Tensor) -> list[int]:
    """The innermost dimensions in memory with at least `ROW` elements, never all."""
    order = sorted(range(value.dim()), key=value.stride)
    dims: list[int] = []
    while len(dims) < len(order) - 1 and math.prod(value.shape[d] for d in dims) < ROW:
        dims.append(order[len(dims)])
    return sorted(dims)


def maker(node: fx.Node) -> str:
    """Who makes a tensor: "inductor", "library", or "input" if it is one."""
    while node.op == "call_function":
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in VIEWS and not is_item(node):
            is_library = packet in LIBRARY or node.target in fallbacks
            return "library" if is_library else "inductor"
        node = node.args[0]
    return "input"


def is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and "getitem" in str(node.target)


def gpt2() -> tuple[nn.Module, Batch]:
    sizes = {"n_embd": 512, "n_layer": 1, "n_head": 8, "vocab_size": 4096}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, use_cache=False))
    return model, words(4096, (2, 128))


def llama() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, use_cache=False))
    return model, words(4096, (2, 128))


def vit() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 6}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes))
    return model, pictures(2, 224)


def convnet() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [1, 1, 1, 1]}
    settings = {"layer_type": "basic", "embedding_size": 64}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, **settings))
    return model, pictures(4, 128)


def pictures(count: int, size: int) -> Batch:
    return {
        "pixel_values": torch.randn(count, 3, size, size),
        "labels": torch.ones(count).long(),
    }


MODELS: dict[str, Make] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "ViT": vit,
    "ResNet": convnet,
}


class Competitor:
    """A model compiled with what `kind` puts into its graphs, in this process."""

    def __init__(self, name: str, dtype: torch.dtype, kind: str) -> None:
        scans = Scans(kind)
        model, batch = made(MODELS[name], dtype)
        optimizer = adam(model)
        guard = None
        if kind != "bare":
            watch = ("activations", "grad_outputs")
            guard = OverflowGuard(model, optimizer, watch=watch, explain=False)
        model.compile()
        self._step = step_of(model, batch, optimizer, dtype)
        with config.patch(post_grad_custom_post_pass=scans):
            self._step()
        self.facts: dict[str, Any] = {"kernels made": metrics.generated_kernel_count}
        self._step()
        if guard is None:
            return
        before = guard.coverage().bytes_scanned
        self._step()
        counts = {"scanned": guard.coverage().bytes_scanned - before, **scans.bytes_of}
        self.facts |= {f"MiB {name}": f"{n / 2**20:.1f}" for name, n in counts.items()}

    def cpu_seconds(self) -> float:
        """Runs a step; returns its CPU time."""
        begin = time.process_time()
        self._step()
        return time.process_time() - begin

    def events(self) -> list[tuple[str, float]]:
        """Runs a step; returns its kernels and our operators, with seconds."""
        return events_of(self._step)


def events_of(function: Callable[[], object]) -> list[tuple[str, float]]:
    """Calls a function; returns inductor's kernels and our operators, with seconds."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    named = [(part_of(e.name), e.time_range.elapsed_us() / 1e6) for e in events]
    return [(part, seconds) for part, seconds in named if part]


OPERATORS = ("overflow_fast::frame", "overflow_fast::scan")


def part_of(event: str) -> str:
    if "cpp_fused" in event:
        return "kernels"
    return "operators" if event in OPERATORS else ""


def serve(pipe: Connection, name: str, dtype: torch.dtype, kind: str) -> None:
    """Runs what it is sent, in the process of one competitor."""
    config.fx_graph_cache = False  # kernels are counted; what g++ has made is kept
    config.cpp.enable_kernel_profile = True
    torch._functorch.config.enable_autograd_cache = False
    torch.set_num_threads(1)
    competitor = Competitor(name, dtype, kind)
    pipe.send(competitor.facts)
    while method := pipe.recv():
        pipe.send(getattr(competitor, method)())


class Remote:
    """A competitor in a process of its own.

    In one process dynamo would let all of them run the code of the first whose guards
    hold, and they are alike.
    """

    def __init__(self, name: str, dtype: torch.dtype, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = (other, name, dtype, kind)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self.facts = self._pipe.recv()

    def call(self, method: str) -> Any:
        self._pipe.send(method)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("")
        self._process.join()


def in_turn(competitors: dict[str, Remote], method: str, rounds: int) -> dict[str, Any]:
    """Calls a method of each in turn, in a new order each round."""
    found: dict[str, list[Any]] = {kind: [] for kind in competitors}
    order = list(competitors)
    for _ in range(rounds):
        random.shuffle(order)
        for kind in order:
            found[kind].append(competitors[kind].call(method))
    return found


def fastest(steps: list[list[tuple[str, float]]]) -> Counter[str]:
    """Sums the fastest run of each kernel and operator, by what they are."""
    total: Counter[str] = Counter()
    for runs in zip(*steps, strict=True):
        total[runs[0][0]] += min(seconds for _, seconds in runs)
    return total


def kinds_of(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    is_first = name == "GPT-2" and dtype is torch.float32
    return (*KINDS, "rows") if is_first else KINDS


def measure(results: Results, name: str, dtype: torch.dtype) -> None:
    competitors: dict[str, Remote] = {}
    for kind in kinds_of(name, dtype):
        progress(f"{name}, {dtype}: compiling {kind}")
        competitors[kind] = Remote(name, dtype, kind)
    rounds = 3 if QUICK else ROUNDS
    in_turn(competitors, "cpu_seconds", 2)
    times = in_turn(competitors, "cpu_seconds", rounds)
    parts = {k: fastest(e) for k, e in in_turn(competitors, "events", rounds).items()}
    for kind, competitor in competitors.items():
        row = {"model": name, "dtype": str(dtype)[6:], "scan": kind}
        row |= shares(times, parts, kind) | competitor.facts
        if scanned := float(competitor.facts.get("MiB scanned", 0)):
            share = read_seconds(int(scanned * 2**20)) / min(times["bare"])
            row["plain read"] = f"{share:.2%}"
        results.add(row)
        competitor.close()


def read_seconds(count: int) -> float:
    """The fastest plain read of this many bytes that no cache holds."""
    read, data = plain_read(), torch.ones(2**28, dtype=torch.uint8)
    parts = [part for part in data.split(count & ~15) if part.numel() == count & ~15]
    return min(race({"read": timing.in_turn(read, parts)}, ROUNDS)["read"])


def shares(
    times: dict[str, list[float]], parts: dict[str, Counter[str]], kind: str
) -> dict[str, Any]:
    """The time of a kind of step beside the bare ones."""
    pairs = zip(times[kind], times["bare"], strict=True)
    low, middle, high = statistics.quantiles([a / b - 1 for a, b in pairs], n=4)
    bare = min(times["bare"])
    kernels = parts[kind]["kernels"] - parts["bare"]["kernels"]
    operators = parts[kind]["operators"]
    return {
        "bare ms": f"{bare * 1e3:.0f}",
        "kernels": f"{kernels / bare:.2%}",
        "operators": f"{operators / bare:.2%}",
        "adds": f"{(kernels + operators) / bare:.2%}",
        "paired steps": f"{middle:.1%}",
        "quartiles": f"{low:.1%} to {high:.1%}",
        "seconds": summary(times[kind]),
        "parts": parts[kind],
    }


PRODUCERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1,
    "GELU (tanh)": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "layer norm": lambda x: nn.functional.layer_norm(x, [512]),
}
MAXIMA: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "alone": lambda _: None,
    "whole adds": lambda y: y.abs().amax(),
    "rows add": lambda y: y.abs().amax(-1),
    "bits of rows add": lambda y: (y.view(BITS[y.dtype]) & MOST[y.dtype]).amax(-1),
}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
MOST = {dtype: torch.iinfo(bits).max for dtype, bits in BITS.items()}
OF_KERNELS = (
    "Microseconds of one thread: inductor's kernels for an operation with an output "
    "of 256 x 512, what a maximum of magnitudes in the same graph adds to them (of "
    "the whole tensor, of each row, of each row's bits as integers), and the guard's "
    "scan of that output by an operator of its own, which finds minimum, infs and "
    "nans, too. All of it is in cache. Of each kernel the fastest of many calls."
)


def measure_kernels() -> None:
    columns = ["operation", "dtype", *MAXIMA, "scan"]
    results = Results("fused-scan-kernels", "A maximum fused", OF_KERNELS, columns)
    for name, produce in PRODUCERS.items():
        for dtype in BITS:
            progress(f"{name}, {dtype}")
            row = {"operation": name, "dtype": str(dtype)[6:]}
            results.add(row | kernel_row(produce, torch.randn(256, 512).to(dtype)))
    results.finish()


def kernel_row(
    produce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> dict[str, str]:
    torch._dynamo.reset()  # else the rows share their code, and its limit
    slots, output = torch.tensor([[-1, 0, 0, 0]]), produce(x)
    seconds = {}
    for name, maximum in MAXIMA.items():
        compiled = torch.compile(with_maximum(produce, maximum))
        seconds[name] = fastest_parts(functools.partial(compiled, x))["kernels"]
        if name != "alone":
            seconds[name] -= seconds["alone"]
    scan = functools.partial(torch.ops.overflow_fast.scan, slots, 0, [output])
    seconds["scan"] = fastest_parts(scan)["operators"]
    return {name: f"{1e6 * each:.1f}" for name, each in seconds.items()}


def with_maximum(
    produce: Callable[[torch.Tensor], torch.Tensor],
    maximum: Callable[[torch.Tensor], torch.Tensor | None],
) -> Callable[[torch.Tensor], object]:
    def run(x: torch.Tensor) -> object:
        output = produce(x)
        return output, maximum(output)

    return run


def fastest_parts(function: Callable[[], object]) -> Counter[str]:
    """Sums the fastest run of each kernel and operator in many calls of a function."""
    function()
    return fastest([events_of(function) for _ in range(CALLS)])


def main() -> None:
    torch.set_num_threads(1)
    config.cpp.enable_kernel_profile = True
    results = Results("fused-scan", "The scan in compiled code", NOTES, COLUMNS)
    wanted = [argument for argument in sys.argv[1:] if argument in MODELS]
    if not wanted or "kernels" in sys.argv:
        measure_kernels()
    for dtype in (torch.float32, torch.bfloat16):
        for name in wanted or MODELS:
            measure(results, name, dtype)
    results.finish()


if __name__ == "__main__":
    if not KEEPS_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEPS_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
