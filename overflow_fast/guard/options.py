"""The options of a guard: small frozen dataclasses, each field defined once.

1. A field's metadata is an `Option`: its help, its kind (kinds.py: which values it
   takes) and the option of a command that gives it, if any. No other file says any of
   that again.
2. From these come the checks when an object is made, the list of fields in a class's
   docstring, tables of docs/arguments.md, and what `overflow-fast run` takes. A
   field without such metadata is in none of them, and is not checked.
3. An object is never changed once it is made. Iterators in its fields are tuples by
   then, so that several guards can be made of one.
4. The classes below are the guard's own. `GuardConfig` (config.py) has the arguments
   beside them, and monitors are such classes, too.

The defaults are chosen. One that is too small leaves less in an explanation, a file or
a report, and one that is too large costs what its help says. Which step is bad depends
on none but those of `Schedule`: a step that is left out is not judged.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from ..base.text import listed_fields
from .kinds import FLAG, PATH, POSITIVE, Kind, Path, one_of, reusable, whole

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """A field's definition.

    Attributes:
        help: Sentences; the first one stands alone in a command's help.
        kind: The values that it takes.
        typed: The option of `overflow-fast run`, without dashes; None where only its
            file of arguments has it.
        see: The place in docs/ that tells more.
    """

    help: str
    kind: Kind
    typed: str | None = None
    see: str = ""


def option(
    help: str, kind: Kind, typed: str | None = None, see: str = ""
) -> dict[str, Option]:
    """Returns the metadata of a field; see `Option`."""
    return {"option": Option(help, kind, typed, see)}


class Options:
    """A frozen dataclass whose fields are checked when an object is made."""

    _OWNER: ClassVar[str | None] = None  # begins the fields' names in errors

    def __init_subclass__(cls) -> None:
        """Lists the fields in the docstring."""
        own = {n: f for n, f in vars(cls).items() if isinstance(f, Field)}
        if own and cls.__doc__:  # python -OO has none
            helps = ((n, f.metadata["option"].help) for n, f in own.items())
            listed = listed_fields(helps)
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
    owner = f"{snake_case(cls.__name__)}." if cls._OWNER is None else cls._OWNER
    return f"{owner}{field}"


def options_of(cls: type[Any]) -> Iterator[tuple[str, Option]]:
    """The names and definitions of a class's fields, in order."""
    for each in fields(cls):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"]


def snake_case(name: str) -> str:
    """`layer_audit` for `LayerAudit`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def documents(options: type[Options]) -> Any:
    """Returns a decorator that lists the fields of options in a class's docstring.

    They stand in place of a line that says `(the fields of NAME)`.
    """

    def documented(cls: _Class) -> _Class:
        if cls.__doc__:  # python -OO has none
            marker = f"    (the fields of {options.__name__})"
            listed = listed_fields((n, each.help) for n, each in options_of(options))
            cls.__doc__ = inspect.cleandoc(cls.__doc__).replace(marker, listed)
        return cls

    return documented


BUDGET = 8  # forwards


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
            see="guides/explanations.md#why-it-happened",
        ),
    )
    _: KW_ONLY
    budget: int = field(
        default=BUDGET,
        metadata=option(
            "The number of forwards that may find the cause. As many replays of the "
            "step try remedies, and as many more add a change to one.",
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
            "A folder for the report, offending tensors and batch of bad steps. Needs "
            "safetensors.",
            PATH,
            typed="evidence",
            see="formats.md#evidence",
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


_RANKS = option(
    'The ranks that write: "all", a file each; "node", the first of each host '
    '(`LOCAL_RANK` 0); or "rank0".',
    one_of("all", "node", "rank0"),
    see="guides/distributed.md#many-ranks",
)


@dataclass(frozen=True)
class Log(Options):
    """A log: one line of JSON for each judged step, after a header for each run."""

    path: Path = field(
        metadata=option(
            "A file for one line of JSON for each judged step.",
            PATH,
            typed="log",
            see="formats.md#log",
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
    ranks: Literal["all", "node", "rank0"] = field(default="all", metadata=_RANKS)


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
            see="formats.md#flight-record",
        )
    )
    _: KW_ONLY
    mib: float = field(
        default=64,
        metadata=option(
            "The MiB that the file may have; older steps are folded together, and "
            "names for which it has no room are not recorded.",
            POSITIVE,
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
    ranks: Literal["all", "node", "rank0"] = field(default="all", metadata=_RANKS)


@dataclass(frozen=True)
class Schedule(Options):
    """The steps that are watched.

    In between, no module has a hook; in a process with compiled code the hooks stay,
    and do nothing.
    """

    every: int = field(
        default=1,
        metadata=option(
            "Watch one step in this many.",
            whole(1),
            typed="every",
            see="guides/guard.md#steps-that-are-not-judged",
        ),
    )
    _: KW_ONLY
    warmup: int = field(
        default=0,
        metadata=option("The number of first steps that are not watched.", whole(0)),
    )

    def left_out_by(self, step: int) -> str:
        """The field that leaves a step out, or ""."""
        if step < self.warmup:
            return "warmup"
        return "every" if (step - self.warmup) % self.every else ""
