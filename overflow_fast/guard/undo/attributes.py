"""The plain attributes of one module, kept cheaply when a step begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import nn

from ...torch_internals.module_internals import forward_hooks, forward_pre_hooks
from .contents import Kept, restore_all
from .kept_objects import ATOMS, KeptObjects
from .tensors import SMALL, KeptTensor

# Of one attribute. In each step of a model that changes it, these many objects take up
# to 0.5 ms, and these many items 0.06 ms. An attribute that leads to more is not kept:
# it stays as a skipped step has left it, and a replay begins with it as it is.
_MOST_OBJECTS = 64
_MOST_ITEMS = 1000
# Wrappers, whose attributes say what they are about to do.
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._")
BARE = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in each module
_LEFT: Any = object()  # in the place of a value that is not kept, or not there


class KeptAttributes:
    """The attributes of a module that are numbers, texts, or lead to little else.

    That is small containers, arrays and tensors, generators and plain objects. What is
    large, or belongs to autograd's graph, is neither read, held nor restored.

    Args:
        module: The module. It is held weakly.

    Attributes:
        form: Its class, and the keys of the hooks around its forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, before = weakref.ref(module), forward_pre_hooks(module)
        self.form = type(module), {*before, *forward_hooks(module)}
        self._values: dict[str, Any] = {}
        self._parts: list[Kept] = []
        self._tensors: list[KeptTensor] = []
        for key, value in vars(module).items():
            if key not in BARE:
                is_kept = type(value) in ATOMS or self._keep(key, value)
                self._values[key] = value if is_kept else _LEFT

    @staticmethod
    def are_kept(module: nn.Module) -> bool:
        """True for a module that is no wrapper of another."""
        is_script = isinstance(module, torch.jit.ScriptModule)
        return not is_script and not type(module).__module__.startswith(_WRAPPERS)

    def _keep(self, key: str, value: Any) -> bool:
        """Keeps what can be reached from an attribute, if that is little."""
        objects = KeptObjects(most_bytes=SMALL, most_items=_MOST_ITEMS)
        objects.add([(key, value)], _MOST_OBJECTS)
        tensors = [tensor for _, tensor in objects.tensors.values()]
        is_little = objects.is_whole and objects.num_items <= _MOST_ITEMS
        if not is_little or not all(map(_is_small_value, tensors)):
            return False
        self._parts += objects.kept
        self._tensors += [KeptTensor(tensor, is_copied=True) for tensor in tensors]
        return True

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """True for a tensor among them, or in what they lead to."""
        return any(each.tensor is tensor for each in self._tensors)

    def written(self, asked: Set[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields the small tensors that were written to, or were put there since.

        Incurs no CPU-GPU sync.

        Args:
            asked: The names of attributes.

        Yields:
            The name, and what the attribute's tensor held; None if it was none.
        """
        module = self.module()
        kept = {id(each.tensor): each for each in self._tensors}
        for key, now in () if module is None else vars(module).items():
            old = self._values.get(key)
            is_asked = key in asked and isinstance(now, torch.Tensor)
            if is_asked and _is_small_value(now):
                known = kept.get(id(old))
                if known is None and old is not _LEFT:
                    yield key, None
                elif known is not None and (now is not old or known.is_written()):
                    yield key, known.copied

    def restore(self) -> None:
        """Makes the attributes what they were."""
        module = self.module()
        if module is None:
            return
        own = vars(module)
        for key in [key for key in own if key not in BARE and key not in self._values]:
            del own[key]
        for key, value in self._values.items():
            if value is not _LEFT and own.get(key, _LEFT) is not value:
                own[key] = value
        restore_all(self._parts)
        for tensor in self._tensors:
            tensor.restore()

    def has_changed(self) -> bool:
        """True if the module has other attributes now. Incurs no CPU-GPU sync."""
        module = self.module()
        if module is None:
            return False
        own = {k: v for k, v in vars(module).items() if k not in BARE}
        return (
            own.keys() != self._values.keys()
            or any(v is not _LEFT and own[k] is not v for k, v in self._values.items())
            or any(tensor.is_written() for tensor in self._tensors)
            or any(part.has_changed() for part in self._parts)
        )


def _is_small_value(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or isinstance(tensor, nn.Parameter):
        return False
    return tensor.grad_fn is None and tensor.nbytes <= SMALL
