"""Names of rows: the block that a module belongs to, the family of an entry."""

from __future__ import annotations

from ..record.record_types import RecordEntry

FAMILIES = {
    "outputs": ("output", "unknown"),
    "gradients of outputs": ("grad_output",),
    "gradients of weights": ("gradient",),
    "weights": ("weight", "buffer", "optimizer_state"),
    "recorded": ("recorded",),
}
_FAMILY_OF = {kind: name for name, kinds in FAMILIES.items() for kind in kinds}


def family_of(kind: str) -> str:
    """The switch of the page that shows entries of a kind."""
    return _FAMILY_OF.get(kind, "outputs")


def block_of(module: str) -> str:
    """The block that a module is folded into: "h.0" for "h.0.attn.c_proj"."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def name_of(entry: RecordEntry, has_models: bool = False) -> str:
    """The name of an entry, such as "h.0.attn: output[0]"."""
    module = entry.module or ("the model" if entry.class_name else "")
    where = f"model {entry.model}: " if has_models else ""
    return f"{where}{module}: {entry.label}" if module else f"{where}{entry.label}"
