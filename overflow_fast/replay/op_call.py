"""One call of an operation: what it reads and what it writes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.memory import storages
from ..torch_internals.replay_internals import schema_of, storage_id
from ..torch_internals.tensor_internals import version_of
from ..tree import find, tensors_in
from .kinds import is_float

# These write to all of their first argument, whatever was in it.
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("exponential_", "set_", "resize_", "log_normal_", "cauchy_", "geometric_"),
}
# Whatever they return or write to comes from other ranks, and may not be there yet.
_COMMUNICATION = ("c10d.", "_c10d_functional", "c10d_functional", "_dtensor.")
_WAITS = "wait_tensor"
CONSTANT = "lift_fresh"  # what `torch.tensor(1.0)` ends with: it makes what it is given
# Batch norm's schemas do not say that it writes to these.
_STATISTICS = ("running_mean", "running_var")


class OpCall:
    """A call of an operation that is about to run.

    Args:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        name: Its name, such as "aten.div.Tensor".
        base: The same without namespace and overload, such as "div".
        written: The tensors that it writes to.
        kept: What was in those, by their `id`, where it reads it.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        name = str(func)
        self.name = name.removesuffix(".default")
        parts = name.split(".")
        self.base = parts[1] if len(parts) > 1 else name
        self.written: list[torch.Tensor] = []
        self._overwritten: list[torch.Tensor] = []
        self.kept: dict[int, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        schema = schema_of(func)
        if schema is not None and (schema.is_mutable or "batch_norm" in self.base):
            self._note_written(schema)
        if self.name.startswith("c10d.") and self._has_output_first():
            self._overwritten += tensors_in(args[0])

    def _has_output_first(self) -> bool:
        """Tells whether a collective only writes to its first argument, as most do."""
        takes_two = len(self.args) > 1 and bool(tensors_in(self.args[1]))
        return takes_two or self.base.startswith("recv")

    def _note_written(self, schema: Any) -> None:
        for i, argument in enumerate(schema.arguments):
            alias, name = argument.alias_info, argument.name
            is_written = alias is not None and alias.is_write
            if not is_written and name not in _STATISTICS:
                continue
            value = self.args[i] if i < len(self.args) else self.kwargs.get(name)
            tensors = tensors_in(value)
            self.written += tensors
            if argument.is_out or (i == 0 and self.base in _OVERWRITE):
                self._overwritten += tensors

    def read(self, floats: bool = True) -> list[torch.Tensor]:
        """The tensors whose values it reads.

        Args:
            floats: Whether to leave out those that can hold no nan, or nothing.
        """
        if self.base == CONSTANT:
            return []
        return [
            tensor
            for tensor in tensors_in((self.args, self.kwargs))
            if not any(tensor is each for each in self._overwritten)
            if not floats or (is_float(tensor) and tensor.numel())
        ]

    def keep_written(self) -> None:
        """Copies what it reads and then overwrites."""
        for tensor in self.written:
            if not any(tensor is each for each in self._overwritten):
                self.kept[id(tensor)] = tensor.detach().clone()

    def note_versions(self) -> None:
        """Notes how often what it reads alone was written to."""
        self._versions = [
            (tensor, version_of(tensor))
            for tensor in tensors_in((self.args, self.kwargs))
            if not tensor.is_inference()
            if not any(tensor is each for each in self.written)
        ]

    @property
    def is_as_it_was(self) -> bool:
        """Tells whether nobody has written to its arguments since it ran."""
        return all(version_of(tensor) == before for tensor, before in self._versions)

    def fresh(self, output: Any) -> list[torch.Tensor]:
        """The results that it returns in memory of their own."""
        if self.base == CONSTANT:
            return tensors_in(output)
        arguments = tensors_in((self.args, self.kwargs))
        given = {storage_id(each) for tensor in arguments for each in storages(tensor)}
        return [
            tensor
            for tensor in tensors_in(output)
            if not given.intersection(storage_id(each) for each in storages(tensor))
        ]

    @property
    def is_communication(self) -> bool:
        """Tells whether it takes part in a collective, or waits for one."""
        return self.name.startswith(_COMMUNICATION)

    @property
    def waits(self) -> bool:
        """Tells whether it waits for a collective, whose result it is given."""
        return self.is_communication and self.base == _WAITS

    @property
    def is_constant(self) -> bool:
        """Tells whether it makes a tensor of a number of Python."""
        return self.base == CONSTANT

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""
        numbers = [number for _, number in find((self.args, self.kwargs), (float,))]
        return [number for number in numbers if not math.isfinite(number)]
