"""The kinds of frames and entries of a recorder that belong together, by name."""

from __future__ import annotations

from ... import _C

# Roles of entries that are of a call.
OF_CALLS = (_C.Role.INPUT, _C.Role.OUTPUT, _C.Role.GRAD_OUTPUT)
FORWARDS = (_C.FrameKind.FORWARD, _C.FrameKind.RECOMPUTED)
GRADIENTS = (_C.FrameKind.BACKWARD, _C.FrameKind.GRADIENTS)


def kind_of(role: _C.Role) -> str:
    """Returns the kind of a role: see `BadEntry.kind`."""
    return role.name.lower()
