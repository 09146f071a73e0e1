"""The options of a guard: small frozen dataclasses, each field defined once.

A field's metadata holds its help, its check and its form on a command line. From these
come checks, docstrings, pages of the site and the options of `overflow-fast run`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

import torch.distributed as dist

from ..detector.selection import Wanted
from ..scanner.tensors import check_number
from ..scanner.text import either, listed_fields, nearest
from .policy import ACTIONS
from .process import has_process_group
from .verdict.rules import Rules

# Kinds of arguments: which values one takes, and how a command line spells it.


TRIPWIRE = "tripwire"
Path = str | os.PathLike[str]
Metrics = Mapping[str, float]
Exporter = Callable[[int, Metrics], object]


@dataclass(frozen=True)
class Kind:
    """The values that an argument takes.

    Attributes:
        check: Takes the argument's name and value; raises TypeError or ValueError with
            a sentence if it cannot be used.
        parse: Reads the value from a word of a command line; None if no word can give
            it.
        metavar: Stands for the value in a command's help.
        choices: All values, where a command line has a word for each.
        is_flag: True for an option without a value.
        note: Ends the help of an option, such as how several values are separated.
        options: The class of options that hold it, whose fields can be typed.
    """

    check: Callable[[str, Any], None]
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    note: str = ""
    options: type[Any] | None = None


def whole(least: int) -> Kind:
    """Whole numbers from a least one on."""
    return Kind(lambda name, value: check_int(name, value, least), int, "N")


def one_of(*choices: str) -> Kind:
    """A few words."""
    listed = either(map(repr, choices))

    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{name} must be {listed}, got {value!r}")

    return Kind(check, str, choices=choices)


def reusable(value: Any) -> Any:
    """Returns an argument that can be read repeatedly: its iterators as tuples."""
    if isinstance(value, Mapping):
        return {key: reusable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [reusable(each) for each in value]
    if isinstance(value, (tuple, Iterator)) and not callable(value):
        return tuple(reusable(each) for each in value)
    return value


# Checks: each raises TypeError or ValueError with a sentence.


def check_int(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError if an argument is no int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if an argument is no number above 0."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, got {value}")


def check_share(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if an argument is no share."""
    check_positive(name, value)
    if value > 1:
        raise ValueError(f"{name} must be a share of at most 1, got {value}")


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def check_names(name: str, patterns: Any, optional: bool = False) -> None:
    """Raises TypeError if an argument is no list of patterns, or None if `optional`."""
    if patterns is None and optional:
        return
    is_list = isinstance(patterns, Collection) and not isinstance(
        patterns, (str, bytes, Mapping)
    )
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{name} must be a list of patterns of module names, got {patterns!r}"
        )


def check_path(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no path."""
    if not is_path(value):
        raise TypeError(f"{name} must be a path, got {type(value).__name__}")


def is_path(value: Any) -> bool:
    """True for the name of a file."""
    return isinstance(value, (str, os.PathLike))


def check_paths(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no list of paths."""
    is_list = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    if not is_list or not all(map(is_path, value)):
        raise TypeError(f"{name} must be a list of paths, got {value!r}")


def check_watch(name: str, watch: Any) -> None:
    """Raises TypeError or ValueError if `watch` is no list of its names."""
    if isinstance(watch, str) and watch == TRIPWIRE:
        return
    if isinstance(watch, str) or not isinstance(watch, Iterable):
        raise TypeError(f"{name} must be a list of names, or 'tripwire', got {watch!r}")
    for each in watch:
        if each not in Wanted._fields:
            known = ", ".join(repr(field) for field in Wanted._fields)
            wrong = f"{each!r}{nearest(str(each), [*Wanted._fields, TRIPWIRE])}"
            raise ValueError(
                f"{name} must hold names out of {known}, or be 'tripwire', got {wrong}"
            )
    if not list(watch):
        raise ValueError(f"{name} must hold at least one name, got none")
    if "grad_outputs" in watch and "activations" not in watch:
        raise ValueError(
            f"{name} must hold 'activations' where it holds 'grad_outputs'"
        )


def check_ranges(name: str, ranges: Any) -> None:
    """Raises ValueError if `ranges` holds anything but half-open ranges of steps."""
    if ranges is None:
        return
    try:
        is_right = all(0 <= begin < end for begin, end in ranges)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"{name} must hold pairs (first step, step after the last), such as "
            f"[(0, 100)], got {ranges!r}"
        )


