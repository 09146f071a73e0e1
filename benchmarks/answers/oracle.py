"""The truth by experiment: the first operation that makes what its inputs lack."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .failure import Failure, Run, train

_FAMILIES = str(Path(__file__).parent / "families")
WRAPPED = "_orig_mod."  # what torch.compile prepends
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@dataclass
class Seen:
    """The first finding of an experiment.

    Attributes:
        how: "made" by an operation of finite inputs, "read" from a tensor that was bad.
        phase: The part of the step.
        op: The operation, or in backward the node, such as "aten.exp", "ExpBackward0".
        module: The module whose code it is of.
        line: The number of the line in the failure's file, or 0.
        origin: What the bad tensor that was read is.
    """

    how: str = ""
    phase: str = ""
    op: str = ""
    module: str = ""
    line: int = 0
    origin: list[str] = field(default_factory=list)


def line_of_failure() -> int:
    """The line of a failure's file that runs, within autograd's engine or anywhere."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename.startswith(_FAMILIES):
            return int(frame.f_lineno)
        frame = frame.f_back
    return 0


class _Nodes(TorchFunctionMode):
    """Names autograd's nodes by the line and module that made them."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.oracle = oracle

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.oracle.name_nodes(output)
        return output


class Oracle(TorchDispatchMode):
    """Looks at the inputs and outputs of every operation of a run.

    Args:
        run: The run.
        from_backward: Whether all outputs of the forward are finite.
    """

    def __init__(self, run: Run, from_backward: bool) -> None:
        super().__init__()
        self.seen: Seen | None = None
        self._from_backward = from_backward
        self.phase = "data"
        self._modules: list[str] = [""]
        self._nodes: dict[Any, tuple[str, int]] = {}
        self._origins: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no memory is given out twice
        self._run = run
        for name, module in run.model.named_modules():
            name = name.removeprefix(WRAPPED)
            module.register_forward_pre_hook(
                lambda module, args, name=name: self._modules.append(name)
            )
            module.register_forward_hook(self._leave)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self.name_nodes(output)
        self._modules.pop()

    def name_nodes(self, output: Any) -> None:
        """Names the nodes that were made since the last call."""
        here = self._modules[-1], line_of_failure()
        waiting = [t.grad_fn for t in _tensors(output)]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = here
                waiting += [each for each, _ in node.next_functions]

    def mark(self, phase: str) -> None:
        """Begins a part of a step."""
        self.phase = phase
        if phase == "forward":
            for name, tensor in [
                *self._run.model.named_parameters(),
                *self._run.model.named_buffers(),
            ]:
                self._origins[_memory(tensor)] = f"weights {name.removeprefix(WRAPPED)}"

    def on_batch(self, batch: Any) -> None:
        """Notes which memory is the batch's."""
        keys = {"batch": batch}
        if isinstance(batch, tuple):
            keys = {f"batch[{i}]": each for i, each in enumerate(batch)}
        keys = batch if isinstance(batch, dict) else keys
        for key, value in keys.items():
            for tensor in _tensors(value):
                self._kept.append(tensor)
                self._origins[_memory(tensor)] = f"data {key}".strip()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = _tensors((args, kwargs))
        kinds = [_kinds(t) for t in given]
        bad = [t for t, kind in zip(given, kinds, strict=True) if kind]
        before = set().union(*kinds)
        output = func(*args, **(kwargs or {}))
        if self.seen is not None or self.phase in ("data", "after"):
            return output
        made = _tensors(output)
        base = func._schema.name.split("::")[1]
        if base in _EMPTY:
            self._kept += made
            origin = f"unwritten {line_of_failure()}"
            self._origins.update({_memory(t): origin for t in made})
            return output
        written = [*made, *(given if func._schema.is_mutable else [])]
        after = set().union(*(_kinds(t) for t in written))
        origins = [
            self._origins[_memory(t)] for t in bad if _memory(t) in self._origins
        ]
        if self._from_backward:  # what the forward made was masked
            is_test = base in ("abs", "detach")  # what isfinite is made of; saved masks
            if after and self.phase == "backward" and not is_test:
                self._see("made", func, [])
            return output
        if origins and after - {"-inf"}:
            self._see("read", func, origins)
        elif after - before - ({"-inf"} if _is_mask(func, args, kwargs) else set()):
            self._see("made", func, [])
        elif not after and func._schema.is_mutable:
            for tensor in given:
                is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
                origin = self._origins.get(_memory(tensor), "")
                if is_whole and origin.startswith("unwritten"):
                    self._origins.pop(_memory(tensor))
        return output

    def _see(self, how: str, func: Any, origins: list[str]) -> None:
        node: Any = torch._C._current_autograd_node()
        line, module = line_of_failure(), self._modules[-1]
        name = func._schema.name.replace("::", ".")
        if node is not None:
            module, made_at = self._nodes.get(node, ("?", 0))
            line, name = line or made_at, name if line else node.name()
        self.seen = Seen(how, self.phase, name, module, line, origins)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kinds(tensor: Tensor) -> set[str]:
    if not tensor.is_floating_point() or not tensor.numel():
        return set()
    values = tensor.detach()
    found = {
        "nan": values.isnan(),
        "inf": values == torch.inf,
        "-inf": values == -torch.inf,
    }
    return {kind for kind, where in found.items() if bool(where.any())}


def _is_mask(func: Any, args: Any, kwargs: Any) -> bool:
    """True if the code itself asks for -inf."""
    numbers = [n for n in tree_leaves((args, kwargs)) if isinstance(n, float)]
    return -torch.inf in numbers or "lift_fresh" in str(func)


def look(failure: Failure) -> Seen | None:
    """Runs a failure under the oracle; returns what it saw first."""
    torch.manual_seed(0)
    run = failure.build(False)
    is_masked = failure.phase == "backward" and failure.kind != "unwritten"
    oracle = Oracle(run, is_masked)
    eager = torch.compiler.set_stance("force_eager")
    with eager, _Nodes(oracle), oracle:
        for _ in train(run, mark=oracle.mark, on_batch=oracle.on_batch):
            if oracle.seen is not None:
                break
    return oracle.seen


def base_of(op: str) -> str:
    """A name that an operation, its node and its in-place form share."""
    name = op.split("::")[-1].removeprefix("aten.").split(".")[0]
    name = re.sub(r"Backward\d*$", "", name).lower()
    return name.replace("foreach", "").replace("_", "")
