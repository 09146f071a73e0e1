"""The graph that autograd keeps of how a tensor was made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