def check_group(name: str, group: Any) -> None:
    """Raises TypeError or ValueError if `process_group` cannot be used."""
    if group is None or group is False:
        return
    if isinstance(group, (bool, int, str)):
        raise _wrong_group(name, group)
    if not has_process_group():
        raise ValueError(
            f"{name} was given, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() first"
        )
    if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
        raise _wrong_group(name, group)


def _wrong_group(name: str, group: object) -> TypeError:
    return TypeError(
        f"{name} must be a ProcessGroup, a DeviceMesh, False or None, got "
        f"{type(group).__name__}"
    )


def check_policy(name: str, policy: Any) -> None:
    """Raises ValueError if a policy is neither an action nor a callable."""
    if not callable(policy) and policy not in ACTIONS:
        raise ValueError(
            f"{name} must be 'raise', 'warn', 'skip' or a callable that takes "
            f"a Report and returns one of these, got {policy!r}"
        )


def check_allow(name: str, allow: Any) -> None:
    """Raises TypeError or ValueError if no rules can be made of an argument."""
    Rules({} if allow is None else allow)


def exporters_of(metrics: Any) -> list[Exporter]:
    """The exporters in an argument that may be None, one, or several.

    Raises:
        TypeError: If one of them cannot be called.
    """
    is_one = callable(metrics) or not isinstance(metrics, Iterable)
    several = [metrics] if is_one else metrics
    several = [] if metrics is None else list(several)
    for each in several:
        if not callable(each) or isinstance(each, type):
            raise TypeError(
                "metrics must be a callable that takes the step and a dict of numbers, "
                "such as overflow_fast.integrations.tensorboard.TensorBoardMetrics(), "
                f"a list of them, or None, got {_name(each)}"
            )
    return several


def _name(each: object) -> str:
    if isinstance(each, type):
        return f"the class {each.__name__}"
    return type(each).__name__


def check_metrics(name: str, metrics: Any) -> None:
    """Raises TypeError if an argument holds anything but exporters."""
    exporters_of(metrics)


def check_safetensors() -> None:
    """Raises ImportError if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "evidence needs safetensors to write tensors: run "
            f"`pip install safetensors` ({error})"
        ) from error


# The kinds that several arguments share, or that take a sentence to say.


def _several(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


_COMMAS = "; separated by commas"
POSITIVE = Kind(check_positive, float, "X")
SHARE = Kind(check_share, float, "X")
FLAG = Kind(check_bool, is_flag=True)
PATH = Kind(check_path, str, "PATH")
PATHS = Kind(check_paths, _several, "PATH,...", note=_COMMAS)
PATTERNS = Kind(check_names, _several, "PATTERN,...", note=_COMMAS)
PATTERNS_OR_ALL = Kind(
    lambda name, value: check_names(name, value, optional=True),
    _several,
    "PATTERN,...",
    note=_COMMAS,
)
WATCH = Kind(
    check_watch,
    lambda text: text if text == TRIPWIRE else _several(text),
    "tripwire|KIND,...",
    note="; or the kinds of tensors to check, separated by commas",
)
RANGES = Kind(check_ranges)
GROUP = Kind(check_group)
ALLOW = Kind(check_allow)
METRICS = Kind(check_metrics)
POLICY = Kind(check_policy, str, choices=ACTIONS)


_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """A field's definition.

    Attributes:
        help: Sentences; the first one stands alone in a command's help.
        kind: The values that it takes.
        typed: The option of `overflow-fast run`, without dashes; None for the names of
            the class and the field.
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
    see="guides/ddp.md#many-ranks",
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
