"""The graph that autograd keeps of how a tensor was made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

# Between a loss and the logits beside it lie some ten nodes: chosen above that, since a
# model that returns another scalar has them looked at in each step.
_MOST_NODES = 256


def leads_to(node: Node, others: Sequence[Node]) -> bool:
    """True if a node was computed from one of the others, the nearest ones tried."""
    waiting, seen, sought = deque([node]), {node}, set(others)
    for _ in range(_MOST_NODES):
        if not waiting:
            return False
        node = waiting.popleft()
        if node in sought:
            return True
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        waiting += new
    return False


def leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Yields the leaves that a backward adds gradients to, some more than once.

    Args:
        roots: The tensors or edges that it begins at, or the one.
    """
    given = list(roots) if type(roots) in (list, tuple) else [roots]
    yield from (t for t in given if isinstance(t, torch.Tensor) and t.grad_fn is None)
    nodes = [getattr(each, "grad_fn", getattr(each, "node", None)) for each in given]
    waiting = [node for node in nodes if node is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        waiting += new
