"""The bad step: what is run again as it, what a guard saw of it, and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..guard.kept_calls.call_keeper import CallKeeper, KeptCalls
from ..guard.optimizers.last_steps import LastSteps
from ..guard.options import BUDGET
from ..torch_internals.compiler import has_compiled
from .calls import Call
from .past_steps import PastSteps
from .replay_check import ReplayCheck
from .replay_ranks import RankCoordinator
from .replayer import Replayer, Tail


@dataclass
class BadStep:
    """The step that is explained: what is run again as it, and what a guard saw of it.

    A view of it is the same with other calls: see `views.py`.

    Attributes:
        models: The models, by what their modules' names begin with.
        calls: What is run again as the step: the calls that were kept, or a view.
        budget: How many forwards it may run; see `find_remedies` for remedies.
        replay_check: Compares the first run with the step; None where nobody watched.
        replayers: All that have run it, in any view.
        kind: Of the first bad entry: see `BadEntry.kind`; "" where nobody watched.
        module: The name of its module, or "".
        is_made: Whether that module is known to have made it.
        is_received: Whether that module may only have received it: as an input, or by
            a write to an input that torch has not counted.
        is_given: Whether `guard.record()` was given it, and it is no loss.
        reaches_loss: Whether loss, outputs or gradients were bad.
        gradients: The bad gradients of parameters, by name.
        past: The largest magnitudes in the last steps.
        optimizers: The optimizers.
        last_steps: Their last steps, and small weights before the first.
        reached: The names of those that the operation depends on which failed, in any
            view.
        is_late: Whether the weights may have been stepped since.
        is_rewritten: Whether other code than a forward was seen to write to a trained
            weight since the step's first forward began.
        forward: Which of its kept calls the first bad value was seen in, counted from
            0; -1 where that is not known.
        kept: What the guard has kept of it, and of the steps before.
        error: What the first run has raised, or was ended by; None for nothing.
    """

    models: Mapping[str, nn.Module] = field(default_factory=dict)
    calls: Sequence[Call] = ()
    budget: int = BUDGET
    replay_check: ReplayCheck | None = None
    replayers: list[Replayer] = field(default_factory=list)
    kind: str = ""
    module: str = ""
    is_made: bool = False
    is_received: bool = False
    is_given: bool = False
    reaches_loss: bool = True
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    past: PastSteps = field(default_factory=PastSteps)
    optimizers: Sequence[torch.optim.Optimizer] = ()
    last_steps: LastSteps = field(default_factory=LastSteps)
    reached: set[str] = field(default_factory=set)
    is_late: bool = False
    is_rewritten: bool = False
    forward: int = -1
    kept: CallKeeper | KeptCalls = field(default_factory=KeptCalls)
    error: Exception | None = None

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
                *(self.models, self.calls, self.kept.start, ranks),
                inner=inner,
                tail=tail,
            )
        )
        return self.replayers[-1]

    @property
    def num_forwards(self) -> int:
        """How many forwards were run."""
        return sum(each.num_forwards for each in self.replayers)
