"""The scan in compiled code: as an operator, and as a maximum that inductor fuses."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from bench_guard import KEEPS_MEMORY
from common import Results, progress
from models import Batch, Make, adam, made, step_of, words
from timing import QUICK, summary
from torch import fx
from torch._inductor import config, metrics
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import fallbacks

from overflow_fast import OverflowGuard

ATEN = torch.ops.aten
KINDS = ("bare", "operator", "fused")
NOTES = (
    "A training step with fused AdamW, compiled by inductor for the CPU, one thread: "
    "`bare`, with what a guard of activations and their gradients puts into the "
    "graphs (`operator`), and with `max(abs(x))` in the graph in place of each tensor "
    "that inductor's own kernels make (`fused`; the operator gets the maximum, and "
    "what libraries make and inputs as before). CPU time of single steps in changing "
    "orders: `adds` is the median over 24 rounds of the share added to the bare step "
    "of the round, `of the fastest` compares the fastest steps. `MiB scanned` is what "
    "the operator reads; the last three columns are what frames list, by who makes "
    "it. Only floating-point tensors are reduced. Each model is made from its config, "
    "with four blocks."
)
COLUMNS = [
    *("model", "dtype", "scan", "bare ms", "adds", "quartiles", "of the fastest"),
    *("kernels", "MiB scanned", "MiB inductor", "MiB library", "MiB input"),
]
# Kernels of libraries, to which nothing can be fused, beside inductor's own fallbacks.
LIBRARY = {ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.convolution}
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
        if self.kind == "fused":
            with graph.inserting_before(node):
                tensors = [maximum_of(graph, tensor) for tensor in tensors]
        node.args = (*others, tensors)


def maximum_of(graph: fx.Graph, tensor: fx.Node) -> fx.Node:
    """Returns the node of a tensor's largest magnitude, or itself if not to be fused.

    It has the tensor's dtype: rounding is monotonic, so it is the maximum of what is
    stored.
    """
    value = tensor.meta["val"]
    is_plain = value.is_floating_point() and value.numel() > 0 and value.dim() > 0
    if maker(tensor) != "inductor" or not is_plain:
        return tensor
    magnitude = graph.call_function(ATEN.abs.default, (tensor,))
    magnitude.meta["val"] = value.abs()
    maximum = graph.call_function(ATEN.amax.default, (magnitude, []))
    maximum.meta["val"] = magnitude.meta["val"].amax()
    return maximum


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


def gpt2() -> tuple[torch.nn.Module, Batch]:
    sizes = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 4096}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, use_cache=False))
    return model, words(4096, (2, 128))


def llama() -> tuple[torch.nn.Module, Batch]:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, use_cache=False))
    return model, words(4096, (2, 128))


def vit() -> tuple[torch.nn.Module, Batch]:
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 6}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes))
    return model, pictures(2, 224)


def convnet() -> tuple[torch.nn.Module, Batch]:
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
    """A model of its own, compiled with what `kind` puts into its graphs."""

    def __init__(self, make: Make, dtype: torch.dtype, kind: str) -> None:
        torch._dynamo.reset()
        metrics.reset()
        scans = Scans(kind)
        model, batch = made(make, dtype)
        optimizer = adam(model)
        guard = None
        if kind != "bare":
            watch = ("activations", "grad_outputs")
            guard = OverflowGuard(model, optimizer, watch=watch, explain=False)
        model.compile()
        self.step = step_of(model, batch, optimizer, dtype)
        with config.patch(post_grad_custom_post_pass=scans):
            self.step()
        self.facts: dict[str, Any] = {"kernels": metrics.generated_kernel_count}
        if guard is None:
            return
        before = guard.coverage().bytes_scanned
        self.step()
        counts = {"scanned": guard.coverage().bytes_scanned - before, **scans.bytes_of}
        self.facts |= {f"MiB {name}": f"{n / 2**20:.1f}" for name, n in counts.items()}


def cpu_times(
    steps: dict[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Times steps in turn, in a new order each round: the CPU time of each."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    order = list(steps)
    for _ in range(rounds):
        random.shuffle(order)
        for kind in order:
            begin = time.process_time()
            steps[kind]()
            times[kind].append(time.process_time() - begin)
    return times


def measure(results: Results, name: str, dtype: torch.dtype) -> None:
    competitors: dict[str, Competitor] = {}
    for kind in KINDS:
        progress(f"{name}, {dtype}: compiling {kind}")
        competitors[kind] = Competitor(MODELS[name], dtype, kind)
    steps = {kind: competitor.step for kind, competitor in competitors.items()}
    cpu_times(steps, 3)
    times = cpu_times(steps, 3 if QUICK else 24)
    for kind, competitor in competitors.items():
        row = {"model": name, "dtype": str(dtype)[6:], "scan": kind}
        results.add(row | shares(times, kind) | competitor.facts)


def shares(times: dict[str, list[float]], kind: str) -> dict[str, Any]:
    """The time of a kind of step beside the bare ones of the same rounds."""
    pairs = zip(times[kind], times["bare"], strict=True)
    low, middle, high = statistics.quantiles([a / b - 1 for a, b in pairs], n=4)
    fastest = min(times[kind]) / min(times["bare"]) - 1
    return {
        "bare ms": f"{statistics.median(times['bare']) * 1e3:.0f}",
        "adds": f"{middle:.2%}",
        "quartiles": f"{low:.1%} to {high:.1%}",
        "of the fastest": f"{fastest:.2%}",
        "seconds": summary(times[kind]),
    }


def main() -> None:
    config.fx_graph_cache = False  # kernels are counted; what g++ has made is kept
    torch._functorch.config.enable_autograd_cache = False
    torch.set_num_threads(1)
    results = Results("fused-scan", "The scan in compiled code", NOTES, COLUMNS)
    wanted = [argument for argument in sys.argv[1:] if argument in MODELS]
    for name in wanted or MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            measure(results, name, dtype)
    results.finish()


if __name__ == "__main__":
    if not KEEPS_MEMORY.items() <= os.environ.items():
        os.environ.update(KEEPS_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
