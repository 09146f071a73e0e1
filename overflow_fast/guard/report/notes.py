"""The notes of an explanation: what a replay could not find out, and what to do then.

Those that other words of a report depend on stand in `findings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...base.text import some
from ..explaining import USE_RUN
from .findings import NOT_REPLAYED, NOT_THE_LOSS, PARTLY_REPLAYED

_FEW = 3  # names in a clause; chosen

# Why the step was not run again, or not as a whole.
NOT_ALONE = (
    "The step was not replayed: there are several ranks, which do not decide together. "
    "Collectives in it would wait for the others. Pass process_group= to the guard."
)
TAKEN = (
    "The step was not replayed: its forward was finite, and a second backward would "
    "write to the gradients that {} keeps."
)
NO_CALLS = (
    "The step was not replayed: no forward of this step was captured{}. Call the model "
    "and the loss within `guard.run(lambda: loss)`."
)
UNSAFE = "The {} was not replayed: `Explain(replay_safe=False)` was given."
COMPUTED_OUTSIDE = (
    "`{}` was computed outside of the function of `guard.run()`, by code that was not "
    "replayed with it: call the model within that function"
)
OUTSIDE_LOSS = f"{NOT_THE_LOSS}: call it within `{USE_RUN}`."
BEHIND_LOSS = (
    "The loss is finite, and code between it and `backward()`, such as a loss scale, "
    "made its gradient {}."
)
WITHIN_RUN = f"`{USE_RUN}` keeps what small modules hold when a step begins."
STOPPED = "Not replayed: {}."
STOPPED_FUNCTION = (
    "Not replayed: {}; the models' forwards within that function were. Do that outside "
    "of the function."
)
NO_LOSS = (
    "Backward was not run: neither `loss` nor the model returned a number that "
    "requires a gradient."
)
NO_BACKWARD = (
    "Backward was not replayed: what it was called on is not known, or the gradients "
    "of the model's output were too large to hold. Use `guard.run(lambda: loss)`."
)
NOT_HELD = (
    "The value of `{}` before the step is not held: whether it was finite is not "
    "known, and the step was not replayed."
)
WHICH_STEP = "Which step made the optimizer's state is not known."
RAISED = "The replay raised {}."
ENDED_EARLY = "The explanation ended early: {}."
NOT_SAVED = "The step was not saved: {}."

# What a finite replay leaves open.
FINITE_BUT = "The replay is finite, but {}."
OTHER_STEP = "The replay is not the same as the step: {}."
LOSS_LEFT = (
    "What was replayed, the models' own forward and backward, is finite{}. The loss "
    f"outside of them was not replayed: use `{USE_RUN}`."
)
NOT_RECORDED = (
    "What `guard.record()` was given is not looked at in a replay, whose loss and "
    "gradients are finite."
)
SOME = "Some replays are finite, but {}."
OLD = (
    "The replay is finite. Gradients were there before the step's first forward, and "
    "may have been non-finite: clear them where a step is skipped, too."
)
NOT_CALLED = (
    "The replayed backward is finite. Hooks of `register_post_accumulate_grad_hook` "
    "were not called in it, and may have made the gradients non-finite."
)
_ALL_BAD = (
    "All gradients are non-finite, and the replayed backward is finite: code between "
    "it and the optimizer's step (clipping, unscaling, communication) may have made "
    "them. Within the function of `guard.run()` it is run again."
)
ALL_BAD = f"{_ALL_BAD} It was not replayed."
NOT_BEHIND = f"{_ALL_BAD} Lines of it were run again, which do not explain them."
# Of what lines behind backward may explain; and what is left where these do not.
BEHIND = {ALL_BAD: NOT_BEHIND, NOT_REPLAYED: PARTLY_REPLAYED}
OTHER_WEIGHT = (
    "The weight is finite in the model, and so is the replay: it was written to since, "
    "or the forward ran with another tensor in its place."
)
STOOD_IN = (
    "The replay is finite. It ran with the model's own weights: the step ran under "
    "functional_call(), whose tensors were not kept. Use `guard.run(lambda: loss)`."
)

# What an operation, or none, leaves open.
RAISED_FINITE = (
    "The replay raised the same exception. No operation before it was seen to make a "
    "non-finite value that is not meant."
)
CONSTANTS = "The infs come only from constants and may be intentional."
MASKED = "An output holds -inf alone: it may be an intended mask."
GIVEN_BAD = "The gradient that the model's output was given is non-finite."
NOT_COMPUTED = "The operation was not computed again."
WHICH_LINE = "Which line of the forward {} is of is not known."
NOT_CLIPPED = (
    "Clipping gradients by their norm after backward does not help: it makes nan of an "
    "inf."
)
BAD_BEFORE = (
    "The operation's result in the forward is non-finite, too; what follows leaves it "
    "out."
)
MASKED_OPS = "Values within it were not finite: {}."
NOT_FOUND = "Where the program holds that tensor was not found."
REACHES_NO_WEIGHT = "The gradients of all parameters are finite all the same."
NOT_TRIED = (
    "No remedy was tried: the step writes to {}, which could not be put back to what "
    "it was before, and holds non-finite values."
)
SPENT = "the budget, of forwards or of seconds, was spent"
WHICH_SAMPLE = f"Which sample it comes from is not known: {SPENT}."
NOT_LOOKED_BACK = f"Whether a number was lost before it is not known: {SPENT}."
NOT_IN_FLOAT64 = f"The whole step was not run in float64: {SPENT}."
NOT_SMALLER = f"The step was not run with weights as large as before: {SPENT}."
NOT_MEASURED = f"Changes of batches that are finite were not all measured: {SPENT}."
BY_ITSELF = "A replay is finite without a remedy, too: {}."
BAD_STATE = (
    "A checkpoint may have brought the non-finite state, or a step have made it: "
    "load one in which the optimizer's state is finite as well "
    "(`overflow_fast.assert_finite_state(model, optimizer)`)."
)

# Of the second look at a step, which is run again with everything watched.
AGAIN_FORWARD_ALONE = (
    "The step's forward was run again, and is finite. Its backward was not: it would "
    "write to the gradients that {} keeps."
)
AGAIN_CLEAN = (
    "The step was run again with every module watched, and is finite: the fault was "
    "transient, or outside of the models' forward and backward."
)


def _some(names: Sequence[str]) -> str:
    return some([f"`{name}`" for name in names], _FEW)


def effects_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that what has these names was not put back."""
    first = _some(names)
    return f"the step changes {first}, which could not be put back"


def set_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that the program set what has these names in the step."""
    first = _some(names)
    return (
        f"the program set {first} in the step, outside of the models' forwards, and a "
        "replay runs with what was there before (set it within the function of "
        "`guard.run()`)"
    )


def fast_text(modules: Sequence[str]) -> str:
    """Returns, as a clause, that modules take a fast path that no trace takes."""
    return (
        f"{some(modules, _FEW)} may take a fast path of torch, which no replay "
        "takes that lists operations: look at what they are given, as rows that are "
        "masked as a whole"
    )


def counted_text(names: Sequence[str]) -> str:
    """Returns that global values, which nothing puts back, are others by now."""
    first = _some(names)
    return (
        f"Changed while the step was run again, and not put back: {first}. What "
        "a step does to global values and classes, each replay does once more."
    )
