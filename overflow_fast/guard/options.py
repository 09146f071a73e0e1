"""The options of a guard: small frozen dataclasses, each field defined once.

A field's metadata holds its help, its check and its form on a command line. From these
come checks, docstrings, pages of the site and the options of `overflow-fast run`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from ..replay.explain import BUDGET
from .arguments import (
    FLAG,
    PATH,
    PATHS,
    POSITIVE,
    RANGES,
    SHARE,
    TIME_SHARE,
    Kind,
    Path,
    one_of,
    reusable,
    whole,
)

_Class = TypeVar("_Class", bound=type)
_WIDTH = 88


@dataclass(frozen=True)
class Option:
    """A field's definition.

    Attributes:
        help: Sentences; the first one stands alone in a command's help.
        kind: The values that it takes.
        typed: The option of `overflow-fast run`, without dashes; None for the names of
            the class and the field.
    """

    help: str
    kind: Kind
    typed: str | None = None


def option(help: str, kind: Kind, typed: str | None = None) -> dict[str, Option]:
    """Returns the metadata of a field; see `Option`."""
    return {"option": Option(help, kind, typed)}


class Options:
    """A frozen dataclass whose fields are checked when an object is made."""

    _OWNER: ClassVar[str | None] = None  # begins the fields' names in errors

    def __init_subclass__(cls) -> None:
        """Lists the fields in the docstring."""
        own = {n: f for n, f in vars(cls).items() if isinstance(f, Field)}
        if own and cls.__doc__:  # python -OO has none
            listed = listed_fields((n, f.metadata["option"]) for n, f in own.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nAttributes:\n{listed}"

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            TypeError, ValueError: If one of them cannot be used.
        """
        for name, each in options_of(type(self)):
            value = reusable(getattr(self, name))
            each.kind.check(written_name(type(self), name), value)
            object.__setattr__(self, name, value)


def written_name(cls: type[Options], field: str) -> str:
    """A field's name in errors: `record.mib`, `Spikes.action`."""
    if cls._OWNER is not None:
        return f"{cls._OWNER}{field}"
    owner = cls.__name__ if issubclass(cls, Monitor) else snake_case(cls.__name__)
    return f"{owner}.{field}"


def options_of(cls: type[Any]) -> Iterator[tuple[str, Option]]:
    """The names and definitions of a class's fields, in order."""
    for each in fields(cls):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"]


