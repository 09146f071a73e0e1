"""A script that runs the failing operation alone, and fails there."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..guard.report.explanation import Explanation
from ..guard.report.findings import Artifact
from ..scanner.tensors import is_readable
from ..scanner.tree import mapped, tensors_in
from .op_trace import OpCall

SCRIPT, TENSORS = "repro.py", "repro.safetensors"
_SCRIPT = '''"""{title}

{line}
Needs torch and safetensors{needs}; made with torch {version}.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

inf, nan = float("inf"), float("nan")
given = load_file(Path(__file__).with_name("{tensors}"), device="{device}")
output = torch.ops.{op}(
{arguments})
outputs = output if isinstance(output, (tuple, list)) else [output]
results = [r for r in outputs if r is not None and r.is_floating_point()]
for result in results:
    bad = ~result.double().isfinite()
    print(f"{{result.dtype}}: {{int(bad.sum())}} of {{bad.numel()}} values not finite")
assert all(result.double().isfinite().all() for result in results), "not finite"
'''


def repro_of(op: OpCall, found: Explanation, most: int) -> Iterator[Artifact]:
    """Makes the script and the file of its inputs; nothing if it would not fail.

    The operation is run with the inputs that are written. Incurs a CPU-GPU sync.

    Args:
        op: The operation, with what it was given.
        found: What is known of it.
        most: How many bytes of tensors may be written.
    """
    if not op.is_as_it_was:
        return
    tensors = tensors_in((op.args, op.kwargs))
    if not all(map(is_readable, tensors)):
        return
    if sum(tensor.nbytes for tensor in tensors) > most:
        return
    for device in dict.fromkeys(["cpu", *(str(t.device) for t in tensors)]):
        named: dict[str, torch.Tensor] = {}
        copied = functools.partial(_copied, op, device, named)
        kinds = torch.Tensor, torch.device
        args, kwargs = mapped((op.args, op.kwargs), copied, kinds=kinds)
        written = _code_of(args, kwargs, named)
        kept = {name: tensor.cpu().clone() for name, tensor in named.items()}
        if written is not None and _fails(op, args, kwargs):
            yield Artifact(TENSORS, tensors=kept)
            yield Artifact(SCRIPT, _script(op, found, device, written))
            return


def _copied(op: OpCall, device: str, named: dict[str, torch.Tensor], value: Any) -> Any:
    """A tensor's copy, which gets a name, or the device in place of another."""
    if isinstance(value, torch.device):
        return torch.device(device)
    before = op.kept.get(id(value), value).detach()
    copy = before.to(device).resolve_conj().resolve_neg().contiguous().clone()
    named[f"input{len(named)}"] = copy
    return copy


def _fails(op: OpCall, args: Any, kwargs: Any) -> bool:
    """True if it gives a non-finite value again."""
    given = mapped((args, kwargs), torch.clone)
    try:
        output = op.func(*given[0], **given[1])
    except Exception:
        return False
    return any(
        not bool(each.isfinite().all())
        for each in tensors_in(output)
        if each.is_floating_point() and each.itemsize > 1
    )


def _code_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, torch.Tensor]
) -> str | None:
    """The arguments as code, or None if one of them cannot be written."""
    names = {id(tensor): name for name, tensor in named.items()}
    try:
        lines = [f"    {_text(each, names)},\n" for each in args]
        lines += [f"    {key}={_text(each, names)},\n" for key, each in kwargs.items()]
    except ValueError:
        return None
    return "".join(lines)


def _text(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        return f'given["{names[id(value)]}"]'
    if isinstance(value, (list, tuple)):
        texts = ", ".join(_text(each, names) for each in value)
        return f"[{texts}]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    known = (bool, int, float, str, type(None), torch.dtype, torch.layout)
    if isinstance(value, (*known, torch.memory_format)):
        return repr(value)
    raise ValueError(f"a {type(value).__name__}")


def _script(op: OpCall, found: Explanation, device: str, arguments: str) -> str:
    where = f" in {found.module}" if found.module else ""
    line = found.op.code if found.op is not None else ""
    place = f"{found.op.place}: {line}" if found.op is not None and line else ""
    return _SCRIPT.format(
        title=f"{op.name}{where} makes non-finite values: {found.cause}.",
        line=(place or "The line is not known.")
        .replace("\\", "\\\\")
        .replace('"', "'"),
        needs="" if device == "cpu" else f" and a device {device}",
        version=torch.__version__,
        tensors=TENSORS,
        device=device,
        op=str(op.func),
        arguments=arguments.rstrip(),
    )
