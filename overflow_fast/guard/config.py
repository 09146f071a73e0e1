"""The configuration of a guard: its arguments, checked.

1. `GuardConfig.of()` takes the arguments of `OverflowGuard` by name. Shorter forms,
   such as a path for a `Log`, become the objects that they stand for, and then each
   field is checked by its kind. What cannot be used raises here; patterns and rules
   that match nothing raise when the models are known (parts.py).
2. The fields are never changed afterwards. What a guard asks of several of them at once
   is a property below, so that no other file puts the same question together.
3. If `may_restore` or `may_replay` is True where it need not be, buffers are copied and
   calls are kept for nothing. If it is False where it should not, a bad step cannot be
   undone, or is not explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from ..base.text import kind_of
from ..detector.selection import Wanted
from .kinds import (
    ALLOW,
    GROUP,
    METRICS,
    PATTERNS,
    PATTERNS_OR_ALL,
    POLICY,
    TRIPWIRE,
    WATCH,
    Kind,
    check_safetensors,
    is_path,
    names_arguments,
    one_of,
    whole,
)
from .monitors.monitor import Monitor
from .monitors.running import DEFAULT_MONITORS
from .monitors.spikes import Spikes
from .options import Evidence, Explain, Log, Options, Record, Schedule, option
from .policy import plain_action
from .report.report import Report
from .verdict.rules import Allow

Policy = str | Callable[[Report], str]
EVERYTHING = tuple(name for name in Wanted._fields if name != "optimizer_state")
# Steps between the scans of the weights that a tripwire makes. With more, a bad weight
# that no loss shows is found later; with fewer, clean steps take longer.
WEIGHTS_EVERY = 64

_Monitor = TypeVar("_Monitor", bound=Monitor)


def wanted_of(kinds: Iterable[str]) -> Wanted:
    """Kinds of tensors, as `watch` names them, as flags."""
    return Wanted(**dict.fromkeys(kinds, True))


def _object_of(options: type[Options], expected: str) -> Kind:
    """Objects of a class of options, and what stands for one."""

    def check(name: str, value: Any) -> None:
        is_left_out = value is None and expected.endswith("None")
        if not isinstance(value, options) and not is_left_out:
            got = repr(value) if is_path(value) else type(value).__name__
            raise TypeError(f"{name} must be {expected}, got {got}")

    return Kind(check, options=options)


def _explain_of(value: Any) -> Any:
    if isinstance(value, bool):
        return Explain("always" if value else "never")
    return Explain() if isinstance(value, str) and value == "auto" else value


def _schedule_of(value: Any) -> Any:
    return Schedule(value) if type(value) is int else value


# Shorter forms of objects.
_STANDS_FOR: dict[str, Callable[[Any], Any]] = {
    "on_overflow": plain_action,
    "explain": _explain_of,
    "evidence": lambda value: Evidence(value) if is_path(value) else value,
    "log": lambda value: Log(value) if is_path(value) else value,
    "record": lambda value: Record(value) if is_path(value) else value,
    "schedule": _schedule_of,
}


def _check_monitors(name: str, monitors: Any) -> None:
    if isinstance(monitors, Monitor) or not isinstance(monitors, (list, tuple)):
        raise TypeError(
            f"{name} must be a list of monitors such as Spikes(), got "
            f"{type(monitors).__name__}"
        )
    for i, each in enumerate(monitors):
        if not isinstance(each, Monitor):
            raise TypeError(
                f"{name} must hold monitors such as Spikes(), got {kind_of(each)}"
            )
        if type(each) in map(type, monitors[:i]):
            raise ValueError(
                f"{name} must hold one monitor of a kind, got two of "
                f"{type(each).__name__}"
            )


@dataclass(frozen=True)
class GuardConfig(Options):
    """The arguments of an `OverflowGuard` besides its models and optimizers."""

    _OWNER: ClassVar[str | None] = ""

    on_overflow: Policy = field(
        default="raise",
        metadata=option(
            'The action for a bad step. "raise": raise `NonFiniteError`. "warn": log a '
            "warning (logger `overflow_fast`). "
            '"skip": leave the optimizer\'s step out, so that weights and state keep '
            "every bit, and log a warning. Or a callable that takes the `Report` and "
            "returns one of these; another answer raises TypeError or ValueError.",
            POLICY,
            typed="on-overflow",
        ),
    )
    watch: Iterable[str] | Literal["tripwire"] = field(
        default=EVERYTHING,
        metadata=option(
            '"tripwire", for production: check the loss and the gradients of the '
            "parameters alone. A bad step is run again with everything watched, for "
            "the report. Or the kinds of tensors to check: any of "
            '"activations", "grad_outputs" (gradients of outputs; needs '
            '"activations"), "gradients" (of parameters), "weights", "buffers", "loss" '
            'and "optimizer_state"; by default all but the last.',
            WATCH,
            typed="watch",
        ),
    )
    include: Sequence[str] | None = field(
        default=None,
        metadata=option(
            "Patterns of names of the modules to check, such as `h.*.mlp*`; None for "
            'all. In a dict of models "gen.0" names module `0` of model "gen", in a '
            'list "1.0" module `0` of the second.',
            PATTERNS_OR_ALL,
            typed="include",
        ),
    )
    exclude: Sequence[str] = field(
        default=(),
        metadata=option(
            "Patterns of names of modules to leave out.", PATTERNS, typed="exclude"
        ),
    )
    allow: Allow | None = field(
        default=None,
        metadata=option(
            "Intended non-finite values, such as "
            '`{"*.attn:input[attn_mask]": "-inf", "router:output[1]": "inf"}`. A '
            "pattern of module names, a colon, and a pattern of that module's entries "
            '(`input...`, `weight.NAME`, ...); "-inf", "+inf", "inf" for both, "nan", '
            "or a list of these.",
            ALLOW,
        ),
    )
    explain: Explain = field(
        default=Explain(),
        metadata=option(
            "Run a bad step again to name the operation that created the first bad "
            'value, and the cause (`Report.explanation`). True, False, "auto", or an '
            "`Explain`. Keeps references to each batch until its step is judged. Not "
            'with `sync="lagged"`.',
            _object_of(Explain, "True, False, 'auto' or an Explain"),
        ),
    )
    evidence: Evidence | None = field(
        default=None,
        metadata=option(
            "Files about bad steps: a folder, or an `Evidence`.",
            _object_of(Evidence, "a path, an Evidence or None"),
        ),
    )
    log: Log | None = field(
        default=None,
        metadata=option(
            "A line of JSON for each judged step: a path, or a `Log`.",
            _object_of(Log, "a path, a Log or None"),
        ),
    )
    record: Record | None = field(
        default=None,
        metadata=option(
            "The flight record of each watched step: a path, or a `Record`.",
            _object_of(Record, "a path, a Record or None"),
        ),
    )
    metrics: Any = field(
        default=None,
        metadata=option(
            "Exporters that receive numbers after each watched step: a callable that "
            "takes the step and a dict of numbers by name, or several.",
            METRICS,
        ),
    )
    schedule: Schedule = field(
        default=Schedule(),
        metadata=option(
            "The steps to watch: one in this many, or a `Schedule`.",
            _object_of(Schedule, "an int or a Schedule"),
        ),
    )
    monitors: Sequence[Monitor] = field(
        default=DEFAULT_MONITORS,
        metadata=option(
            "What to watch for in finite steps, in place of the default: objects of "
            "`Spikes`, `Headroom` and other subclasses of "
            "`overflow_fast.monitors.Monitor`, at most one of each.",
            Kind(_check_monitors),
        ),
    )
    sync: Literal["step", "lagged"] = field(
        default="step",
        metadata=option(
            '"step", or "lagged": the verdict on tensors on a device arrives one step '
            "later, and the host waits only where it is a whole step ahead. Fused "
            "Adam, AdamW, SGD and Adagrad skip a bad step on the device all the same; "
            'with others, "skip" and a callable incur the sync of "step".',
            one_of("step", "lagged"),
            typed="sync",
        ),
    )
    process_group: Any = field(
        default=None,
        metadata=option(
            "The ranks that decide together, a `ProcessGroup` or a `DeviceMesh`: each "
            "judged step they join one all-reduce of 64 bytes, and all act on one "
            "report. None: all that DDP, FSDP, `replicate()`, DTensors and "
            "ZeroRedundancyOptimizer connect, unless the policy is to warn. False: "
            "each rank decides for itself.",
            GROUP,
        ),
    )
    max_consecutive_skips: int = field(
        default=20,
        metadata=option(
            "Raise after more than this many skipped steps in a row.", whole(0)
        ),
    )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GuardConfig:
        """Takes the fields out of a guard's arguments, by name.

        Raises:
            TypeError, ValueError: If one of them cannot be used.
            ImportError: If `evidence` is given and safetensors is not installed.
        """
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @classmethod
    def of_given(cls, arguments: Mapping[str, Any]) -> GuardConfig:
        """Checks the arguments that a guard is to be made with once there is a model.

        Names of modules, which only the model knows, are not checked.

        Raises:
            TypeError, ValueError: If one of them cannot be used, or there is none of
                its name.
            ImportError: If `evidence` is given and safetensors is not installed.
        """
        return names_arguments(cls, "OverflowGuard")(**arguments)

    def __post_init__(self) -> None:
        """Makes objects of what stands for them, and checks the fields."""
        for name, object_of in _STANDS_FOR.items():
            object.__setattr__(self, name, object_of(getattr(self, name)))
        super().__post_init__()
        skipping = next((each for each in self.monitors if each.may_skip), None)
        if skipping is not None and self.verdicts_are_late:
            raise ValueError(
                "monitors must hold none that skips steps with sync='lagged', got "
                f"{skipping!r}"
            )
        if self.evidence is not None:
            check_safetensors()

    def monitor(self, kind: type[_Monitor]) -> _Monitor | None:
        """The monitor of a kind, or None."""
        return next((each for each in self.monitors if type(each) is kind), None)

    @property
    def wanted(self) -> Wanted:
        """The kinds of tensors to check, as flags."""
        return wanted_of(("loss", "gradients") if self.is_tripwire else self.watch)

    @property
    def is_tripwire(self) -> bool:
        """True if modules are watched only when a bad step is run again."""
        return self.watch == TRIPWIRE

    @property
    def hears_clipping(self) -> bool:
        """True if the norm of clipping tells all that is asked of gradients.

        A record, exporters and some monitors take the magnitude of each. A lagged guard
        does not wait for a norm.
        """
        asks_more = any(each.needs_magnitudes for each in self.monitors)
        asks_more |= self.record is not None or self.metrics is not None
        return self.is_tripwire and not (self.verdicts_are_late or asks_more)

    @property
    def verdicts_are_late(self) -> bool:
        """True if steps are made before their verdicts are there: `sync="lagged"`."""
        return self.sync == "lagged"

    @property
    def weights_every(self) -> int | None:
        """In one step of how many weights are scanned that are not watched."""
        return WEIGHTS_EVERY if self.is_tripwire else None

    @property
    def skips_finite(self) -> bool:
        """True if a monitor may skip finite steps."""
        return any(each.may_skip for each in self.monitors)

    @property
    def ignores_spikes(self) -> bool:
        """True if spikes were asked for, and cannot be looked for."""
        return self.monitor(Spikes) is not None and self.verdicts_are_late

    @property
    def may_skip(self) -> bool:
        """True if the policy may skip a step."""
        return (
            self.on_overflow == "skip"
            or callable(self.on_overflow)
            or self.skips_finite
        )

    @property
    def may_replay(self) -> bool:
        """True if steps may be run again."""
        is_wanted = self.explain.when != "never" or self.is_tripwire
        is_wanted |= any(each.replays for each in self.monitors)
        return is_wanted and not self.verdicts_are_late and self.explain.replay_safe

    @property
    def may_restore(self) -> bool:
        """True if a bad step may be undone: it is skipped, or raises in time."""
        raises = self.on_overflow == "raise" and not self.verdicts_are_late
        return self.may_skip or raises

    @property
    def may_act(self) -> bool:
        """True if the policy may do more than warn."""
        return self.on_overflow != "warn" or self.skips_finite
