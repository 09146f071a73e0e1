"""A forward that stands in for a module's own, on the instance."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from torch import nn

from ..torch_internals.module_internals import REPLICATE, replicate


class ReplacedForward:
    """Stands in for a module's forward on the instance.

    It has no state between calls: dynamo traces it, threads share it, and a copy of
    the module has a copy of it. Subclasses define in `run()` what is done instead.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_active = True
        self._is_first = "forward" not in module.__dict__
        self.__wrapped__ = module.forward  # `inspect.signature` follows it
        module.__dict__["forward"] = self
        module.__dict__[REPLICATE] = functools.partial(_replicate, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the replacement, or after `remove()` the original forward."""
        if self.is_active:
            return self.run(*args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the replacement; `self.__wrapped__` is the original forward."""
        raise NotImplementedError

    def remove(self) -> None:
        """Restores the original forward; one put over this one stays."""
        self.is_active = False
        own = self.module.__dict__
        over = own.get("forward")
        if over is self:
            own["forward"] = self.__wrapped__
            if self._is_first:
                del own["forward"]
        while isinstance(over, ReplacedForward):
            if over.__wrapped__ is self:
                over.__wrapped__, over._is_first = self.__wrapped__, self._is_first
            over = over.__wrapped__
        if not isinstance(own.get("forward"), ReplacedForward):
            own.pop(REPLICATE, None)

    def _bound_to(self, module: nn.Module) -> ReplacedForward:
        """Returns a copy that runs another module, such as a replica of this one."""
        bound = copy.copy(self)
        bound.module = module
        forward = self.__wrapped__
        if isinstance(forward, ReplacedForward):
            bound.__wrapped__ = forward._bound_to(module)
        elif isinstance(forward, types.MethodType) and forward.__self__ is self.module:
            bound.__wrapped__ = types.MethodType(forward.__func__, module)
        return bound


def _replicate(module: nn.Module) -> nn.Module:
    replica = replicate(module)
    del replica.__dict__[REPLICATE]
    forward = module.__dict__.get("forward")
    if isinstance(forward, ReplacedForward):
        replica.__dict__["forward"] = forward._bound_to(replica)
    return replica
