"""The protocol of monitors: when a guard calls one, and what it tells it of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from ... import _C
from ...base.tree import label_text
from ..kept_calls.call_keeper import CallKeeper
from ..options import Options
from ..verdict.entry_headroom import where_of
from ..watching.judged_tensors import NORM
from ..watching.watch import ModelWatch, models_of

_LOSSES = ("output.loss", "output['loss']")


@dataclass(frozen=True)
class Guarded:
    """The training that a guard watches, and the guard's parts that monitors use.

    Attributes:
        watches: The watched models.
        keeper: Keeps the calls of a step, or None.
        get_optimizers: Returns the guard's optimizers.
        isolated: Isolates errors from the program.
        was_skipped: Returns True if an optimizer's last step was skipped, by any code.
    """

    watches: Sequence[ModelWatch]
    keeper: CallKeeper | None
    get_optimizers: Callable[[], Sequence[Optimizer]]
    isolated: Callable[[], AbstractContextManager[None]]
    was_skipped: Callable[[Optimizer], bool] = lambda _: False

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models, by the prefix of their modules' names: "" for a single one."""
        return models_of(self.watches)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers."""
        return self.get_optimizers()


@dataclass(frozen=True)
class Notice:
    """A monitor's remark about a finite step.

    Attributes:
        text: A clause without a full stop, such as "60 % of the units of fc1 are dead".
        action: "warn", or "skip": leave the optimizer's step out, on all ranks that
            decide together, if the monitor's `may_skip` is True.
        kind: The kind of its line in the log.
        fields: The fields of that line besides `step` and `action`; by default
            `monitor` and `text`.
        monitor: The name of the monitor's class; the guard fills it in.
    """

    text: str
    action: Literal["warn", "skip"] = "warn"
    kind: str = "notice"
    fields: Mapping[str, object] = field(default_factory=dict)
    monitor: str = ""


@dataclass(frozen=True)
class MonitoredStep:
    """A finite step whose optimizer is about to step.

    Attributes:
        number: The step's number.
        optimizer: The optimizer; with several, each has a call of its own.
        is_scaled: A GradScaler scales the gradients.
        guarded: The training.
    """

    number: int
    optimizer: Optimizer | None
    is_scaled: bool
    guarded: Guarded

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models, by the prefix of their modules' names: "" for a single one."""
        return self.guarded.models

    @property
    def loss(self) -> float | None:
        """The magnitude of the loss: what the model returns, or `record(loss=...)`."""
        return self._number("loss")

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients that `record(grad_norm=...)` has given, or None."""
        return self._number(NORM)

    @property
    def magnitudes(self) -> dict[str, float]:
        """The largest magnitude of each scanned tensor, as `headroom()` names it.

        Does not incur a CPU-GPU sync.
        """
        return {
            where_of(watch, place): peak.abs_max
            for watch in self.guarded.watches
            for place in _places(watch)
            if (peak := watch.recorder.last_peak(place)) is not None
        }

    def _number(self, name: str) -> float | None:
        for watch in self.guarded.watches:
            place = scalar_places(watch).get(name)
            peak = None if place is None else watch.recorder.last_peak(place)
            if peak is not None:
                return peak.abs_max
        return None


class Monitor(Options):
    """Something that a guard watches for in finite steps; subclass it to write one.

    Every method has a default that does nothing. What a method raises does not reach
    the program; `coverage()` counts it as a failure of the guard.

    Attributes:
        may_skip: True if a `Notice` of it may have the action "skip".
        replays: True if it runs steps again, so that they are to be kept.
        needs_magnitudes: False if it reads no magnitudes of gradients but their norm.
            Each class says so for itself: its subclasses may read them.
    """

    may_skip: bool = False
    replays: ClassVar[bool] = False
    needs_magnitudes: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Names the class in the errors of its fields; see `needs_magnitudes`."""
        cls._OWNER = f"{cls.__name__}."
        cls.needs_magnitudes = vars(cls).get("needs_magnitudes", True)
        super().__init_subclass__()

    def start(self, guarded: Guarded) -> Monitor:
        """Returns the monitor of one guard, which is being made.

        By default a deep copy: a monitor that is given to several guards, or to a
        callback for several trainings, keeps what it has seen apart.

        Args:
            guarded: The training that the guard watches.
        """
        return copy.deepcopy(self)

    def begin_step(self, step: int) -> None:
        """Prepares for a step, before its first forward.

        Args:
            step: The step's number.
        """

    def look(self, step: MonitoredStep) -> Iterable[str | Notice]:
        """Looks at a finite step before its optimizer steps.

        Only at steps that are watched, and not with `sync="lagged"`. Where it calls the
        models, that is no part of the step, and is not judged.

        Args:
            step: The step.

        Returns:
            Clauses for a warning, such as "60 % of the units of fc1 are dead", or
            notices.
        """
        return ()

    def end_step(self, step: int) -> None:
        """Ends a step, after its optimizers have stepped; it may have been bad.

        Args:
            step: The step's number.
        """

    def stop(self) -> None:
        """Removes hooks: the guard is switched off, and may be switched on again."""

    def metrics(self) -> Mapping[str, float]:
        """Returns numbers for `guard.metrics()`."""
        return {}


def _places(watch: ModelWatch) -> list[_C.Place]:
    return [history.last.place for history in watch.recorder.headroom()]


def scalar_places(watch: ModelWatch) -> dict[str, _C.Place]:
    """The places of a model's "loss" and "grad_norm", where it has them."""
    places = _places(watch)
    recorded = _by_label(p for p in places if p.kind == _C.FrameKind.RECORDED)
    found = {name: recorded[name] for name in ("loss", NORM) if name in recorded}
    returned = _returned_loss(watch, places)
    return found if returned is None else {"loss": returned, **found}


def _returned_loss(watch: ModelWatch, places: Sequence[_C.Place]) -> _C.Place | None:
    """The root's loss: the output of that name, or its only one if that is a loss."""
    own = _by_label(
        place
        for place in places
        if place.module == 0 and place.kind == _C.FrameKind.FORWARD
        if place.label.role == _C.Role.OUTPUT
    )
    for name in _LOSSES:
        if name in own:
            return own[name]
    return own.get("output") if watch.returns_loss and len(own) == 1 else None


def _by_label(places: Iterable[_C.Place]) -> dict[str, _C.Place]:
    """Places by their labels; to write one takes longer than to look at its place."""
    return {label_text(place.label): place for place in places}
