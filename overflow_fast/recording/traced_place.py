"""The place in a program that dynamo traces."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..torch_internals.compiler import dynamo_translator

EXPORT = "export"
_log = logging.getLogger("overflow_fast")

# The bodies of these may hold operators with effects, by the operator's name.
_OPEN = {"autograd.Function", "tag_activation_checkpoint"}
_NAMES = {
    "cond": "torch.cond",
    "invoke_subgraph": "nested_compile_region",
    "map_impl": "map",
    "while_loop": "torch.while_loop",
}


def step_out() -> str:
    """Finds out whether an operator of ours may be put where dynamo is.

    Dynamo calls it while it traces, and takes what it returns for a constant. Where no
    operator may stand it goes on in the outermost graph, until `step_in`.

    Returns:
        "" if one may, `EXPORT` if nothing is to be traced, else the reason why not.
    """
    try:
        return _step_out(dynamo_translator())
    except (AttributeError, IndexError):
        # Another version of dynamo: as if there were no bodies.
        _log.debug("dynamo's tracers are unknown", exc_info=True)
        return ""


def step_in() -> None:
    """Goes back to the body that `step_out` has left."""
    dynamo_translator().output.tracers.pop()


def _step_out(tx: Any) -> str:
    if torch.compiler.is_exporting() or tx.export:
        return EXPORT
    tracers = tx.output.tracers
    why = next(filter(None, map(_why_closed, tracers[1:])), "")
    if why:
        tracers.append(tracers[0])
    return why


def _why_closed(body: Any) -> str:
    target = body.source_target
    name = target if isinstance(target, str) else target.name()
    if name not in _OPEN:
        return f"inside {_NAMES.get(name, name)}"
    return ""
