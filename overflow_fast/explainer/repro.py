"""Scripts that run the failing operation, or its module, alone and fail there."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import math
import pprint
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..detector.observers import without_observers
from ..guard.report.explanation import Artifact, Explanation
from ..guard.undo.random import RandomStates
from ..scanner.tensors import host_copy, is_readable
from ..scanner.text import dtype_name
from ..scanner.tree import mapped, tensors_in
from ..torch_internals.module_internals import own_buffers, own_parameters, submodules
from ..torch_internals.replaying import without_cached_casts
from .op_trace import OpCall, TracedModule

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


# A script that runs the failing module alone, with its class, and fails.


MODULE_SCRIPT, MODULE_TENSORS = "repro_module.py", "repro_module.safetensors"
_OWN = set(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_MODULE_SCRIPT = '''"""{name} ({kind}) alone makes non-finite values: {cause}.

{line}
Needs torch, safetensors and the classes of {packages}; made with torch {version}.
The module is built from its state, without its constructor, and has no hooks.
"""

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

inf, nan = float("inf"), float("nan")


{builder}


SAVED = {saved}
given = load_file(Path(__file__).with_name("{tensors}"))
module = module_of(SAVED["module"], given)
args, kwargs = value_of(SAVED["args"], given), value_of(SAVED["kwargs"], given)
torch.manual_seed(0)
with ExitStack() as stack:
    for device, dtype in SAVED["autocast"]:
        stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
    output = module(*args, **kwargs)
results = tensors_of(output)
for result in results:
    bad = ~result.double().isfinite()
    print(f"{{result.dtype}}: {{int(bad.sum())}} of {{bad.numel()}} values not finite")
assert all(result.double().isfinite().all() for result in results), "not finite"
'''


def module_repro_of(
    call: TracedModule, found: Explanation, most: int
) -> Iterator[Artifact]:
    """Makes the script and the file of state and inputs; nothing if it would not fail.

    The module is built again on the CPU and run with the inputs that are written.
    Incurs a CPU-GPU sync.

    Args:
        call: The module's call, with its weights as they were.
        found: What is known of the failure.
        most: How many bytes of tensors may be written.
    """
    if not call.is_as_it_was:
        return
    writer = _Writer(most)
    try:
        saved = {
            "module": writer.module(call.module),
            "args": writer.value(list(call.args)),
            "kwargs": writer.value(dict(call.kwargs)),
            "autocast": [["cpu", dtype_name(dtype)] for _, dtype in call.autocast[:1]],
        }
        fails = _module_fails(saved, writer.tensors)
    except Exception:  # a class that is local, state that is no literal, another device
        return
    if fails:
        yield Artifact(MODULE_TENSORS, tensors=writer.tensors)
        yield Artifact(MODULE_SCRIPT, _module_script(call, found, saved, writer))


class _Writer:
    """Writes modules and values as literals; raises ValueError for what is none."""

    def __init__(self, most: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.packages: set[str] = set()
        self._most = most
        self._names: dict[int, str] = {}

    def module(self, module: nn.Module) -> dict[str, Any]:
        """See `module_of()`."""
        own = {k: v for k, v in vars(module).items() if k not in _OWN}
        return {
            "class": self._name_of(type(module)),
            "attributes": {name: self.value(value) for name, value in own.items()},
            "parameters": self._keys(own_parameters(module)),
            "buffers": self._keys(own_buffers(module)),
            "modules": {
                name: None if each is None else self.module(each)
                for name, each in submodules(module).items()
            },
        }

    def value(self, value: Any) -> Any:
        """See `value_of()`."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._put(value)}
        if isinstance(value, nn.Module):
            return {"module": self.module(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if type(value) is dict:
            pairs = value.items()
            return {"dict": [[self.value(k), self.value(e)] for k, e in pairs]}
        if type(value) is list:
            return {"list": [self.value(each) for each in value]}
        if type(value) in (tuple, torch.Size):
            return {"tuple": [self.value(each) for each in value]}
        if isinstance(value, enum.Enum):
            return {"name": f"{self._name_of(type(value))}.{value.name}"}
        if inspect.isroutine(value) or isinstance(value, type):
            return {"name": self._name_of(value)}
        state = {name: self.value(each) for name, each in vars(value).items()}
        return {"object": {"class": self._name_of(type(value)), "attributes": state}}

    def _keys(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        return {
            name: None if each is None else self._put(each)
            for name, each in tensors.items()
        }

    def _put(self, tensor: torch.Tensor) -> str:
        if not is_readable(tensor):
            raise ValueError(f"a {type(tensor).__name__}")
        name = self._names.get(id(tensor))
        if name is None:
            self._most -= tensor.nbytes
            if self._most < 0:
                raise ValueError("too large")
            name = self._names[id(tensor)] = f"tensor{len(self.tensors)}"
            self.tensors[name] = host_copy(tensor)
        return name

    def _name_of(self, value: Any) -> str:
        """The name by which it can be imported."""
        module, name = value.__module__, value.__qualname__
        known = sys.modules.get(module)
        if module == "__main__" or known is None or "<" in name:
            raise ValueError(f"{name} cannot be imported")
        path = f"{module}:{name}"
        if imported(path) is not value:
            raise ValueError(f"{path} is another one")
        self.packages.add(module.partition(".")[0])
        return path


def _module_fails(saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """True if the module that is built from what is written fails."""
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    module = module_of(saved["module"], given)
    args = value_of(saved["args"], given)
    kwargs = value_of(saved["kwargs"], given)
    with ExitStack() as stack:
        stack.enter_context(without_observers([module]))
        stack.enter_context(without_cached_casts(module.parameters()))
        stack.enter_context(RandomStates())
        torch.default_generator.manual_seed(0)  # of the CPU alone
        for device, dtype in saved["autocast"]:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        results = tensors_of(module(*args, **kwargs))
        return any(not bool(each.double().isfinite().all()) for each in results)


def _module_script(
    call: TracedModule, found: Explanation, saved: dict[str, Any], writer: _Writer
) -> str:
    kind = type(call.module)
    op = found.op
    line = f"{op.place}: {op.code}" if op is not None and op.code else ""
    functions: list[Any] = [imported, value_of, module_of, tensors_of]
    builder = "\n\n".join(inspect.getsource(each) for each in functions).strip()
    return _MODULE_SCRIPT.format(
        name=call.name or "the model",
        kind=f"{kind.__module__}.{kind.__qualname__}",
        cause=found.cause,
        line=(line or "The line is not known.").replace("\\", "\\\\").replace('"', "'"),
        packages=", ".join(sorted(writer.packages | {"torch"})),
        version=torch.__version__,
        builder=builder,
        saved=pprint.pformat(saved, width=88, sort_dicts=False),
        tensors=MODULE_TENSORS,
    )


# Builds a module from its class and state, without its constructor. The script has a
# copy of this code: it needs torch alone.


def imported(path: str) -> Any:
    """Imports what has a name such as "package.module:Class.function"."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def value_of(saved: Any, given: dict[str, torch.Tensor]) -> Any:
    """A value that was written as a literal; of all but plain ones, a dict."""
    if not isinstance(saved, dict):
        return saved
    ((kind, value),) = saved.items()
    if kind == "tensor":
        return given[value]
    if kind == "module":
        return module_of(value, given)
    if kind == "dict":
        return {value_of(k, given): value_of(each, given) for k, each in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(value_of(e, given) for e in value)
    if kind == "object":
        found = imported(value["class"])
        made = found.__new__(found)
        for name, each in value["attributes"].items():
            made.__dict__[name] = value_of(each, given)
        return made
    return getattr(torch, value) if kind == "dtype" else imported(value)


def module_of(saved: dict[str, Any], given: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module with its attributes, parameters, buffers and submodules."""
    kind = imported(saved["class"])
    module: torch.nn.Module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, each in saved["attributes"].items():
        module.__dict__[name] = value_of(each, given)
    for name, key in saved["parameters"].items():
        value = None if key is None else torch.nn.Parameter(given[key])
        module.register_parameter(name, value)
    for name, key in saved["buffers"].items():
        module.register_buffer(name, None if key is None else given[key])
    for name, each in saved["modules"].items():
        module.add_module(name, None if each is None else module_of(each, given))
    return module


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The float tensors in what a module returned."""
    found, waiting, opened = list[torch.Tensor](), [value], list[Any]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found += [each] * each.is_floating_point()
            continue
        if isinstance(each, (type, torch.nn.Module)) or any(each is o for o in opened):
            continue
        opened.append(each)
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
        else:
            waiting += getattr(each, "__dict__", {}).values()
            slots = [getattr(base, "__slots__", ()) for base in type(each).__mro__]
            names = [n for of in slots for n in ([of] if isinstance(of, str) else of)]
            waiting += [getattr(each, name, None) for name in names]
    return found