def snake_case(name: str) -> str:
    """`layer_audit` for `LayerAudit`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def listed_fields(options: Iterable[tuple[str, Option]]) -> str:
    """Lists fields as a docstring does."""
    return "\n".join(
        textwrap.fill(
            f"{name}: {each.help}",
            _WIDTH - 4,  # help() indents docstrings
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, each in options
    )


def documents(options: type[Options]) -> Any:
    """Returns a decorator that lists the fields of options in a class's docstring.

    They stand in place of a line that says `(the fields of NAME)`.
    """

    def documented(cls: _Class) -> _Class:
        if cls.__doc__:  # python -OO has none
            marker = f"    (the fields of {options.__name__})"
            listed = listed_fields(options_of(options))
            cls.__doc__ = inspect.cleandoc(cls.__doc__).replace(marker, listed)
        return cls

    return documented


@dataclass(frozen=True)
class Explain(Options):
    """The explanation of a bad step: how often, and by how much work."""

    when: Literal["auto", "always", "never"] = field(
        default="auto",
        metadata=option(
            'Which bad steps to run again: "auto", "always" or "never". "auto": always '
            "where the run ends, else the first time for each place, at most once in "
            "100 steps.",
            one_of("auto", "always", "never"),
            typed="explain",
        ),
    )
    _: KW_ONLY
    budget: int = field(
        default=BUDGET,
        metadata=option(
            "The number of forwards that may find the cause. As many more try "
            "remedies, and as many more add a change to one.",
            whole(1),
        ),
    )
    replay_safe: bool = field(
        default=True,
        metadata=option(
            "The forward can run twice. False: it has effects outside of modules that "
            "must not happen twice, such as taking data from a loader. Nothing is run "
            "again then; explanations say what is known without.",
            FLAG,
            typed="replay-safe",
        ),
    )
    checkpoints: Sequence[Path] = field(
        default=(),
        metadata=option(
            "Files of weights (`torch.save`, safetensors), the newest last. If weights "
            "are bad, the step is tried with those that are finite.",
            PATHS,
            typed="checkpoints",
        ),
    )
    frames: int = field(
        default=21,
        metadata=option(
            "The number of frames before the bad one that a report shows. Also where "
            "nothing is run again.",
            whole(0),
        ),
    )


@dataclass(frozen=True)
class Evidence(Options):
    """Files about bad steps: report, offending tensors, batch, and a script of each.

    They lie in `overflow_fast/RUN/step-N/`; runs and ranks may share the folder. On a
    device, activations are gone when the step is judged; gradients, weights and the
    batch are there. Holds each batch until it is judged. The tensors are written by the
    rank that found the bad value alone.
    """

    path: Path = field(
        metadata=option(
            "A folder for the report, offending tensors and batch of bad steps.",
            PATH,
            typed="evidence",
        )
    )
    _: KW_ONLY
    mib: float = field(
        default=256,
        metadata=option("The MiB of tensors that a step may leave.", POSITIVE),
    )
    keep: int = field(
        default=4,
        metadata=option(
            "The number of steps of this run whose evidence is kept. Files that were "
            "added or changed, and those of other runs, are never removed.",
            whole(1),
        ),
    )


_RANKS = one_of("all", "node", "rank0")


@dataclass(frozen=True)
class Log(Options):
    """A log: one line of JSON for each judged step, after a header for each run."""

    path: Path = field(
        metadata=option(
            "A file for one line of JSON for each judged step.", PATH, typed="log"
        )
    )
    _: KW_ONLY
    mib: float = field(
        default=16,
        metadata=option(
            "The MiB that the file may have before a new one is begun.", POSITIVE
        ),
    )
    keep: int = field(
        default=3,
        metadata=option(
            "The number of older files to keep; with 0 no new one is begun.", whole(0)
        ),
    )
    ranks: Literal["all", "node", "rank0"] = field(
        default="all",
        metadata=option(
            'The ranks that write: "all", a file each; "node", the first of each host '
            '(`LOCAL_RANK` 0); or "rank0".',
            _RANKS,
        ),
    )


@dataclass(frozen=True)
class Record(Options):
    """A flight record of each watched step, for `overflow_fast.read_record()`.

    A file that is there already is left alone: this run's is `run.2.ofr` then.
    """

    path: Path = field(
        metadata=option(
            "A file for magnitudes and counts of each entry in each watched step.",
            PATH,
            typed="record",
        )
    )
    _: KW_ONLY
    mib: float = field(
        default=64,
        metadata=option(
            "The MiB that the file may have; older steps are folded together.", POSITIVE
        ),
    )
    steps: int = field(
        default=1000,
        metadata=option(
            "The number of last steps that keep a line of their own, where a quarter "
            "of the file has room for them.",
            whole(1),
        ),
    )
    ranks: Literal["all", "node", "rank0"] = field(
        default="all",
        metadata=option(
            'The ranks that write: "all", a file each; "node", the first of each host '
            '(`LOCAL_RANK` 0); or "rank0".',
            _RANKS,
        ),
    )


@dataclass(frozen=True)
class Schedule(Options):
    """The steps that are watched.

    In between, no module has a hook; in a process with compiled code the hooks stay,
    and do nothing.
    """

    every: int = field(
        default=1,
        metadata=option("Watch one step in this many.", whole(1), typed="every"),
    )
    _: KW_ONLY
    warmup: int = field(
        default=0,
        metadata=option(
            "The number of first steps that are not watched.", whole(0), typed="warmup"
        ),
    )
    ranges: Sequence[tuple[int, int]] | None = field(
        default=None,
        metadata=option(
            "Watch only steps in one of these half-open ranges; None for all.", RANGES
        ),
    )
    budget: float | None = field(
        default=None,
        metadata=option(
            "The share of a step's time that the guard may take on average, such as "
            "0.01. The guard measures itself, checks gradients in every step if they "
            "fit the budget, everything else as often as the budget allows, and "
            "everything after a bad step.",
            TIME_SHARE,
            typed="budget",
        ),
    )


class Monitor(Options):
    """Something that a guard watches for beside non-finite values."""


@dataclass(frozen=True)
class Spikes(Monitor):
    """Finite steps whose loss or gradients are far above their last 200 values.

    The loss is what the model returns or `record(loss=...)` gives. For gradients it is
    the norm that `record(grad_norm=...)` gives, else the largest magnitude of a
    gradient (not with a GradScaler). Not with `sync="lagged"`.
    """

    action: Literal["warn", "skip"] = field(
        default="warn",
        metadata=option(
            "The action for a finite step whose loss or gradients are far above the "
            'last 200. "warn": log a warning and mark the step in log and record. '
            '"skip": leave its optimizer step out too, at most three in a row.',
            one_of("warn", "skip"),
            typed="spikes",
        ),
    )


@dataclass(frozen=True)
class Saturation(Monitor):
    """Values at the largest number of float16 or float8, where casts may cut off.

    They are counted in the step after one in which a value stood there.
    """

    share: float = field(
        default=0.001,
        metadata=option(
            "Log a warning if this share of an output, weight or gradient in float16 "
            "or float8 equals the dtype's largest number.",
            SHARE,
            typed="saturation",
        ),
    )


@dataclass(frozen=True)
class Headroom(Monitor):
    """Outputs, weights and gradients that are close to the end of their dtype.

    Gradients that a GradScaler scales are left out.
    """

    bits: float = field(
        default=1.0,
        metadata=option(
            "Log a warning when a value could double fewer than this many times in its "
            "dtype. 1.0: it exceeds half of the largest number. The warning comes "
            "again each time the remaining headroom has halved.",
            POSITIVE,
        ),
    )


@dataclass(frozen=True)
class Underflow(Monitor):
    """Zeros and subnormals, for `headroom()` and `metrics()`.

    Counting takes torch operations and temporaries of each tensor's size.
    """

    every: int = field(
        default=100,
        metadata=option(
            "Count zeros and subnormals in one of this many watched steps.", whole(1)
        ),
    )


@dataclass(frozen=True)
class MaskedOps(Monitor):
    """Operations whose non-finite values were masked, clamped or divided away.

    Not with several ranks, nor with `sync="lagged"`.
    """

    every: int = field(
        default=1000,
        metadata=option(
            "Run one clean step in this many again, and log its operations whose "
            "non-finite values were masked.",
            whole(1),
        ),
    )


@dataclass(frozen=True)
class LayerAudit(Monitor):
    """Silent data corruption: a layer that gives other bits when it is run again."""

    every: int = field(
        default=1000,
        metadata=option(
            "In one step of this many compute one layer again, a different one each "
            "time, and compare the bits.",
            whole(1),
        ),
    )


@dataclass(frozen=True)
class Replicas(Monitor):
    """Replicas of weights and optimizer states under DDP and HSDP, bit for bit.

    An all-gather of 8 bytes, which every rank has to join.
    """

    every: int = field(
        default=1000,
        metadata=option(
            "After one step in this many compare the replicas of weights and optimizer "
            "states.",
            whole(1),
        ),
    )


MONITORS = (Spikes, Saturation, Headroom, Underflow, MaskedOps, LayerAudit, Replicas)
DEFAULT_MONITORS = (Spikes(), Saturation())
