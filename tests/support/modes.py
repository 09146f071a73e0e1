"""Modes that count what a program calls while they are entered."""

import collections

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))
