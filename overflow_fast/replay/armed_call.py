"""Makes a table of the operations of a call while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..core.force_eager import run_eagerly
from ..torch_internals.replay_internals import no_dispatch
from .capture import KeptCall
from .functions import held_leaves
from .op_trace import Leaf, OpTable
from .outcome import Outcome
from .places import ModuleStack, names_of
from .tensor_kinds import NEGATIVE_INF, floats_in


@contextmanager
def armed(
    outcome: Outcome, call: KeptCall, models: Mapping[str, nn.Module], keeps_calls: bool
) -> Iterator[None]:
    """Runs eagerly, and records all operations in the outcome's table.

    Args:
        outcome: Gets the table, and the modules whose outputs are bad.
        call: The call that runs.
        models: The models, by what their modules' names begin with.
        keeps_calls: Keep the arguments of operations that make bad values.
    """
    modules = ModuleStack(models, lambda *found: _note(outcome, *found))
    leaves = [Leaf("batch", name, tensor) for name, tensor in call.leaves()]
    leaves += [Leaf(*found) for found in names_of(models)]
    leaves += [Leaf("gradient", "", held) for held in call.held.values()]
    others = held_leaves(models, call.around())
    outcome.table = OpTable(modules, [*leaves, *others], keeps_calls)
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        stack.enter_context(modules)
        stack.enter_context(outcome.table)
        yield
    for leaf in others:
        leaf.note_written()
    outcome.carried = [leaf.name for leaf in others if leaf.is_carried]


def _note(outcome: Outcome, name: str, output: Any) -> None:
    """Notes the output of a module, if it is bad."""
    table = outcome.table
    assert table is not None
    floats = floats_in(output)
    with no_dispatch():
        found = table.kinds.of(floats)
    for tensor, kinds in zip(floats, found, strict=True):
        if kinds & ~NEGATIVE_INF:
            outcome.modules.append((name, tensor))
