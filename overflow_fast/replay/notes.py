"""Sentences on what a finite replay leaves open."""

from __future__ import annotations

from collections.abc import Sequence

_FEW = 3


def effects_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that what has these names was not put back."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return f"the step changes {first}, which could not be put back"


SOME = "Some replays are finite, but {}."
NOT_REDUCED = (
    "Each rank's own gradients are finite in the replay; what ranks make of them "
    "together (DDP's reduction, communication hooks) was not replayed."
)
OLD = (
    "The replay is finite. Gradients were there before the step's first forward, and "
    "may have been non-finite: clear them where a step is skipped, too."
)
NOT_CALLED = (
    "The replayed backward is finite. Hooks of `register_post_accumulate_grad_hook` "
    "were not called in it, and may have made the gradients non-finite."
)
MASKED = "An output holds -inf, and nothing worse: a mask may be meant by it."
NO_LOSS = (
    "The forward is finite. Backward was not run: neither `loss` nor the model "
    "returned a number that requires a gradient."
)
GIVEN_BAD = "The gradient that the model's output was given is non-finite."
ALL_BAD = (
    "All gradients are non-finite, and the replayed backward is finite: code between "
    "it and the optimizer's step (clipping, unscaling, communication) may have made "
    "them. It was not replayed."
)
OTHER_WEIGHT = (
    "The weight is finite in the model, and so is the replay: it was written to since, "
    "or the forward ran with another tensor in its place, as under functional_call()."
)
STOOD_IN = (
    "The replay is finite. It ran with the model's own weights: the step ran under "
    "functional_call(), whose tensors were not kept. Use `guard.run(lambda: loss)`."
)
