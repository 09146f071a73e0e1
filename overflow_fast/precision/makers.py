"""Which modules make non-finite values in a run, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.names import named_modules
from ..core.ops import scan
from ..torch_internals.running import graph_task_id
from .recast import floats_in


class Makers:
    """Hooks that find the modules in which non-finite values begin.

    Args:
        model: The model.
        usual: What is not finite in float32 either, such as masks: the `bad` of a run.

    Attributes:
        bad: Which modules had which non-finite values: "given", "made", their
            gradients "after" (of what was returned) and "before" (of what was given).
    """

    def __init__(
        self, model: nn.Module, usual: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._model = model
        self._usual = usual
        self._order: dict[str, None] = {}
        self._running: list[str] = []
        self._handles: list[RemovableHandle] = []
        self.bad: set[tuple[str, str]] = set()

    def __enter__(self) -> Makers:
        for name, module in named_modules(self._model):
            self._handles += [
                module.register_forward_pre_hook(self._begin_of(name), prepend=True),
                module.register_forward_hook(self._hook_of(name), with_kwargs=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def names(self) -> list[str]:
        """The innermost modules that made values, or gradients, which are not finite.

        The one that raised an error comes before these. Where a module made bad values
        in forward, gradients are not looked at.
        """
        if self._running:
            return self._running[-1:]
        for made, given in (("made", "given"), ("before", "after")):
            found = [
                name
                for name in self._order  # inner modules return first
                if (name, made) in self.bad - self._usual
                if (name, given) not in self.bad - self._usual
            ]
            innermost = [n for n in found if not any(_is_within(m, n) for m in found)]
            if innermost:
                return innermost
        return []

    @property
    def is_backward(self) -> bool:
        """Tells whether gradients alone were not finite."""
        kinds = {kind for _, kind in self.bad - self._usual}
        return bool(kinds) and not kinds & {"given", "made"}

    def _begin_of(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if graph_task_id() < 0:
                self._running.append(name)

        return hook

    def _hook_of(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if graph_task_id() >= 0:
                return
            self._running.pop()  # of the module in which an error arises, it stays
            self._order[name] = None
            given, made = floats_in((args, kwargs)), floats_in(output)
            self._look(name, "given", given)
            self._look(name, "made", made)
            for kind, tensors in (("before", given), ("after", made)):
                for each in tensors:
                    if each.requires_grad:
                        each.register_hook(self._gradient_hook(name, kind))  # type: ignore[no-untyped-call]

        return hook

    def _gradient_hook(self, name: str, kind: str) -> Any:
        return lambda gradient: self._look(name, kind, [gradient])

    def _look(self, name: str, kind: str, tensors: list[torch.Tensor]) -> None:
        stats = scan([each.detach() for each in tensors])
        if any(stat.has_nan or stat.has_inf for stat in stats):
            self.bad.add((name, kind))


def _is_within(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))
