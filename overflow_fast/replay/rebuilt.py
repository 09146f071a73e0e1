"""Builds a module from its class and state, without its constructor.

A script that runs a module alone has a copy of this code: it needs torch alone.
"""

import importlib
from typing import Any

import torch

inf, nan = float("inf"), float("nan")


def named(path: str) -> Any:
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
        found = named(value["class"])
        made = found.__new__(found)
        for name, each in value["attributes"].items():
            made.__dict__[name] = value_of(each, given)
        return made
    return getattr(torch, value) if kind == "dtype" else named(value)


def module_of(saved: dict[str, Any], given: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module with its attributes, parameters, buffers and submodules."""
    kind = named(saved["class"])
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
