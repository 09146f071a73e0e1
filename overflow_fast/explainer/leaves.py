"""Tensors that are there before a replay: where they are held, and lie in memory."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.modules import modules_in, named_buffers, named_modules, named_parameters
from ..base.tensors import PLAIN, extent_of
from ..base.tree import ATTRIBUTE, Part, Path, at, attributes, find, path_text
from ..guard.kept_calls.held_function import data_in
from .memory import memory_of
from .named_tensors import modules_by_name
from .tensor_kinds import NEGATIVE_INF, kinds_of

_CONSTANTS = ("buffer", "attribute", "weight")  # of models and other modules


@dataclass(eq=False, repr=False)
class Leaf:
    """A tensor that no operation of the replay made, such as a weight.

    Attributes:
        kind: "parameter", "buffer", "batch", "gradient" or "unknown"; of what the
            program holds elsewhere "attribute" of a watched module, "weight" of another
            one, its attributes too, or "object".
        name: Its name, as code reads it, or its key.
        tensor: The tensor.
        look: Returns what the program holds there now; None for the other kinds.
        is_read: Whether an operation has read non-finite values of it.
        is_written: Whether the replay has written to it, and another one begins with
            that; known where `look` is.
        is_kept: Whether a replay begins with it as the step did.
        is_usual: Whether it held such values in the last clean step, too.
    """

    kind: str
    name: str
    tensor: torch.Tensor | None
    look: Callable[[], Any] | None = None
    is_read: bool = False
    is_written: bool = False
    is_kept: bool = False
    is_usual: bool = False

    @property
    def is_unkept(self) -> bool:
        """True if it is not known to have been there when the step began."""
        return self.kind == "attribute" and not self.is_kept

    @functools.cached_property
    def is_mask(self) -> bool:
        """True if it holds -inf alone; in a batch, with zeros alone, and no graph."""
        values = self.tensor
        if values is None or kinds_of(values) != NEGATIVE_INF:
            return False
        if self.kind not in ("batch", "object"):
            return self.kind in _CONSTANTS
        is_sparse = not bool((values[values.isfinite()] != 0).any())
        return is_sparse and not values.requires_grad  # else it is a result, as of log


_OWN = set(vars(nn.Module()))


def name_in_code(variable: str, value: Any, path: Path) -> str:
    """Names what a variable holds at a path as code reads it.

    An object may hand out what a private attribute holds, as `data.x` of a batch of
    graphs is `data._store['x']`: then its own `__getattr__` is asked, which the code
    calls as well.
    """
    for place, (style, name) in enumerate(path[:-1]):
        key, is_private = path[-1].value, style == "attribute" and name[:1] == "_"
        owner = at(value, path[:place]) if is_private else None
        if hasattr(type(owner), "__getattr__") and type(key) is str:
            with contextlib.suppress(Exception):
                if getattr(owner, key) is at(value, path):
                    path = (*path[:place], Part(ATTRIBUTE, key))
                    break
    return f"{variable}{path_text(path)}"


def held_leaves(
    models: Mapping[str, nn.Module], around: Mapping[str, Any]
) -> list[Leaf]:
    """Finds attributes of modules that are tensors, and what objects hold.

    Runs none of the user's code. Does not incur a CPU-GPU sync.

    Args:
        models: The watched models, by what their modules' names begin with.
        around: The variables that the replayed code reads, by their names.
    """
    watched = {each for model in models.values() for each in modules_in(model)}
    found = [
        leaf
        for name, module in modules_by_name(models).items()
        for leaf in _attributes("attribute", name, module)
    ]
    seen = set(watched)
    for variable, value in around.items():
        near = find(value, (torch.Tensor, nn.Module))
        for path, each in sorted(near, key=lambda one: len(one[0])):
            if each in seen:
                continue
            seen.add(each)
            name = name_in_code(variable, value, path)
            if isinstance(each, torch.Tensor):
                look = functools.partial(at, value, path)
                found.append(Leaf("object", name, each, look))
            else:
                found += _of_module(name, each)
    return found


def _attributes(kind: str, name: str, owner: Any) -> Iterator[Leaf]:
    for key, value in list(vars(owner).items()):
        for path, tensor in () if key in _OWN else data_in(value):
            full = f"{name}.{key}" if name else key
            look = functools.partial(_at, owner, key, path)
            yield Leaf(kind, f"{full}{path_text(path)}", tensor, look)


def _of_module(name: str, module: nn.Module) -> Iterator[Leaf]:
    """Yields the weights of a module that is not watched, and its attributes."""
    for key, tensor in [*named_parameters(module), *named_buffers(module)]:
        look = functools.partial(_itself, tensor)
        yield Leaf("weight", f"{name}.{key}", tensor, look)
    for key, each in named_modules(module):
        yield from _attributes("weight", f"{name}.{key}".rstrip("."), each)


def _at(owner: Any, key: str, path: Path) -> Any:
    return at(dict(attributes(owner)).get(key), path)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_Extent = tuple[int, int]  # the bytes of a memory where a tensor begins and ends
_ALL = (0, sys.maxsize)


class LeafMap:
    """Finds leaves by the part of the memory that they take up.

    Several may lie in one memory: engines put weights into flat buffers.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        self._leaves: dict[int, dict[_Extent, Leaf]] = {}
        for leaf in leaves:
            if leaf.tensor is not None and (memory := memory_of(leaf.tensor)):
                own = self._leaves.setdefault(memory, {})
                own.setdefault(_extent_of(leaf.tensor), leaf)

    def overlapping(self, tensor: torch.Tensor) -> dict[_Extent, Leaf]:
        """The leaves that have memory in common with a tensor, by where they lie."""
        begin, end = _extent_of(tensor)
        return {
            extent: leaf
            for extent, leaf in self._leaves.get(memory_of(tensor), {}).items()
            if extent[0] < end and begin < extent[1]
        }

    def read_by(
        self, tensor: torch.Tensor, is_bad: Callable[[Leaf], bool], most: int
    ) -> list[Leaf]:
        """So many leaves that a tensor is of, the bad ones, in which no other lies."""
        found = self.overlapping(tensor)
        if len(found) > 1:  # they share memory, as in an engine's flat buffers
            bad = [(e, leaf) for e, leaf in found.items() if is_bad(leaf)]
            found = dict(bad or list(found.items())[:most])
        inner = [
            leaf
            for own, leaf in found.items()
            if not any(own[0] <= b and e <= own[1] for b, e in found if (b, e) != own)
        ]
        return inner[:most]

    def around(self, tensor: torch.Tensor) -> Leaf | None:
        """The leaf that a tensor is, or else the only one of which it is a part."""
        (begin, end), found = _extent_of(tensor), self.overlapping(tensor)
        if (begin, end) in found:
            return found[begin, end]
        within = [leaf for (b, e), leaf in found.items() if b <= begin and end <= e]
        return within[0] if len(within) == 1 else None


def _extent_of(tensor: torch.Tensor) -> _Extent:
    is_known = type(tensor) in PLAIN and tensor.layout is torch.strided
    return extent_of(tensor) if is_known else _ALL
