"""Finds the operation that sets a device's overflow flag, in a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .. import flags
from ..torch_internals.replay_internals import TorchDispatchMode, autograd_node
from ..tree import tensors_in
from .change import Change
from .explanation import Explanation
from .kinds import is_float, summary_of
from .named_op import Op
from .places import ModuleStack, code_at, stack_of, users_frames
from .rerun import Rerun


class FlagSearch(Change):
    """Asks the overflow flags after each operation of a replay; changes nothing.

    Attributes:
        found: The first operation that set one, or None.
        module: The name of the module that ran it.
        in_backward: It ran in backward.
    """

    def __init__(self) -> None:
        self.found: Op | None = None
        self.module = ""
        self.in_backward = False

    @contextlib.contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within."""
        devices = {p.device.type for m in models.values() for p in m.parameters()}
        modules = ModuleStack(models, lambda name, output: None)
        with modules, _FlagMode(self, modules, flags.registered(devices)):
            yield

    def note(self, func: Any, given: Any, output: Any, modules: ModuleStack) -> None:
        """Notes the operation that has just set a flag."""
        self.in_backward = autograd_node() is not None
        frames = users_frames()
        file, line, code = code_at(frames)
        self.module = modules.current(self.in_backward) or ""
        self.found = Op(
            str(func).removesuffix(".default"),
            *(file, line, code, stack_of(frames)),
            inputs=[summary_of(t) for t in tensors_in(given) if is_float(t)],
            outputs=[summary_of(t) for t in tensors_in(output) if is_float(t)],
        )


class _FlagMode(TorchDispatchMode):
    """Reads flags after each operation, until one is set."""

    def __init__(
        self,
        search: FlagSearch,
        modules: ModuleStack,
        known: Mapping[str, flags.DeviceFlag],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._search = search
        self._modules = modules
        self._known = known

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._search.found is not None:
            return func(*args, **kwargs)
        self._each("clear")
        output = func(*args, **kwargs)
        with torch.no_grad():
            if any(bool(value) for value in self._each("read")):
                self._search.note(func, (args, kwargs), output, self._modules)
        return output

    def _each(self, name: str) -> list[Any]:
        return [
            flags.attempt(device_type, getattr(flag, name))
            for device_type, flag in self._known.items()
        ]


def explain_flag(rerun: Rerun) -> Explanation:
    """Runs the step again, and names the operation that sets an overflow flag.

    Incurs a CPU-GPU sync for each operation, until it is found.
    """
    search = FlagSearch()
    outcome = rerun.run(change=search)
    if search.found is None:
        again = "" if outcome.error is None else f", which raised {outcome.error}"
        return Explanation(
            cause="not reproducible",
            evidence=[f"no operation of the replay{again} sets the overflow flag"],
        )
    found = Explanation(
        "backward" if search.in_backward else "forward",
        "range overflow",
        search.module,
        search.found,
    )
    found.evidence.append(
        "the device's overflow flag is set after this operation, and its result is "
        "finite: it overflowed inside"
        if not any(each.num_nan or each.num_inf for each in search.found.outputs)
        else "the device's overflow flag is set after this operation"
    )
    return found
