"""Explains values that were bad before the replay: data, weights and what was kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from .explanation import Explanation
from .held import Held
from .kept_call import KeptCall, ModelCall
from .kinds import as_wide, bad_names
from .places import module_of_parameter, names_of
from .rows import Leaf

_IN_LOOP = (
    "Code between the calls was not replayed. Call all of it within "
    "`guard.run(lambda: loss)`."
)
_LOSS = (
    "The loss outside of the model was not replayed: call it within "
    "`guard.run(lambda: loss)`."
)
_NOT_FOUND = "Where the program holds that tensor was not found."
_CARRIED = (
    "The step writes to {}, which could not be put back to what it was before: the "
    "step itself may have left the bad values there."
)


def explain_leaf(leaf: Leaf, read_by: str, call: KeptCall | None) -> Explanation:
    """Explains a tensor that no replayed operation has made.

    Args:
        leaf: The tensor.
        read_by: What read it first, as the end of a sentence, or "".
        call: What was replayed; None if it is not known to be the step's own.
    """
    what = _counts(leaf.tensor)
    if isinstance(leaf, Held):
        return _of_held(leaf, what, read_by)
    if leaf.kind == "batch":
        return _of_batch(leaf, what, read_by, call)
    if leaf.kind in ("parameter", "buffer"):
        return _of_weight(leaf.kind, leaf.name, what, read_by)
    if leaf.kind == "gradient":
        text = f"the gradient that the model's output was given holds {what}"
        return Explanation(evidence=[text], notes=[_LOSS])
    text = f"a tensor that no replayed operation has made holds {what}{read_by}"
    return Explanation(evidence=[text], notes=[_NOT_FOUND])


def _of_batch(leaf: Leaf, what: str, at: str, call: KeptCall | None) -> Explanation:
    """Explains an input: it is data, unless the training loop has computed it."""
    name, tensor = f"`{leaf.name}`", leaf.tensor
    if call is not None:  # a replay may have been given a copy
        tensor = dict(call.leaves()).get(leaf.name, tensor)
    node = None if tensor is None else tensor.grad_fn
    if node is not None:
        last = re.sub(r"Backward\d*$", "", type(node).__name__)
        text = f"{name} held {what} when it was handed over{at}; code that was not "
        text += f"replayed had computed it (its last operation: {last})"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    if call is not None and tensor is not None and call.was_written(tensor):
        text = f"{name} held {what} when the replay began{at}; it was written to since "
        return Explanation(tensor=leaf.name, evidence=[f"{text}the step began"])
    if not isinstance(call, ModelCall):
        of = "" if leaf.name.startswith("batch") else " of the batch"
        text = f"{name}{of} holds {what}{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    text = f"{name} held {what} when the model received it from the loop{at}"
    if call.follows_others:
        text += "; the loop may have computed it from outputs of the forwards before"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])


def _of_held(leaf: Held, what: str, at: str) -> Explanation:
    """Explains a tensor that a module or an object holds."""
    name = f"`{leaf.name}`"
    if leaf.is_written:
        text = f"{name} held {what} when the replay began{at}"
        note = _CARRIED.format(name)
        return Explanation(tensor=leaf.name, evidence=[text], notes=[note])
    if leaf.kind == "object":
        text = f"{name} holds {what}, and the step does not write to it{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    of = "the model" if leaf.kind == "attribute" else "a module that is not watched"
    text = f"{name} of {of} holds {what}, and the step does not write to it{at}"
    module = module_of_parameter(leaf.name)
    return Explanation(
        "weights", "bad weights", module, tensor=leaf.name, evidence=[text]
    )


def _of_weight(kind: str, name: str, what: str, at: str = "") -> Explanation:
    """Explains a parameter or buffer that was bad before the step."""
    evidence = f"the {kind} {name} held {what} before the step{at}"
    module = module_of_parameter(name)
    return Explanation(
        "weights", "bad weights", module, tensor=name, evidence=[evidence]
    )


def first_bad_weight(
    models: Mapping[str, nn.Module], *kinds: str
) -> Explanation | None:
    """The explanation of the first parameter or buffer that is bad, or None."""
    named = [(kind, name, t) for kind, name, t in names_of(models) if kind in kinds]
    bad = bad_names([(name, tensor) for _, name, tensor in named], masks=False)
    for kind, name, tensor in named:
        if name in bad:
            return _of_weight(kind, name, _counts(tensor))
    return None


def _counts(tensor: torch.Tensor | None) -> str:
    values = None if tensor is None else as_wide(tensor)
    if values is None:
        return "non-finite values"
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    parts = [f"{n} {k}" for n, k in ((num_nan, "nan"), (num_inf, "inf")) if n]
    return f"{' and '.join(parts)} of {values.numel()} values"
