"""Finds the operation that sets a device's overflow flag, in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .. import flags
from ..guard.report.causes import NOT_REPRODUCIBLE, RANGE_OVERFLOW
from ..guard.report.explanation import Explanation
from ..guard.report.op import Op
from ..scanner.modules import parameters_of
from ..scanner.tree import tensors_in
from ..torch_internals.replaying import autograd_node
from .op_trace import ModuleStack, OpCall, OpTrace
from .replayer import Observer, Replayer
from .tensor_kinds import is_float, summary_of
from .users_lines import op_at


class FlagSearch(Observer):
    """Asks the overflow flags after each operation of a replay, until one is set.

    Attributes:
        found: The first operation that set one, or None.
        module: The name of the module that ran it.
        in_backward: It ran in backward.
    """

    def __init__(self) -> None:
        self.found: Op | None = None
        self.module = ""
        self.in_backward = False
        self._flags: Mapping[str, flags.DeviceFlag] = {}

    def observing(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Asks after each operation that runs within."""
        devices = {p.device.type for m in models.values() for p in parameters_of(m)}
        self._flags = flags.registered(devices)
        return OpTrace(models, self)

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and notes it if it sets a flag; see `OpObserver`."""
        if self.found is not None:
            return op.run()
        self._each("clear")
        output = op.run()
        with torch.no_grad():
            if any(bool(value) for value in self._each("read")):
                self._note(op, output, modules)
        return output

    def on_module(self, name: str, values: Any, is_given: bool) -> None:
        """See `OpObserver`."""

    def _each(self, name: str) -> list[Any]:
        return [
            flags.attempt(device_type, getattr(flag, name))
            for device_type, flag in self._flags.items()
        ]

    def _note(self, op: OpCall, output: Any, modules: ModuleStack) -> None:
        self.in_backward = autograd_node() is not None
        self.module = modules.current(self.in_backward) or ""
        self.found = op_at(op.name, modules.lines())
        given, returned = tensors_in((op.args, op.kwargs)), tensors_in(output)
        self.found.inputs = [summary_of(t) for t in given if is_float(t)]
        self.found.outputs = [summary_of(t) for t in returned if is_float(t)]


def explain_flag(replayer: Replayer) -> Explanation:
    """Runs the step again, and names the operation that sets an overflow flag.

    Incurs a CPU-GPU sync for each operation, until it is found.
    """
    search = FlagSearch()
    result = replayer.run(observers=[search])
    if search.found is None:
        again = "" if result.error is None else f", which raised {result.error}"
        return Explanation(
            cause=NOT_REPRODUCIBLE.name,
            evidence=[f"no operation of the replay{again} sets the overflow flag"],
        )
    found = Explanation(
        "backward" if search.in_backward else "forward",
        RANGE_OVERFLOW.name,
        search.module,
        search.found,
    )
    found.evidence.append(
        "the device's overflow flag is set after this operation, and its result is "
        "finite: it overflowed inside"
        if all(each.is_finite for each in search.found.outputs)
        else "the device's overflow flag is set after this operation"
    )
    return found
