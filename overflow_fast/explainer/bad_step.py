"""The bad step as a guard saw it, and what an explanation notes where it ends.

The explanation itself is data: see `guard/report/explanation.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..guard.explaining import USE_RUN
from ..guard.kept_calls.call_keeper import Samples
from ..guard.kept_calls.kept_call import KeptCall
from ..guard.optimizers.last_steps import LastSteps
from ..guard.options import BUDGET
from ..guard.report.findings import NOT_THE_LOSS
from ..guard.undo.restore_point import RestorePoint
from ..torch_internals.compiler import has_compiled
from .calls import Call
from .long_explanation import LongExplanation
from .past_steps import PastSteps
from .replay_ranks import RankCoordinator
from .replayer import ReplayCheck, Replayer, Tail


@dataclass
class BadStep:
    """The step that is explained: what is run again as it, and what a guard saw of it.

    A view of it is the same with other calls: see `views.py`.

    Attributes:
        models: The models, by what their modules' names begin with.
        calls: What is run again as the step: the calls that were kept, or a view.
        start: The models as they were when the step began; None for now.
        budget: How many forwards it may run; see `find_remedies` for remedies.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        replay_check: Compares the first run with the step; None where nobody watched.
        replayers: All that have run it, in any view.
        long: Says that it takes long.
        kind: Of the first bad entry: see `BadEntry.kind`; "" where nobody watched.
        module: The name of its module, or "".
        is_made: Whether that module is known to have made it.
        is_received: Whether that module may only have received it: as an input, or by
            a write to an input that torch has not counted.
        reaches_loss: Whether loss, outputs or gradients were bad.
        gradients: The bad gradients of parameters, by name.
        past: The largest magnitudes in the last steps.
        optimizers: The optimizers.
        last_steps: Their last steps.
        num_dropped: How many forwards of the step were too many to be kept.
        hidden_by: Why forwards of the step could not be kept, or "".
        is_late: Whether the weights may have been stepped since.
        had_gradients: See `CallKeeper`.
        left_over: See `CallKeeper`.
        is_rewritten: Whether other code than a forward was seen to write to a trained
            weight since the step's first forward began.
        forward: Which of its kept calls the first bad value was seen in, counted from
            0; -1 where that is not known.
        is_of_flag: Whether a device's overflow flag is all that was seen.
        clean: See `CallKeeper`.
        recent: See `CallKeeper`.
    """

    models: Mapping[str, nn.Module] = field(default_factory=dict)
    calls: Sequence[Call] = ()
    start: RestorePoint | None = None
    budget: int = BUDGET
    checkpoints: Sequence[str | os.PathLike[str]] = ()
    replay_check: ReplayCheck | None = None
    replayers: list[Replayer] = field(default_factory=list)
    long: LongExplanation | None = None
    kind: str = ""
    module: str = ""
    is_made: bool = False
    is_received: bool = False
    reaches_loss: bool = True
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    past: PastSteps = field(default_factory=PastSteps)
    optimizers: Sequence[torch.optim.Optimizer] = ()
    last_steps: LastSteps = field(default_factory=LastSteps)
    is_late: bool = False
    is_rewritten: bool = False
    forward: int = -1
    is_of_flag: bool = False
    num_dropped: int = 0
    hidden_by: str = ""
    had_gradients: bool = False
    left_over: Mapping[str, int] = field(default_factory=dict)
    clean: KeptCall | None = None
    recent: Sequence[tuple[Samples, Samples]] = ()

    def replayer(
        self, ranks: RankCoordinator | None = None, tail: Tail | None = None
    ) -> Replayer:
        """Makes what runs its calls; see `Replayer`."""
        is_alone = ranks is None or ranks.is_alone
        # Hooks would have compiled code compiled anew.
        looks_inside = is_alone and self.kind == "grad_output"
        inner = self.module if looks_inside and not has_compiled() else None
        self.replayers.append(
            Replayer(
                *(self.models, self.calls, self.start, ranks),
                inner=inner,
                tail=tail,
                long=self.long,
            )
        )
        return self.replayers[-1]

    @property
    def num_forwards(self) -> int:
        """How many forwards were run."""
        return sum(each.num_forwards for each in self.replayers)


# Sentences on what a replay leaves open.


OUTSIDE_LOSS = f"{NOT_THE_LOSS}: call it within `{USE_RUN}`."
_FEW = 3  # names in a clause; chosen


def effects_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that what has these names was not put back."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return f"the step changes {first}, which could not be put back"


def fast_text(modules: Sequence[str]) -> str:
    """Returns, as a clause, that modules take a fast path that no trace takes."""
    return (
        f"{', '.join(modules[:_FEW])} may take a fast path of torch, which no replay "
        "takes that lists operations: look at what they are given, as rows that are "
        "masked as a whole"
    )


def counted_text(names: Sequence[str]) -> str:
    """Returns that global values, which nothing puts back, are others by now."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return (
        f"Changed while the step was run again, and not put back: {first}{more}. What "
        "a step does to global values and classes, each replay does once more."
    )


def outside_text(name: str) -> str:
    """Returns, as a clause, that code outside of `guard.run()` computed a tensor."""
    return (
        f"`{name}` was computed outside of the function of `guard.run()`, by code that "
        "was not replayed with it: call the model within that function"
    )


def set_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that the program set what has these names in the step."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return (
        f"the program set {first} in the step, outside of the models' forwards, and a "
        "replay runs with what was there before (set it within the function of "
        "`guard.run()`)"
    )


STOPPED = "Not replayed: {}."
STOPPED_FUNCTION = (
    "Not replayed: {}; the models' forwards within that function were. Do that before, "
    f"and call the rest within `{USE_RUN}`."
)
RAISED_FINITE = (
    "The replay raised the same exception. No operation before it was seen to make a "
    "non-finite value that is not meant."
)
FLAG_ALONE = (
    "The replay is finite. The device's overflow flag alone was set: which operation "
    "overflowed inside is not known."
)
SOME = "Some replays are finite, but {}."
LEFT_OVER = (
    "left over from step {}: non-finite since then, and not cleared before this step"
)
OLD = (
    "The replay is finite. Gradients were there before the step's first forward, and "
    "may have been non-finite: clear them where a step is skipped, too."
)
NOT_CALLED = (
    "The replayed backward is finite. Hooks of `register_post_accumulate_grad_hook` "
    "were not called in it, and may have made the gradients non-finite."
)
MASKED = "An output holds -inf alone: it may be an intended mask."
NO_LOSS = (
    "The forward is finite. Backward was not run: neither `loss` nor the model "
    "returned a number that requires a gradient."
)
GIVEN_BAD = "The gradient that the model's output was given is non-finite."
_ALL_BAD = (
    "All gradients are non-finite, and the replayed backward is finite: code between "
    "it and the optimizer's step (clipping, unscaling, communication) may have made "
    "them."
)
ALL_BAD = f"{_ALL_BAD} It was not replayed."
NOT_BEHIND = f"{_ALL_BAD} Lines of it were run again, which do not explain them."
OTHER_WEIGHT = (
    "The weight is finite in the model, and so is the replay: it was written to since, "
    "or the forward ran with another tensor in its place, as under functional_call()."
)
STOOD_IN = (
    "The replay is finite. It ran with the model's own weights: the step ran under "
    "functional_call(), whose tensors were not kept. Use `guard.run(lambda: loss)`."
)
